"""A Hub on this machine: serves folders as repositories to the real `huggingface_hub` client."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    """`/{owner}/{name}/resolve/{revision}/{path}`, with the headers that the client reads."""

    protocol_version = "HTTP/1.1"
    repositories: dict[str, Path]
    requests: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        self.requests.append(f"{self.command} {self.path}")
        parts = self.path.partition("?")[0].strip("/").split("/")
        repository = self.repositories.get("/".join(parts[:2]))
        if repository is None:
            return self.refuse("RepoNotFound", "Repository not found")
        if parts[2:3] != ["resolve"] or parts[3] not in ("main", COMMIT):
            return self.refuse("RevisionNotFound", "Revision not found")
        path = repository.joinpath(*parts[4:])
        if not path.is_file():
            return self.refuse("EntryNotFound", "Entry not found")
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def refuse(self, code: str, message: str) -> None:
        self.send_response(404)
        if code == "EntryNotFound":
            self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing on the terminal."""


@contextmanager
def hub(repositories: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve `{"owner/name": folder}`; gives the endpoint's address and the requests it has had so far."""
    requests: list[str] = []
    handler = type("Handler", (_Handler,), {"repositories": repositories, "requests": requests})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
