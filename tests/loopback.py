"""A Hub on this machine for the real `huggingface_hub` client: it serves, takes uploads, and fails when told.

Two servers, as the Hub's are two hosts: one for names, revisions and small files, one for the storage that
large files are redirected to. What they answer is what the client reads, and no more.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, get_args
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

Content = Path | Mapping[str, bytes]
"""A folder, or files by their names."""

LARGE_SUFFIXES = (".bin", ".safetensors")
LARGE_BYTES = 10_000_000
POINTER = 134
"""Bytes of what git holds of a large file."""
DATE = "2024-01-01T00:00:00.000Z"


def is_large(name: str, size: int) -> bool:
    """Whether a file goes to the storage, and not into git."""
    return name.endswith(LARGE_SUFFIXES) or size > LARGE_BYTES


class File:
    """A file's bytes, and what the Hub knows it by: SHA-256 where it is large, else git's number."""

    def __init__(self, name: str, content: bytes) -> None:
        self.content = content
        self.large = is_large(name, len(content))

    @cached_property
    def id(self) -> str:
        if self.large:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    def describe(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(self.content), "oid": self.id}
        if self.large:
            entry["lfs"] = {"oid": self.id, "size": len(self.content), "pointerSize": POINTER}
        return entry


@dataclass
class Commit:
    id: str
    parent: str | None
    title: str
    author: str
    files: dict[str, File]


@dataclass
class PullRequest:
    num: int
    title: str
    author: str
    status: str

    @property
    def ref(self) -> str:
        return f"refs/pr/{self.num}"


@dataclass
class Repository:
    """Commits, and what points at them.

    Args:
        content: of the first commit on main, which is empty unless given.
        private: only its owner, the user of its first name, and `readers` know that it exists.
        gated: only they get its files.
    """

    content: Content | None = None
    private: bool = False
    gated: bool = False
    readers: set[str] = field(default_factory=set)
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    pull_requests: list[PullRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.commit(self.content or {}, title="initial commit")

    @property
    def head(self) -> str:
        """The commit that main is at."""
        return self.refs["refs/heads/main"]

    def commit(
        self,
        content: Content,
        ref: str = "main",
        *,
        on: str | None = None,
        remove: Collection[str] = (),
        title: str = "a commit",
        author: str = "someone",
    ) -> str:
        """Add files to those of `on`, or else of the branch, less `remove`; gives the commit's number."""
        ref = ref if ref.startswith("refs/") else f"refs/heads/{ref}"
        parent = on or self.refs.get(ref)
        files = dict(self.commits[parent].files) if parent else {}
        for name in remove:
            del files[name]
        files |= {name: File(name, data) for name, data in _read(content).items()}
        tree = [(name, file.id) for name, file in sorted(files.items())]
        number = hashlib.sha1(repr((parent, title, len(self.commits), tree)).encode()).hexdigest()
        self.commits[number] = Commit(number, parent, title, author, files)
        self.refs[ref] = number
        return number

    def tag(self, name: str, commit: str | None = None) -> None:
        self.refs[f"refs/tags/{name}"] = commit or self.head

    def propose(
        self,
        content: Content,
        *,
        title: str = "a pull request",
        author: str = "someone",
        status: str = "open",
        on: str | None = None,
        remove: Collection[str] = (),
    ) -> PullRequest:
        """Open a pull request of one commit on `on`, or else on what main is at."""
        request = PullRequest(len(self.pull_requests) + 1, title, author, status)
        self.commit(content, request.ref, on=on or self.head, remove=remove, title=title, author=author)
        self.pull_requests.append(request)
        return request

    def find(self, revision: str) -> Commit | None:
        """The commit of a branch, a tag, a full reference or a number."""
        names = (f"refs/heads/{revision}", f"refs/tags/{revision}", revision)
        number = next((self.refs[name] for name in names if name in self.refs), revision)
        return self.commits.get(number)

    def history(self, commit: Commit) -> Iterator[Commit]:
        """The commit and those before it."""
        number: str | None = commit.id
        while number is not None:
            yield self.commits[number]
            number = self.commits[number].parent


def _read(content: Content) -> dict[str, bytes]:
    if isinstance(content, Path):
        paths = [path for path in content.rglob("*") if path.is_file()]
        return {path.relative_to(content).as_posix(): path.read_bytes() for path in paths}
    return dict(content)


