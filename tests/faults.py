"""What can go wrong between the Hub and a model, how each is played here, and what then happens.

    python tests/faults.py

writes the table in docs/hub.md; `test_hub_faults.py` runs every row of it.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from loopback import AnswerFault, BodyFault, Fault, Server, connect, environment

PAGE = Path(__file__).parent.parent / "docs/hub.md"
BEGIN, END = "<!-- written by `make faults` -->\n", "<!-- until here -->\n"

NAME = "someone/model"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
WORDS = "esm.embeddings.word_embeddings.weight"
LOADS = "it loads"


@dataclass
class Scene:
    """Where a fault is played: a server with `NAME` on it, which holds `files`, and a cache in `home`."""

    server: Server
    home: Path
    files: dict[str, bytes]
    stack: ExitStack
    """Is closed once the load has had its outcome."""

    def play(self, kind: AnswerFault | BodyFault, file: str | None = None, **rest: Any) -> Fault:
        return self.server.play(kind, NAME, file, **rest)

    def replace(self, files: dict[str, bytes], remove: str | None = None) -> None:
        self.server.repositories[NAME].commit(files, remove={remove} if remove else set())

    def load_elsewhere(self) -> subprocess.Popen[str]:
        """Start to load in another process; returns once that is fetching the weights."""
        code = f"import outplace; print(outplace.EsmForMaskedLM.from_pretrained({NAME!r}).dtype)"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(self.server, self.home),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while not any(WEIGHTS in request for request in self.server.requests if request.startswith("GET")):
            assert process.poll() is None
            time.sleep(0.01)
        return process


@dataclass(frozen=True)
class Case:
    """A fault.

    Args:
        name: what goes wrong.
        outcome: `LOADS`, or the error, where … is what differs from one machine to another.
        play: makes it go wrong.
        options: of `from_pretrained`.
        cached: whether the cache holds the model before.
        then: options of the next load, which succeeds.
    """

    name: str
    outcome: str
    play: Callable[[Scene], object]
    options: dict[str, Any] = field(default_factory=dict)
    cached: bool = False
    then: dict[str, Any] = field(default_factory=dict)

    def fits(self, outcome: str) -> bool:
        return re.fullmatch(".*".join(map(re.escape, self.outcome.split("…"))), outcome) is not None


def header(tensors: str, length: int | None = None) -> bytes:
    """The first bytes of a safetensors file, whose header says that it has that length."""
    content = tensors.encode()
    return (len(content) if length is None else length).to_bytes(8, "little") + content


def entry(name: str, start: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (4,)) -> str:
    return json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}})[1:-1]


def index(name: str) -> dict[str, bytes]:
    return {INDEX: json.dumps({"weight_map": {"weight": name}}).encode()}


def unconnected(scene: Scene) -> None:
    patch = scene.stack.enter_context(pytest.MonkeyPatch.context())
    connect(patch, Server({}, {}, endpoint="http://127.0.0.1:1"), scene.home)


def cut_short(scene: Scene) -> None:
    (blob,) = {path.resolve() for path in scene.home.rglob(f"snapshots/*/{WEIGHTS}")}
    blob.write_bytes(scene.files[WEIGHTS][:20_000])


def in_another_process(scene: Scene) -> None:
    scene.play("slow", WEIGHTS, times=1)
    process = scene.load_elsewhere()

    def loaded() -> None:
        assert process.communicate(timeout=60)[0] == "torch.float32\n"

    scene.stack.callback(loaded)


def killed(scene: Scene) -> None:
    scene.play("slow", WEIGHTS, times=1, seconds=20)
    process = scene.load_elsewhere()
    process.send_signal(signal.SIGKILL)
    process.wait()
    (left,) = scene.home.rglob("*.incomplete")
    left.write_bytes(
        scene.files[WEIGHTS][:20_000]
    )  # as of a file so large that the client had begun to write


def full_disk(scene: Scene) -> None:
    """No file may be longer than that: what a process without privileges can be refused by a disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    scene.stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limit)


CONFIG = f"cannot fetch config.json of {NAME}"
FILE = f"cannot fetch {WEIGHTS} of {NAME}"
WAY = "the way to the Hub fails"
NOT_CACHED = f"config.json of {NAME} is not in the cache and cannot be fetched"
SLOW_DOWN = "the Hub asks to slow down (429); try again later, or log in for a higher limit"
WRONG = (
    f"CheckpointError: {WEIGHTS} of {NAME} came with a wrong checksum 3 times, and was deleted; try again "
    "later, or over another network"
)
BAD_FILE = f"CheckpointError: …/{WEIGHTS} is not a whole safetensors file: Error while deserializing header"
AGAIN = "; force_download=True fetches it again"

