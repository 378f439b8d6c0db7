"""A server that answers as a real SGLang server did when it was recorded.

    python -m tests.support.sglang_replay --config FILE --model-path FOLDER --port N ...

Started as the real one is, over a real socket, and it asks for its key as that does. A request that
was never recorded is a 500 that says so; a text whose recording was cut short is held until its
abort; `dies` takes the process along. What a server says that is at fault is `written` here: no
recording has it. Holds no assertions.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from tests.support.sglang_cases import CASES, STUCK, WRITTEN

RECORDED = Path(__file__).with_name("sglang_recorded.json")
_DONE = "data: [DONE]\n\n"
_HOLD_S = 20.0


def _key(path: str, body: object) -> str:
    return f"{path} {json.dumps(body, sort_keys=True)}"


class Replay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answers: ClassVar[dict[str, dict[str, object]]]
    asked = 0
    key: ClassVar[str]
    aborted: ClassVar[dict[str, threading.Event]] = {}

    def do_GET(self) -> None:
        if self.path == "/ready":  # not at the first question, as every server that still loads
            Replay.asked += 1
            self._whole(503 if Replay.asked == 1 else 200, "")
        elif self._is_known():
            self._answer(None)

    def _is_known(self) -> bool:
        known = self.headers["Authorization"] == f"Bearer {self.key}"
        if not known:
            self._whole(401, '{"error":"Unauthorized"}')
        return known

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_known():
            return
        rid = body.pop("rid", None)
        if self.path == "/abort_request":
            Replay.aborted[rid].set()
        if self.path == "/generate":
            Replay.aborted[rid] = threading.Event()
        elif (folder := body.pop("lora_path", None)) is not None:
            seen = sorted(path.name for path in Path(folder).iterdir())
            if seen != ["adapter_config.json", "adapter_model.safetensors"]:
                self._whole(400, json.dumps({"error": {"message": f"saw {seen}"}}))
                return
        if body.get("lora_name") == STUCK:
            self._whole(200 if self.path == "/load_lora_adapter" else 503, "{}")
            return
        written = next((w for n, w in WRITTEN.items() if rid and rid.startswith(f"{n}-")), None)
        if written is not None:
            self._stream(written, rid)
        else:
            self._answer(body, rid)

    def _answer(self, body: object, rid: str = "") -> None:
        found = self.answers.get(_key(self.path, body))
        if found is None:
            self._whole(500, json.dumps({"error": {"message": f"not recorded: {body}"}}))
        elif self.path == "/generate" and found["status"] == 200:
            self._stream(str(found["answer"]), rid)
        else:
            self._whole(int(str(found["status"])), str(found["answer"]))

    def _whole(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, text: str, rid: str) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        dies = next((c.dies_after for n, c in CASES.items() if rid.startswith(f"{n}-")), 0)
        ended = '"finish_reason": {' in text or '"error"' in text or rid.startswith("faulty")
        for number, event in enumerate(text.split("\n\n")[:-1], 1):
            self._chunk(f"{event}\n\n")
            if number == dies:
                os._exit(9)
        if not ended:
            Replay.aborted[rid].wait(_HOLD_S)
        if not text.endswith(_DONE):
            self._chunk(_DONE)
        self._chunk("")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def main(options: dict[str, str]) -> None:
    """Answers until it is killed."""
    exchanges = json.loads(RECORDED.read_text("utf-8"))
    Replay.answers = {_key(one["path"], one["body"]): one for one in exchanges}
    about = Replay.answers[_key("/server_info", None)]
    about["answer"] = json.dumps(
        json.loads(str(about["answer"])) | {"model_path": options["--model-path"]}
    )
    Replay.key = json.loads(Path(options["--config"]).read_text("utf-8"))["api-key"]
    ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Replay).serve_forever()


if __name__ == "__main__":
    main(dict(zip(sys.argv, sys.argv[1:], strict=False)))