AnswerFault = Literal["forbidden", "busy", "failing", "redirect loop", "silent"]
BodyFault = Literal["reset", "truncated", "short", "damaged", "slow", "stalled"]

REFUSALS: dict[str, tuple[int, dict[str, str]]] = {
    "unauthorized": (401, {"X_Error_Message": "Invalid credentials in Authorization header"}),
    "forbidden": (403, {"X_Error_Message": "This token may not read this repository"}),
    "gated": (403, {"X_Error_Code": "GatedRepo", "X_Error_Message": "Access to this model is restricted"}),
    "no repository": (404, {"X_Error_Code": "RepoNotFound", "X_Error_Message": "Repository not found"}),
    "no revision": (404, {"X_Error_Code": "RevisionNotFound", "X_Error_Message": "Invalid rev id"}),
    "no file": (404, {"X_Error_Code": "EntryNotFound", "X_Error_Message": "Entry not found"}),
    "busy": (429, {"Retry_After": "1"}),
    "failing": (500, {"X_Error_Message": "Internal error"}),
    "redirect loop": (302, {}),
}


@dataclass
class Fault:
    """What goes wrong, and where.

    Args:
        kind: one of `REFUSALS`, or "silent", no answer for `seconds`. Or of a body: "reset" and "truncated",
            where half has come the connection is reset or closed; "short", half of it, as if that were all;
            "damaged", one bit is another; "slow", it takes `seconds`; "stalled", half has come and then
            nothing for `seconds`.
        file: one of the repository's, "" for what is asked of the repository itself; any unless given.
        method: of HTTP; any unless given.
        times: how often; always unless given.
        played: how often it has been so far.
    """

    kind: AnswerFault | BodyFault
    repository: str
    file: str | None = None
    method: str | None = None
    times: int | None = None
    seconds: float = 1.5
    played: int = 0


