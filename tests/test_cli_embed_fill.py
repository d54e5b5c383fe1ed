"""`outplace embed` and `outplace fill`, and the functions below them."""

from __future__ import annotations

import fcntl
import functools
import gzip
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from outplace.models.esm.tokenizer import VOCABULARY
from safetensors import safe_open
from torch import Tensor

from outplace import EsmForMaskedLM, EsmModel, EsmTokenizer, __version__
from outplace.cli import main
from outplace.embed import batches_within, embed_records, with_unique_names
from outplace.fasta import Record, read_fasta
from outplace.fill import fill_masks, parse_masked

FEW = Path(__file__).parent / "data" / "few_proteins.fasta"
SOME = Path(__file__).parents[1] / "benchmarks" / "nano" / "data" / "some_proteins.fasta"
POOLS = ("mean", "cls", "none")


def save_upstream(folder: Path, model_class: Any = transformers.EsmForMaskedLM, **fields: Any) -> Path:
    """A tiny random checkpoint as upstream writes it."""
    torch.manual_seed(0)
    config = transformers.EsmConfig(
        vocab_size=33,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        mask_token_id=32,
        pad_token_id=1,
        token_dropout=True,
        emb_layer_norm_before=False,
        initializer_range=0.2,
        **{"position_embedding_type": "rotary"} | fields,
    )
    model_class(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_upstream(tmp_path_factory.mktemp("esm"))


@pytest.fixture(scope="session")
def absolute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with room for 100 residues."""
    folder = tmp_path_factory.mktemp("esm1b")
    return save_upstream(folder, position_embedding_type="absolute", max_position_embeddings=104)


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> tuple[EsmModel, EsmTokenizer]:
    model = EsmModel.from_pretrained(checkpoint, add_pooling_layer=False)
    return model, EsmTokenizer.from_pretrained(checkpoint)


@cache
def upstream(checkpoint: Path, dtype: torch.dtype) -> Any:
    return transformers.EsmModel.from_pretrained(checkpoint, dtype=dtype, add_pooling_layer=False).eval()


def upstream_embedding(checkpoint: Path, sequence: str, pool: str, dtype: torch.dtype) -> Tensor:
    """What upstream makes of one protein by itself, tokenized by hand."""
    ids = [VOCABULARY.index(letter if letter in VOCABULARY else "X") for letter in sequence]
    with torch.no_grad():
        states = upstream(checkpoint, dtype)(torch.tensor([[0, *ids, 2]])).last_hidden_state[0]
    return {"mean": states[1:-1].mean(0), "cls": states[0], "none": states[1:-1]}[pool]


def contents(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def error_of(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line that a failing command leaves."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert line.startswith("outplace: error: ")
    return line.removeprefix("outplace: error: ")


# Embedding


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_embeddings_are_upstreams_of_each_protein_alone(
    checkpoint: Path, tmp_path: Path, pool: str, dtype: str
) -> None:
    out = tmp_path / "out.safetensors"
    arguments = ["embed", FEW, "-o", out, "--model", checkpoint, "--pool", pool, "--dtype", dtype]
    assert main([*map(str, arguments)]) == 0
    vectors, _ = contents(out)
    records = list(read_fasta(FEW))
    assert vectors.keys() == {record.name for record in records}
    for record in records:
        expected = upstream_embedding(checkpoint, record.sequence, pool, getattr(torch, dtype))
        torch.testing.assert_close(vectors[record.name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("batch_tokens", [200, 100_000])
def test_batching_changes_no_embedding(
    loaded: tuple[EsmModel, EsmTokenizer], pool: Any, batch_tokens: int
) -> None:
    records = sorted(read_fasta(SOME), key=lambda record: len(record.sequence))[:6]
    batched = embed_records(*loaded, records, pool=pool, batch_tokens=batch_tokens)
    together = {record.name: vector for record, vector in batched}
    for record in records:
        ((_, alone),) = embed_records(*loaded, [record], pool=pool)
        torch.testing.assert_close(together[record.name], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sequence", ["M", "LJJA", "JJ", "MXBUZO", "MKT" * 50])
def test_each_residue_has_a_state(
    loaded: tuple[EsmModel, EsmTokenizer], checkpoint: Path, sequence: str
) -> None:
    ((_, states),) = embed_records(*loaded, [Record("a", "", sequence, 1)], pool="none")
    assert states.shape == (len(sequence), 32)
    expected = upstream_embedding(checkpoint, sequence, "none", torch.float32)
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def test_ten_thousand_residues_and_one_are_embedded_together(loaded: tuple[EsmModel, EsmTokenizer]) -> None:
    records = [Record("short", "", "M", 1), Record("long", "", "MKTLLVAGEW" * 1000, 3)]
    found = {record.name: vector for record, vector in embed_records(*loaded, records, pool="none")}
    assert found["long"].shape == (10_000, 32)
    assert found["short"].shape == (1, 32)
    assert all(vector.isfinite().all() for vector in found.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pool", ["mean", "none"])
def test_results_have_the_dtype_asked_for(checkpoint: Path, tmp_path: Path, dtype: str, pool: str) -> None:
    out = tmp_path / "out.safetensors"
    arguments = ["embed", FEW, "-o", out, "--model", checkpoint, "--dtype", dtype, "--pool", pool]
    assert main([*map(str, arguments)]) == 0
    vectors, _ = contents(out)
    for record in read_fasta(FEW):
        expected = upstream_embedding(checkpoint, record.sequence, pool, torch.float32)
        assert vectors[record.name].dtype == getattr(torch, dtype)
        torch.testing.assert_close(vectors[record.name].float(), expected, rtol=0.05, atol=0.05)


def test_the_header_holds_the_order_and_how_the_vectors_were_made(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert main(["embed", str(SOME), "-o", str(out), "--model", str(checkpoint)]) == 0
    _, metadata = contents(out)
    names = [record.name for record in read_fasta(SOME)]
    assert json.loads(metadata.pop("order")) == names
    assert metadata == {"format": "pt", "model": str(checkpoint), "pool": "mean", "outplace": __version__}


def test_a_letter_without_a_token_is_warned_of(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text(">a\nMJJXK\n")
    assert main(["embed", str(fasta), "-o", str(tmp_path / "o"), "--model", str(checkpoint)]) == 0
    assert "warning: 2 residues (J) have no token" in capsys.readouterr().err


def test_the_warning_for_a_repeated_name_is_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fasta, out = tmp_path / "x.fasta", tmp_path / "o"
    fasta.write_text(">a\nM\n>a\nK\n>a\nW\n>\nL\n>__metadata__\nV\n")
    assert main(["embed", str(fasta), "-o", str(out), "--model", str(checkpoint), "--pool", "none"]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("outplace: warning")]
    assert len(warnings) == 1
    vectors, metadata = contents(out)
    assert json.loads(metadata["order"]) == ["a", "a#2", "a#3", "record_4", "__metadata__#2"]
    assert sorted(vectors) == sorted(json.loads(metadata["order"]))


NAMES = st.lists(st.sampled_from(["", "a", "a#2", "a#3", "b", "record_1", "record_2", "__metadata__"]))


@given(NAMES)
def test_names_become_unique_and_a_unique_name_stays(names: list[str]) -> None:
    unique = [r.name for r in with_unique_names([Record(name, "", "M", 1) for name in names])]
    assert len(set(unique)) == len(names)
    assert "" not in unique
    for name, new in zip(names, unique, strict=True):
        assert new == name or names.count(name) > 1 or name in ("", "__metadata__")


@given(st.lists(st.integers(1, 50)), st.integers(1, 120))
def test_batches_hold_each_place_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = batches_within(budget, lengths)
    assert sorted(place for batch in batches for place in batch) == [*range(len(lengths))]
    padded = [len(batch) * max(lengths[place] for place in batch) for batch in batches]
    assert all(size <= budget or len(batch) == 1 for size, batch in zip(padded, batches, strict=True))
    in_order = [lengths[place] for batch in batches for place in batch]
    assert in_order == sorted(lengths, reverse=True)


def test_embedding_starts_with_the_longest(loaded: tuple[EsmModel, EsmTokenizer]) -> None:
    found = [len(record.sequence) for record, _ in embed_records(*loaded, list(read_fasta(FEW)))]
    assert found == sorted(found, reverse=True)


def test_the_caller_is_not_left_in_inference_mode(loaded: tuple[EsmModel, EsmTokenizer]) -> None:
    for _ in embed_records(*loaded, list(read_fasta(FEW))):
        assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("options", [{"pool": "max"}, {"batch_tokens": 0}])
def test_a_wrong_option_is_refused_at_once(
    loaded: tuple[EsmModel, EsmTokenizer], options: dict[str, Any]
) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        embed_records(*loaded, [], **options)


# Filling masks


def test_masks_are_filled_as_upstream_would(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fill", "MK<mask>LLV<mask>", "--model", str(checkpoint), "--top", "3", "--json"]
    assert main(arguments) == 0
    masks = json.loads(capsys.readouterr().out)["masks"]
    model = transformers.EsmForMaskedLM.from_pretrained(checkpoint).eval()
    ids = [VOCABULARY.index(t) for t in ["<cls>", "M", "K", "<mask>", "L", "L", "V", "<mask>", "<eos>"]]
    probabilities = model(torch.tensor([ids])).logits[0].softmax(-1)
    assert [mask["position"] for mask in masks] == [3, 7]
    for mask in masks:
        row = probabilities[mask["position"]]
        by_residue = {residue: row[VOCABULARY.index(residue)].item() for residue in "ACDEFGHIKLMNPQRSTVWY"}
        likeliest = sorted(by_residue, key=lambda residue: -by_residue[residue])[:3]
        assert list(mask["residues"]) == likeliest
        assert mask["residues"] == pytest.approx({r: by_residue[r] for r in likeliest}, rel=1e-4)


def test_the_table_has_a_line_a_mask(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    protein = ">protéine\nMKT\n<mask>L\nV<mask>\n".encode("latin-1")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(protein)))
    assert main(["fill", "-", "--model", str(checkpoint), "--top", "2"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.startswith("residue")
    assert first.split()[0] == "4"
    assert second.split()[0] == "7"
    assert len(first.split()) == 1 + 2 * 2


def test_there_are_no_more_residues_than_the_standard_ones(checkpoint: Path) -> None:
    model, tokenizer = EsmForMaskedLM.from_pretrained(checkpoint), EsmTokenizer.from_pretrained(checkpoint)
    (filled,) = fill_masks(model, tokenizer, "M<mask>", top=100)
    assert sorted(filled.residues) == sorted("ACDEFGHIKLMNPQRSTVWY")
    assert 0 < sum(filled.residues.values()) <= 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mk<mask>t", "MK<mask>T"),
        ("<mask>", "<mask>"),
        ("<mask><mask>", "<mask><mask>"),
        ("M*<mask>*\n", "MX<mask>"),
        ("M-<mask>.K", "M<mask>K"),
        (">name <mask>\r\nMK<ma\r\nsk>\r\n", "MK<mask>"),
    ],
)
def test_a_masked_sequence_is_read_like_fasta(text: str, expected: str) -> None:
    assert parse_masked(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MKT", "no <mask>"),
        ("", "no <mask>"),
        ("M1<mask>", "'1' is no residue"),
        ("M_<mask>", "'_' is no residue"),
        ("M<pad><mask>", "'<' is no residue"),
        ("M<mask> KT", "several sequences"),
        ("M<mask>\nKT", "several sequences"),
        (">a\nM<mask>\n>b\nK", "several sequences"),
        ("MK\n>a\nM<mask>", "before the '>'"),
    ],
)
def test_what_is_no_masked_sequence_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_masked(text)


# Errors and exit statuses


def test_a_protein_beyond_absolute_positions_is_refused_before_any_work(
    absolute: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fasta = tmp_path / "x.fasta"
    fasta.write_text(f">fits\n{'M' * 100}\n>long\n{'M' * 101}\n")
    monkeypatch.setattr(EsmModel, "forward", lambda *_: pytest.fail("it was run"))
    error = error_of(capsys, "embed", fasta, "-o", tmp_path / "o", "--model", absolute)
    assert "'long' (line 3) has 101 residues" in error
    assert "allow 100" in error


@pytest.mark.parametrize("pool", POOLS)
def test_a_protein_that_just_fits_absolute_positions_is_embedded(absolute: Path, pool: Any) -> None:
    model = EsmModel.from_pretrained(absolute, add_pooling_layer=False)
    records = [Record("a", "", "MKTLL" * 20, 1), Record("b", "", "MK", 3)]
    for record, vector in embed_records(model, EsmTokenizer(), records, pool=pool):
        expected = upstream_embedding(absolute, record.sequence, pool, torch.float32)
        torch.testing.assert_close(vector, expected, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_without_the_weights_needed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headless = save_upstream(tmp_path, transformers.EsmModel)
    assert "lacks" in error_of(capsys, "fill", "M<mask>", "--model", headless)


def test_failures_are_one_line_and_leave_no_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, empty, out = tmp_path / "bad.fasta", tmp_path / "empty.fasta", tmp_path / "out"
    bad.write_text(">a\nM7\n")
    empty.write_text("")
    tiny = ("--model", checkpoint)
    assert "bad.fasta, line 2: '7'" in error_of(capsys, "embed", bad, "-o", out, *tiny)
    assert "holds no proteins" in error_of(capsys, "embed", empty, "-o", out, *tiny)
    assert "No such file" in error_of(capsys, "embed", tmp_path / "none", "-o", out, *tiny)
    assert "Is a directory" in error_of(capsys, "embed", tmp_path, "-o", out, *tiny)
    assert "is the input" in error_of(capsys, "embed", bad, "-o", bad, *tiny)
    assert "no regular file" in error_of(capsys, "embed", FEW, "-o", tmp_path, *tiny)
    assert "there is no folder" in error_of(capsys, "embed", FEW, "-o", tmp_path / "no" / "out", *tiny)
    assert "there is no folder" in error_of(capsys, "embed", FEW, "-o", out, "--model", tmp_path / "no")
    assert "no config.json" in error_of(capsys, "fill", "M<mask>", "--model", _only_a_vocabulary(tmp_path))
    for device in ("gpu", "cuda:99", "meta"):
        assert f"device '{device}'" in error_of(capsys, "embed", FEW, "-o", out, *tiny, "--device", device)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.fasta", "empty.fasta", "vocabulary"]


def _only_a_vocabulary(folder: Path) -> Path:
    (folder / "vocabulary").mkdir()
    (folder / "vocabulary" / "vocab.txt").write_text("\n".join(VOCABULARY))
    return folder / "vocabulary"


def test_running_out_of_memory_is_no_traceback(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(EsmModel, "forward", forward)
    error = error_of(capsys, "embed", FEW, "-o", tmp_path / "o", "--model", checkpoint)
    assert error == "CUDA out of memory. Tried to allocate 2 GiB"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["embed", "x.fasta"],
        ["embed", "x.fasta", "-o", "o", "--pool", "max"],
        ["embed", "x.fasta", "-o", "o", "--batch-tokens", "0"],
        ["embed", "x.fasta", "-o", "o", "--batch-tokens", "many"],
        ["fill", "M<mask>", "--top", "0"],
        ["fill", "M<mask>", "KT"],
    ],
)
def test_wrong_usage_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: outplace" in capsys.readouterr().err


def test_help_is_quick_to_come_and_says_what_the_file_holds() -> None:
    code = (
        "import sys, outplace.cli\n"
        "try: outplace.cli.main(sys.argv[1:])\n"
        "finally: print(sorted({'torch', 'safetensors', 'huggingface_hub', 'tokenizers'} & set(sys.modules)))"
    )
    for arguments, expected in (
        (["--help"], "embed"),
        (["embed", "--help"], "metadata"),
        (["fill", "--help"], "example"),
        (["--version"], __version__),
    ):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 0
        assert expected in done.stdout
        assert done.stdout.splitlines()[-1] == "[]"


# Pipes, terminals and signals


def test_a_run_in_a_pipe_reads_gzip_and_draws_no_progress_bar(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    command = [sys.executable, "-m", "outplace.cli", "embed", "-", "-o", out, "--model", checkpoint]
    done = subprocess.run(command, input=gzip.compress(FEW.read_bytes()), capture_output=True)
    assert done.returncode == 0
    assert len(contents(out)[0]) == 3
    assert done.stdout == b""
    assert done.stderr.count(b"\n") == 1
    assert b"\r" not in done.stderr
    assert b"3 proteins" in done.stderr


def test_a_run_on_a_terminal_draws_one(checkpoint: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    command = [sys.executable, "-m", "outplace.cli", "embed", FEW, "-o", tmp_path / "o"]
    with subprocess.Popen([*command, "--model", checkpoint], stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
    os.close(ours)
    assert process.returncode == 0
    assert b"residue/s" in shown
    assert shown.splitlines()[-1].lstrip().startswith(str(tmp_path / "o").encode())


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that the other end is closed
        return b""


PRINTS = """
import sys
import outplace.fill
from outplace.cli import main

outplace.fill.run = lambda args: print("residue") or 0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("buffering", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["fill", "M<mask>"]])
def test_a_reader_that_leaves_is_no_error(arguments: list[str], buffering: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"PYTHONUNBUFFERED": buffering}
    command = [sys.executable, "-c", PRINTS, *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment)
    os.close(writer)
    assert done.stderr == b""
    # argparse itself hides the error of an unbuffered write
    assert done.returncode == (0 if arguments == ["--help"] and buffering else 141)


SLOW = """
import sys, time, types
import outplace.embed
from outplace.cli import main

def forever(*args, **kwargs):
    print("started", flush=True)
    time.sleep(60)

sys.modules["outplace.models.esm"] = types.SimpleNamespace(EsmModel=None)
outplace.embed.load = forever
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "status", "left"),
    [(signal.SIGINT, 130, 0), (signal.SIGTERM, 143, 0), (signal.SIGKILL, -signal.SIGKILL, 1)],
)
def test_a_killed_run_leaves_nothing_under_the_final_name(
    tmp_path: Path, number: int, status: int, left: int
) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"of an earlier run")
    command = [sys.executable, "-c", SLOW, "embed", FEW, "-o", out]
    # A background job of a shell ignores SIGINT, and so would what it starts.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, preexec_fn=heed) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"started\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == status
        assert process.stderr.read() == b""
    assert out.read_bytes() == b"of an earlier run"
    assert len(list(tmp_path.glob(".outplace-*.tmp"))) == left
