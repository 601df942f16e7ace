"""A hub of one model on loopback, with the parts of the real one that `huggingface_hub` uses, over plain
HTTP.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "5f" * 20
REPO = "somebody/odd"


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignore a client that went away: that is no error."""


class FakeHub:
    """Serve the files of ``directory`` as ``somebody/odd``. ``asked`` lists the downloaded files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # The file and the first requested byte of each download.
        self.asked: list[tuple[str, int]] = []
        # The bytes of each file that were sent.
        self.served: dict[str, int] = {}
        # For each request of weights, the bytes until the connection ends.
        self.cuts: list[int] = []
        # Weights are sent up to this byte, and then the connection stalls.
        self.stalls_at = 0
        # The listing leaves out this file's size.
        self.unsized = ""
        # This file's last byte differs from the listed digest's.
        self.lies = ""
        # Every range begins so many bytes late.
        self.shift = 0
        # While true, no request is answered.
        self.down = False
        # The status of every answer, unless it is 0.
        self.status = 0
        self.commit = COMMIT
        hub = self

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Quiet(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        if self.down:
            request.close_connection = True
            return
        path = request.path.partition("?")[0]
        if self.status:
            self._say(request, self.status, b"<html>", {})
            return
        if path.startswith(f"/api/models/{REPO}/revision/"):
            self._say(request, 200, self.info(), {"content-type": "application/json"})
        elif path.startswith(f"/{REPO}/resolve/{self.commit}/"):
            self._file(request, self.directory / unquote(path.partition(f"/{self.commit}/")[2]), body=body)
        else:
            self._say(request, 404, b"{}", {"x-error-code": "RepoNotFound"})

    def info(self) -> bytes:
        siblings: list[dict[str, object]] = []
        for path in sorted(one for one in self.directory.rglob("*") if one.is_file()):
            data, name = path.read_bytes(), path.relative_to(self.directory).as_posix()
            sibling: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": "b" * 40}
            if path.suffix in {".safetensors", ".gguf"}:
                sha = hashlib.sha256(data).hexdigest()
                sibling["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 134}
            if path.name == self.unsized:
                del sibling["size"]
            siblings.append(sibling)
        info = {
            "_id": "1",
            "id": REPO,
            "sha": self.commit,
            "siblings": siblings,
            "tags": [],
            "private": False,
        }
        return json.dumps(info).encode()

    def _file(self, request: BaseHTTPRequestHandler, path: Path, *, body: bool) -> None:
        if not path.is_file():
            self._say(request, 404, b"", {"x-error-code": "EntryNotFound"})
            return
        data = path.read_bytes()
        if path.name == self.lies:
            data = data[:-1] + bytes([data[-1] ^ 1])
        first, _, last = (request.headers.get("range") or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first) + self.shift, min(len(data), int(last or len(data)) + 1)
        headers = {"x-repo-commit": self.commit, "etag": f'"{hashlib.sha256(data).hexdigest()}"'}
        headers["content-range"] = f"bytes {start}-{end - 1}/{len(data)}"
        cut, total = None, end - start
        if body:
            self.asked.append((path.name, start))
            if path.suffix == ".safetensors":
                cut = self.cuts.pop(0) if self.cuts else None
                end = self.stalls_at or end
            self.served[path.name] = self.served.get(path.name, 0) + len(data[start:end][:cut])
        self._say(request, 206, data[start:end], headers, body=body, cut=cut, total=total)

    @staticmethod
    def _say(
        request: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict[str, str],
        *,
        body: bool = True,
        cut: int | None = None,
        total: int | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("content-length", str(len(data) if total is None else total))
        request.end_headers()
        if body:
            request.wfile.write(data[:cut])
        if cut is not None:
            request.close_connection = True