CASES = [
    # Answers
    Case(
        "401: the login is refused",
        f"FileNotFoundError: {CONFIG}: the Hub refuses the login (401); log in with `hf auth login` or pass "
        "a valid token=…",
        lambda scene: None,
        {"token": "hf_expired"},
    ),
    Case(
        "403: the repository is gated",
        f"FileNotFoundError: {CONFIG}: the repository is gated; ask for access on its page, then log in with "
        "`hf auth login` or pass token=…",
        lambda scene: setattr(scene.server.repositories[NAME], "gated", True),
    ),
    Case(
        "403: the token may not read it",
        f"FileNotFoundError: {NOT_CACHED}: the Hub forbids it (403); pass a token=… with the permission",
        lambda scene: scene.play("forbidden"),
    ),
    Case(
        "404: no such repository, or a private one",
        f"FileNotFoundError: {CONFIG}: there is no such repository, or it is private and needs a login "
        "(`hf auth login`) or token=…",
        lambda scene: setattr(scene.server.repositories[NAME], "private", True),
    ),
    Case(
        "404: no such revision",
        f"FileNotFoundError: {CONFIG}: there is no revision 'v9'; give a branch, a tag or a commit",
        lambda scene: None,
        {"revision": "v9"},
    ),
    Case(
        "404: no configuration",
        f"FileNotFoundError: {NAME} holds no config.json",
        lambda scene: scene.replace({}, remove="config.json"),
    ),
    Case(
        "404: no weights",
        f"FileNotFoundError: {NAME} holds no weights: no {WEIGHTS}, {INDEX} or pytorch_model.bin",
        lambda scene: scene.replace({}, remove=WEIGHTS),
    ),
    Case(
        "404: a file of the index is missing",
        f"CheckpointError: …/{INDEX} names gone.safetensors, which {NAME} does not hold",
        lambda scene: scene.replace(index("gone.safetensors"), remove=WEIGHTS),
    ),
    Case("429 with Retry-After, then an answer", LOADS, lambda scene: scene.play("busy", times=2)),
    Case("429 for ever", f"FileNotFoundError: {NOT_CACHED}: {SLOW_DOWN}", lambda scene: scene.play("busy")),
    Case("500, then an answer", LOADS, lambda scene: scene.play("failing", times=2)),
    Case(
        "500 for the bytes of a file, then an answer",
        LOADS,
        lambda scene: scene.play("failing", WEIGHTS, method="GET", times=2),
    ),
    Case(
        "500 for ever",
        f"FileNotFoundError: {NOT_CACHED}: the Hub fails (500); try again later",
        lambda scene: scene.play("failing"),
    ),
    Case(
        "500 for ever, of a forced download",
        f"FileNotFoundError: {CONFIG}: the Hub fails (500); try again later",
        lambda scene: scene.play("failing"),
        {"force_download": True},
    ),
    Case("500 for ever, of what is in the cache", LOADS, lambda scene: scene.play("failing"), cached=True),
    Case(
        "redirects in a circle",
        f"FileNotFoundError: {CONFIG}: {WAY} (Exceeded 20 redirects while resolving …); try again",
        lambda scene: scene.play("redirect loop"),
    ),
    Case(
        "no connection",
        f"FileNotFoundError: {NOT_CACHED}: {WAY} (…Connection refused); try again",
        unconnected,
    ),
    Case("no connection, and it is in the cache", LOADS, unconnected, cached=True),
    Case("silence, then an answer", LOADS, lambda scene: scene.play("silent", times=2)),
    Case(
        "silence for ever",
        f"FileNotFoundError: {NOT_CACHED}: {WAY} (timed out); try again",
        lambda scene: scene.play("silent"),
    ),
    Case("silence for ever, of what is in the cache", LOADS, lambda scene: scene.play("silent"), cached=True),
    # Files on their way
    Case("the connection is reset in mid-file", LOADS, lambda scene: scene.play("reset", WEIGHTS, times=2)),
    Case(
        "the connection is always reset in mid-file",
        f"FileNotFoundError: {FILE}: {WAY} (…Connection reset by peer); try again",
        lambda scene: scene.play("reset", WEIGHTS),
    ),
    Case("the connection closes in mid-file", LOADS, lambda scene: scene.play("truncated", WEIGHTS, times=2)),
    Case(
        "the connection always closes in mid-file",
        f"FileNotFoundError: {FILE}: {WAY} (peer closed connection without sending complete message "
        "body …); try again",
        lambda scene: scene.play("truncated", WEIGHTS),
    ),
    Case("half a file comes as if it were whole", LOADS, lambda scene: scene.play("short", WEIGHTS, times=2)),
    Case(
        "half a file always comes as if it were whole",
        f"FileNotFoundError: {FILE}: Consistency check failed: file should be of size … but has size … "
        f"(…{WEIGHTS}).; try again",
        lambda scene: scene.play("short", WEIGHTS),
    ),
    Case("a bit is another", LOADS, lambda scene: scene.play("damaged", WEIGHTS, times=2)),
    Case(
        "a bit is always another",
        WRONG,
        lambda scene: scene.play("damaged", WEIGHTS),
    ),
    Case(
        "a bit is always another, of a forced download of what is cached",
        WRONG,
        lambda scene: scene.play("damaged", WEIGHTS),
        {"force_download": True},
        cached=True,
    ),
    Case("a file comes slowly", LOADS, lambda scene: scene.play("slow", WEIGHTS, seconds=0.5)),
    Case("a file stops coming, then goes on", LOADS, lambda scene: scene.play("stalled", WEIGHTS, times=2)),
    Case(
        "a file stops coming",
        f"FileNotFoundError: {FILE}: {WAY} (timed out); try again",
        lambda scene: scene.play("stalled", WEIGHTS),
    ),
    # Files that are not what they should be
    Case(
        "an index names a file above its folder",
        f"CheckpointError: …/{INDEX} names '../../etc/passwd', which is no file beside it",
        lambda scene: scene.replace(index("../../etc/passwd"), remove=WEIGHTS),
    ),
    Case(
        "an index names an absolute path",
        f"CheckpointError: …/{INDEX} names '/etc/passwd', which is no file beside it",
        lambda scene: scene.replace(index("/etc/passwd"), remove=WEIGHTS),
    ),
    Case(
        "the configuration is a list",
        "ValueError: …/config.json holds a JSON list, not an object",
        lambda scene: scene.replace({"config.json": b"[]"}),
    ),
    Case(
        "a value of the configuration is of the wrong type",
        "ValueError: EsmConfig.hidden_size is '32', which is not of the type int",
        lambda scene: scene.replace(
            {
                "config.json": json.dumps(
                    json.loads(scene.files["config.json"]) | {"hidden_size": "32"}
                ).encode()
            }
        ),
    ),
    Case(
        "a configuration of 100 MB",
        "ValueError: …/config.json has 100,000,002 bytes; a configuration or an index has 33,554,432 at the "
        "most",
        lambda scene: scene.replace({"config.json": b"{" + b" " * 100_000_000 + b"}"}),
    ),
    Case(
        "weights whose header has 2^63 bytes",
        f"{BAD_FILE}: header too large{AGAIN}",
        lambda scene: scene.replace({WEIGHTS: header("{}", 2**63)}),
    ),
    Case(
        "weights whose tensors overlap",
        f"{BAD_FILE}: invalid offset for tensor `two`{AGAIN}",
        lambda scene: scene.replace(
            {WEIGHTS: header(f"{{{entry('one', 0, 16)}, {entry('two', 8, 24)}}}") + bytes(24)}
        ),
    ),
    Case(
        "weights that name a tensor twice",
        f"{BAD_FILE}: invalid offset for tensor `one`{AGAIN}",
        lambda scene: scene.replace(
            {WEIGHTS: header(f"{{{entry('one', 0, 16)}, {entry('one', 16, 32)}}}") + bytes(32)}
        ),
    ),
    Case(
        "weights of a dtype that torch does not have",
        f"CheckpointError: {WORDS} is not of a floating dtype that {WORDS} can have: F6_E2M3",
        lambda scene: scene.replace(
            {WEIGHTS: header(f"{{{entry(WORDS, 0, 792, 'F6_E2M3', (33, 32))}}}") + bytes(792)}
        ),
    ),
    # This machine
    Case("two processes load it at once", LOADS, in_another_process),
    Case("a process was killed while it fetched", LOADS, killed),
    Case(
        "a file of the cache was cut short, as by a loss of power",
        f"{BAD_FILE}: incomplete metadata, file not fully covered{AGAIN}",
        cut_short,
        cached=True,
        then={"force_download": True},
    ),
    Case(
        "the disk takes no more",
        f"OSError: cannot write {WEIGHTS} of {NAME} to the cache: File too large; make room there, or give "
        "another folder by cache_dir=… or HF_HOME",
        full_disk,
    ),
]


def table() -> str:
    rows = "".join(f"| {case.name} | {_cell(case.outcome)} |\n" for case in CASES)
    return f"| what goes wrong | what happens |\n| --- | --- |\n{rows}"


def _cell(outcome: str) -> str:
    return outcome if outcome == LOADS else "`" + outcome.replace("`", "'") + "`"


def page() -> str:
    """docs/hub.md with the table in its place."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{table()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
