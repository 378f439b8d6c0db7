"""A model hub on this machine, as much of one as the hub's own client asks for.

Owns answering that client with the files of one model. Whether it answers as a hub would is shown
by the client itself: it is the real one that reads what is said here.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """Serves `files` (bytes by path) as the model `repo` at one commit; counts what was fetched."""

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        self.repo = repo
        self.files = files
        self.commit = hashlib.sha1(repo.encode(), usedforsecurity=False).hexdigest()
        self.fetched: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

            def _answer(self, *, with_body: bool) -> None:
                status, body, headers = hub.answer(self.path.partition("?")[0])
                if with_body and "ETag" in headers:
                    hub.fetched.append(self.path)
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of one path."""
        if path.startswith(f"/api/models/{self.repo}/revision/"):
            return 200, json.dumps({"id": self.repo, "sha": self.commit}).encode(), {}
        if path == f"/api/models/{self.repo}/tree/{self.commit}":
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": etag(body)}
                for name, body in self.files.items()
            ]
            return 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}
        name = path.removeprefix(f"/{self.repo}/resolve/{self.commit}/")
        if name in self.files:
            body = self.files[name]
            return 200, body, {"ETag": f'"{etag(body)}"', "X-Repo-Commit": self.commit}
        return 404, b"", {"X-Error-Code": "EntryNotFound"}

    def close(self) -> None:
        """Ends it; nobody answers at its address from then on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def etag(body: bytes) -> str:
    """What names a file's content."""
    return hashlib.sha1(body, usedforsecurity=False).hexdigest()