@dataclass
class Server:
    """What `hub` gives: its address, what it serves, what it was asked, and what it does wrong."""

    repositories: dict[str, Repository]
    users: dict[str, str]
    """Names by their tokens."""
    endpoint: str = ""
    storage: str = ""
    requests: list[str] = field(default_factory=list)
    """Those that are answered; the client also asks for news of its own."""
    sent: int = 0
    """Bytes of bodies, files' and others'."""
    faults: list[Fault] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)

    def play(
        self, kind: AnswerFault | BodyFault, repository: str, file: str | None = None, **rest: Any
    ) -> Fault:
        """Add a fault; see `Fault`. It ends when it is taken out of `faults`."""
        fault = Fault(kind, repository, file, **rest)
        self.faults.append(fault)
        return fault

    def next_fault(self, kinds: Any, method: str, repository: str, file: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if (
                    fault.kind in get_args(kinds)
                    and fault.repository == repository
                    and fault.file in (None, file)
                    and fault.method in (None, method)
                    and (fault.times is None or fault.played < fault.times)
                ):
                    fault.played += 1
                    return fault
        return None


class Refused(Exception):
    """A request that is answered by one of `REFUSALS`."""

    def __init__(self, kind: str, **headers: str) -> None:
        self.kind, self.headers = kind, headers


class _Handler(BaseHTTPRequestHandler):
    """Finds the route of a request, and sends what it gives."""

    protocol_version = "HTTP/1.1"
    routes: ClassVar[list[tuple[str, str, str]]]
    hub: Server

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        address = urlsplit(self.path)
        self.query = parse_qs(address.query)
        for methods, pattern, name in self.routes:
            found = re.fullmatch(pattern, address.path)
            if self.command in methods.split() and found:
                self.hub.requests.append(f"{self.command} {self.path}")
                groups = {
                    key: unquote(value) for key, value in found.groupdict().items() if value is not None
                }
                try:
                    getattr(self, name)(**groups)
                except Refused as refused:
                    status, headers = REFUSALS[refused.kind]
                    self.send(status, **headers, **refused.headers)
                return
        self.send(404, b"no such route")

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *args: object) -> None:
        """Nothing on the terminal."""

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.write(body)

    def write(self, body: bytes) -> None:
        self.wfile.write(body)
        with self.hub.lock:
            self.hub.sent += len(body)

    def fail(self, repository: str, file: str) -> None:
        """Let the fault happen that is due before any answer."""
        fault = self.hub.next_fault(AnswerFault, self.command, repository, file)
        if fault is None:
            return
        if fault.kind == "silent":
            time.sleep(fault.seconds)
        else:
            raise Refused(fault.kind, **({"Location": self.path} if fault.kind == "redirect loop" else {}))

    def send_json(self, value: Any, status: int = 200) -> None:
        self.send(status, json.dumps(value).encode(), Content_Type="application/json")

    def send_file(self, repository: str, name: str, file: File, **headers: str) -> None:
        """A file or the range of it that is asked for, with the fault that is due."""
        content, status, start = file.content, 200, 0
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            status, start = 206, int(asked[1])
            end = min(int(asked[2] or len(content)) + 1, len(content))
            headers["Content_Range"] = f"bytes {start}-{end - 1}/{len(content)}"
            content = content[:end]
        fault = None
        if self.command == "GET":
            fault = self.hub.next_fault(BodyFault, self.command, repository, name)
        if fault is None:
            return self.send(status, content[start:], **headers)
        half = max(0, len(content) // 2 - start)
        if fault.kind == "short":
            return self.send(status, content[start:][:half], **headers)
        if fault.kind == "damaged":
            at = len(content) * 3 // 4
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
            return self.send(status, content[start:], **headers)
        self.send(status, Content_Length=str(len(content) - start), **headers)
        if fault.kind == "slow":
            for i in range(start, len(content), step := len(content) // 10 + 1):
                time.sleep(fault.seconds / 10)
                self.write(content[i : i + step])
            return None
        self.write(content[start:][:half])
        self.close_connection = True
        if fault.kind == "stalled":
            time.sleep(fault.seconds)
        elif fault.kind == "reset":
            time.sleep(0.05)  # or what was sent would be lost too
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
        return None


REPOSITORY = r"(?P<name>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"
API = f"/api/models/{REPOSITORY}"


class _Hub(_Handler):
    routes: ClassVar = [
        ("HEAD GET", f"/{REPOSITORY}/resolve/{REVISION}/(?P<file>.+)", "resolve"),
        ("GET", f"{API}(?:/revision/{REVISION})?", "info"),
        ("GET", f"{API}/tree/{REVISION}", "tree"),
        ("GET", f"{API}/commits/{REVISION}", "list_commits"),
        ("GET", f"{API}/discussions", "list_discussions"),
        ("POST", "/api/repos/create", "create_repository"),
        ("POST", "/api/validate-yaml", "validate_card"),
        ("POST", f"{API}/branch/{REVISION}", "create_branch"),
        ("POST", f"{API}/preupload/{REVISION}", "preupload"),
        ("POST", f"/{REPOSITORY}[.]git/info/lfs/objects/batch", "plan_uploads"),
        ("POST", f"{API}/commit/{REVISION}", "add_commit"),
    ]

    def user(self) -> str | None:
        return self.hub.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def known_user(self) -> str:
        user = self.user()
        if user is None:
            raise Refused("unauthorized")
        return user

    def open(self, name: str, file: str = "", *, write: bool = False) -> Repository:
        """The repository, if this user may have what is asked."""
        self.fail(name, file)
        repository, user = self.hub.repositories.get(name), self.user()
        if user is None and "Authorization" in self.headers:
            raise Refused("unauthorized")
        known = user is not None and (
            user == name.partition("/")[0] or (repository is not None and user in repository.readers)
        )
        if repository is None or (repository.private and not known):
            raise Refused("no repository")
        if repository.gated and not known and file:
            raise Refused("gated")
        if write and not known:
            raise Refused("forbidden")
        return repository

    def open_commit(
        self, name: str, revision: str, file: str = "", *, write: bool = False
    ) -> tuple[Repository, Commit]:
        repository = self.open(name, file, write=write)
        commit = repository.find(revision)
        if commit is None:
            raise Refused("no revision")
        return repository, commit

    # Reading

    def resolve(self, name: str, revision: str, file: str) -> None:
        _, commit = self.open_commit(name, revision, file)
        entry = commit.files.get(file)
        if entry is None:
            raise Refused("no file", X_Repo_Commit=commit.id)
        if entry.large:
            self.send(
                302,
                Location=f"{self.hub.storage}/{name}/{entry.id}/{quote(file)}",
                X_Repo_Commit=commit.id,
                X_Linked_Etag=f'"{entry.id}"',
                X_Linked_Size=str(len(entry.content)),
            )
        else:
            self.send_file(name, file, entry, X_Repo_Commit=commit.id, ETag=f'"{entry.id}"')

    def info(self, name: str, revision: str = "main") -> None:
        _, commit = self.open_commit(name, revision)
        self.send_json(
            {
                "id": name,
                "sha": commit.id,
                "siblings": [{"rfilename": path} for path in sorted(commit.files)],
            }
        )

    def tree(self, name: str, revision: str) -> None:
        """All files; the client asks for no single folder, and for the sake of files only."""
        _, commit = self.open_commit(name, revision)
        self.send_json([file.describe(path) for path, file in sorted(commit.files.items())])

    def list_commits(self, name: str, revision: str) -> None:
        repository, last = self.open_commit(name, revision)
        listed = [
            {
                "id": commit.id,
                "title": commit.title,
                "message": "",
                "date": DATE,
                "authors": [{"user": commit.author}],
            }
            for commit in repository.history(last)
        ]
        self.send_json(listed)

    def list_discussions(self, name: str) -> None:
        listed = [
            {
                "num": request.num,
                "title": request.title,
                "author": {"name": request.author},
                "status": request.status,
                "isPullRequest": True,
                "createdAt": DATE,
                "repo": {"name": name, "type": "model"},
            }
            for request in reversed(self.open(name).pull_requests)
        ]
        self.send_json({"discussions": listed, "count": len(listed), "start": 0})

    # Writing

    def create_repository(self) -> None:
        asked, user = json.loads(self.body), self.known_user()
        name = f"{asked['organization'] or user}/{asked['name']}"
        if user != name.partition("/")[0]:
            raise Refused("forbidden")
        status = 409 if name in self.hub.repositories else 200
        self.hub.repositories.setdefault(name, Repository(private=asked.get("visibility") == "private"))
        self.send_json({"url": f"{self.hub.endpoint}/{name}", "name": name}, status)

    def validate_card(self) -> None:
        self.send_json({"errors": [], "warnings": []})

    def create_branch(self, name: str, revision: str) -> None:
        start = json.loads(self.body).get("startingPoint", "main")
        repository, commit = self.open_commit(name, start, write=True)
        taken = f"refs/heads/{revision}" in repository.refs
        repository.refs.setdefault(f"refs/heads/{revision}", commit.id)
        self.send_json({"error": "Reference already exists"} if taken else {}, 409 if taken else 200)

    def preupload(self, name: str, revision: str) -> None:
        _, commit = self.open_commit(name, revision, write="create_pr" not in self.query)
        answers = []
        for asked in json.loads(self.body)["files"]:
            there = commit.files.get(asked["path"])
            answers.append(
                {
                    "path": asked["path"],
                    "uploadMode": "lfs" if is_large(asked["path"], asked["size"]) else "regular",
                    "shouldIgnore": False,
                    "oid": None if there is None else there.id,
                }
            )
        self.send_json({"files": answers})

    def plan_uploads(self, name: str) -> None:
        self.open(name)
        plans = []
        for asked in json.loads(self.body)["objects"]:
            plan = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.uploads:
                plan["actions"] = {"upload": {"href": f"{self.hub.storage}/uploads/{asked['oid']}"}}
            plans.append(plan)
        self.send_json({"transfer": "basic", "objects": plans})

    def add_commit(self, name: str, revision: str) -> None:
        as_request = "create_pr" in self.query
        repository, commit = self.open_commit(name, revision, write=not as_request)
        change: dict[str, Any] = {"author": self.known_user(), "remove": set()}
        content: dict[str, bytes] = {}
        for line in self.body.splitlines():
            key, value = json.loads(line).values()
            if key == "header":
                change["title"] = value["summary"]
            elif key == "file":
                content[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                content[value["path"]] = self.hub.uploads[value["oid"]]
            elif key == "deletedFile":
                change["remove"].add(value["path"])
        base, address = f"{self.hub.endpoint}/{name}", None
        with self.hub.lock:
            if as_request:
                request = repository.propose(content, on=commit.id, **change)
                number, address = repository.refs[request.ref], f"{base}/discussions/{request.num}"
            else:
                number = repository.commit(content, revision, **change)
        self.send_json(
            {"commitUrl": f"{base}/commit/{number}", "commitOid": number, "pullRequestUrl": address}
        )


class _Storage(_Handler):
    """Large files by their SHA-256, to anybody who knows the address; as other stores, it takes no tokens."""

    routes: ClassVar = [
        ("GET", f"/{REPOSITORY}/(?P<number>[0-9a-f]+)/(?P<file>.+)", "fetch"),
        ("PUT", "/uploads/(?P<number>[0-9a-f]+)", "store"),
    ]

    def fetch(self, name: str, number: str, file: str) -> None:
        if "Authorization" in self.headers:
            return self.send(400, b"one way of authentication at a time")
        self.fail(name, file)
        for commit in self.hub.repositories[name].commits.values():
            entry = commit.files.get(file)
            if entry is not None and entry.id == number:
                return self.send_file(name, file, entry, ETag=f'"{number}"')
        return self.send(403, b"no such object")

    def store(self, number: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != number:
            return self.send(400, b"the checksum is another")
        self.hub.uploads[number] = self.body
        return self.send(200)


class _Listener(ThreadingHTTPServer):
    """Hangs up when it closes: a client would go on talking to it by the connections that it keeps."""

    def __init__(self, handler: type[_Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.connections: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self.connections):
            with suppress(OSError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error; others are shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def hub(
    repositories: Mapping[str, Repository | Content], users: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Serve `{"owner/name": folder or Repository}` until the block ends.

    Args:
        users: names by their tokens; each owns the repositories under its name.
    """
    made = {
        name: item if isinstance(item, Repository) else Repository(item)
        for name, item in repositories.items()
    }
    served = Server(made, dict(users or {}))
    listeners = []
    for kind in (_Hub, _Storage):
        handler = type(kind.__name__, (kind,), {"hub": served})
        listeners.append(_Listener(handler))
    served.endpoint, served.storage = (f"http://127.0.0.1:{one.server_address[1]}" for one in listeners)
    threads = [threading.Thread(target=one.serve_forever, args=(0.05,)) for one in listeners]
    for thread in threads:
        thread.start()
    try:
        yield served
    finally:
        for one, thread in zip(listeners, threads, strict=True):
            one.shutdown()
            thread.join()
            one.server_close()


def environment(server: Server, home: Path, **more: str) -> dict[str, str]:
    """The environment of a process whose client asks the server and has its cache in `home`."""
    ours = {
        "HF_ENDPOINT": server.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1",
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return inherited | ours | more


def connect(patch: pytest.MonkeyPatch, server: Server, home: Path) -> None:
    """Turn this process's client to the server and a cache in `home`.

    The client reads its environment once, when it is imported; these are the constants it makes of what
    `environment` has.
    """
    constants = {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,  # the server takes uploads by the older way
    }
    for name, value in constants.items():
        patch.setattr(f"huggingface_hub.constants.{name}", value)
    patch.delenv("HF_TOKEN", raising=False)
    if "transformers.utils.hub" in sys.modules:  # where upstream keeps a client, with its address
        patch.setattr("transformers.utils.hub._hf_api", None)


def disconnect(patch: pytest.MonkeyPatch) -> None:
    """As HF_HUB_OFFLINE=1."""
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def hurry(patch: pytest.MonkeyPatch, timeout: float = 0.5) -> list[float]:
    """Make the client, and us, try again at once, and give up on silence soon; gives the waits left out."""
    waits: list[float] = []
    clock = SimpleNamespace(**vars(time) | {"sleep": waits.append})
    for module in ("huggingface_hub.utils._http", "huggingface_hub.file_download", "outplace.weights.hub"):
        patch.setattr(f"{module}.time", clock)
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        patch.setattr(f"huggingface_hub.constants.{name}", timeout)
    patch.setattr("huggingface_hub.file_download._ETAG_RETRY_TIMEOUT", timeout)
    return waits
