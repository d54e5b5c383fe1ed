"""The package as a user meets it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import outplace


def run(code: str, cwd: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_importing_it_imports_nothing_else(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import outplace; "
        "third = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "print(sorted(third))"
    )
    assert run(code, tmp_path) == "['outplace']"


def test_using_it_imports_no_upstream(tmp_path: Path) -> None:
    code = (
        "import sys, outplace; [getattr(outplace, name) for name in outplace.__all__]; "
        "print('torch' in sys.modules, sorted({'transformers', 'peft', 'numpy.random'} & set(sys.modules)))"
    )
    assert run(code, tmp_path) == "True []"


def test_public_names_come_from_anywhere(tmp_path: Path) -> None:
    code = "import outplace; print(outplace.DebertaV2ForSequenceClassification)"
    expected = "<class 'outplace.models.deberta_v2.modeling.DebertaV2ForSequenceClassification'>"
    assert run(code, tmp_path) == expected


def test_no_plain_models_or_weights_package_is_installed(tmp_path: Path) -> None:
    code = "import importlib.util as u; print(u.find_spec('models'), u.find_spec('weights'))"
    assert run(code, tmp_path) == "None None"


def test_run_time_dependencies_are_the_four() -> None:
    needed = [r for r in importlib.metadata.requires("outplace") or [] if "extra ==" not in r]
    names = sorted(r.split(">")[0].split("=")[0].strip() for r in needed)
    assert names == ["huggingface_hub", "safetensors", "tokenizers", "torch"]


def test_every_public_name_is_listed_and_there() -> None:
    assert set(outplace.__all__) == set(dir(outplace))
    assert all(getattr(outplace, name) is not None for name in outplace.__all__)


def test_the_version_is_the_distributions() -> None:
    assert outplace.__version__ == importlib.metadata.version("outplace")


def test_importing_it_changes_nothing_in_other_libraries(tmp_path: Path) -> None:
    code = """
import logging, os, random, signal, sys, warnings
import huggingface_hub, safetensors.torch, tokenizers, torch, torch.distributed.tensor.parallel

def state():
    modules = [torch, torch.nn, torch.nn.functional, torch.Tensor, torch.nn.Module, torch.autograd]
    modules += [huggingface_hub, huggingface_hub.constants, safetensors.torch, tokenizers]
    loggers = {name: logging.getLogger(name) for name in ("", "huggingface_hub", "torch")}
    return {
        "attributes": [{k: id(v) for k, v in vars(m).items() if not k.startswith("__")} for m in modules],
        "environment": dict(os.environ),
        "loggers": {name: (x.level, list(x.handlers), x.propagate) for name, x in loggers.items()},
        "warnings": list(warnings.filters),
        "signals": {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)},
        "hooks": (sys.excepthook, sys.displayhook),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "numbers": (
            torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.matmul.allow_tf32,
        ),
        "bars": huggingface_hub.utils.are_progress_bars_disabled(),
    }

huggingface_hub.HfApi, huggingface_hub.hf_hub_download, torch.compile  # fetched on first use, by anybody
before = state()
import outplace
for name in outplace.__all__:
    getattr(outplace, name)
after = state()
new = {k for b, a in zip(before["attributes"], after["attributes"]) for k in b if a.get(k) != b[k]}
print(sorted(new), sorted(k for k in before if k != "attributes" and before[k] != after[k]))
"""
    assert run(code, tmp_path) == "[] []"
