"""Wrong requests about files: pictures, documents, sounds, and what is found in them."""

from __future__ import annotations

from binascii import b2a_base64
from typing import Any

from shoal.settings import GatewaySettings
from tests.support.bad import Bad, as_json

# A header of one channel at 16 kHz, without a sample.
WAV = b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x80\x3e\0\0\0\x7d\0\0\2\0\x10\0data\0\0\0\0"


def bad_files(
    dense: str,
    limits: GatewaySettings,
    *,
    images: str | None,
    finder: str | None,
    sounds: str | None,
) -> list[Bad]:
    """The rows; the models are those of `bad_requests`."""
    table = [*_bodies(dense, limits), *_forms(dense)]
    if images is not None:
        table += _images(images)
    if finder is not None:
        table += _finder(finder, dense)
    if sounds is not None:
        table += _sounds(sounds)
    return table


def png_header(width: int, height: int) -> bytes:
    """The beginning of a PNG of that size, and nothing more."""
    sides = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + sides + b"\x08\x02\0\0\0"


def form(*parts: tuple[str, bytes], boundary: str = "x") -> bytes:
    """A body of multipart/form-data; a part whose name ends in `=file` has a file name."""
    made = b""
    for name, data in parts:
        field, _, file = name.partition("=")
        named = f'; filename="{file}"' if file else ""
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{field}"{named}\r\n\r\n'
        made += head.encode() + data + b"\r\n"
    return made + f"--{boundary}--\r\n".encode()


def as_base64(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode()


def _bodies(dense: str, limits: GatewaySettings) -> list[Bad]:
    """What any server refuses, whatever its models: this one takes texts."""
    path, query = "/v1/encode", f"/v1/encode?model={dense}"
    png = {"content-type": "image/png"}
    media = {"status": 415, "code": "unsupported_media_type", "param": "Content-Type"}
    file = {"data": as_base64(b"x")}
    return [
        Bad("file to a model of texts", query, b"x", param="inputs", says="file", headers=png),
        Bad(
            "file in a list to a model of texts",
            path,
            as_json({"model": dense, "inputs": [file]}),
            param="inputs[0]",
            says="text",
        ),
        Bad("raw file without a model", path, b"x", param="model", says="required", headers=png),
        Bad("raw file, unknown field", f"{query}&outputz=a", b"x", param="outputz", headers=png),
        Bad("raw file, field twice", f"{query}&model=x", b"x", param="model", headers=png),
        Bad(
            "raw file, wrong value", f"{query}&dimensions=x", b"x", param="dimensions", headers=png
        ),
        Bad("raw file, query of nonsense", f"{path}?model=%ff", b"x", headers=png, says="query"),
        Bad("raw file, too many fields", f"{path}?{'a=1&' * 70}", b"x", headers=png, says="query"),
        Bad(
            "raw file over the limit",
            query,
            b"x" * (limits.max_body_bytes + 1),
            413,
            "payload_too_large",
            headers=png,
            says="limit",
        ),
        Bad("raw file where none is taken", "/v1/rerank", b"x", headers=png, **media),
        Bad("video", query, b"x", headers={"content-type": "video/x-flv"}, says="image/*", **media),
        Bad(
            "file of no base64",
            path,
            as_json({"model": dense, "inputs": {"data": "%%"}}),
            param="inputs.data",
            says="base64",
        ),
        Bad(
            "object that is no file",
            path,
            as_json({"model": dense, "inputs": [{}]}),
            param="inputs[0].data",
            says="required",
        ),
        Bad(
            "file with an address",
            path,
            as_json({"model": dense, "inputs": [{"url": "http://x"}]}),
            param="inputs[0].url",
        ),
    ]


def _forms(dense: str) -> list[Bad]:
    path = "/v1/encode"
    media = {"status": 415, "code": "unsupported_media_type", "param": "Content-Type"}
    multipart = {"content-type": "multipart/form-data; boundary=x"}
    whole = form(("model", dense.encode()), ("inputs=a.png", png_header(1, 1)))
    return [
        Bad("form where none is taken", "/v1/embeddings", whole, headers=multipart, **media),
        Bad(
            "form without a boundary",
            path,
            whole,
            headers={"content-type": "multipart/form-data"},
            says="boundary",
            **media,
        ),
        Bad("form that is none", path, b"hello", headers=multipart, says="multipart"),
        Bad("form that is cut", path, whole[:-8], headers=multipart, says="boundary"),
        Bad(
            "form of too many parts",
            path,
            form(*[("a", b"")] * 2200),
            headers=multipart,
            says="parts",
        ),
        Bad(
            "form that is no UTF-8",
            path,
            form(("model", b"\xff")),
            headers=multipart,
            says="multipart",
        ),
        Bad(
            "form without a file",
            path,
            form(("model", dense.encode())),
            headers=multipart,
            param="inputs",
            says="required",
        ),
    ]


def _images(images: str) -> list[Bad]:
    def row(name: str, says: str, inputs: Any, param: str = "inputs") -> Bad:
        body = as_json({"model": images, "inputs": inputs})
        return Bad(f"images: {name}", "/v1/encode", body, param=param, says=says)

    def raw(name: str, says: str, data: bytes) -> Bad:
        path, kind = f"/v1/encode?model={images}", {"content-type": "application/octet-stream"}
        return Bad(f"images: {name}", path, data, param="inputs", says=says, headers=kind)

    good = {"data": as_base64(png_header(4, 4))}
    return [
        row("text", "takes image, not text", "a picture of a fish"),
        row("token ids", "not text", [1, 2]),
        row("texts", "not text", ["a"]),
        row("address", "nothing is fetched", "https://example.org/a.png"),
        row("text among files", "mixture", [good, "a"], "inputs[1]"),
        row("all wrong", "empty", [{"data": ""}, {"data": as_base64(b"%PDF-1.7")}], "inputs[0]"),
        row("data URI of no base64", "base64", "data:image/png;base64,%%%"),
        row("data URI of nothing", "empty", "data:image/png;base64,"),
        row("10,000 of them", "at most", [good] * 10_000),
        raw("zero bytes", "empty", b""),
        raw("document", "pdf", b"%PDF-1.7\n"),
        raw("sound", "audio", WAV),
        raw("nothing known", "no kind", b"hello"),
        raw("50 megapixels", "pixels", png_header(7072, 7072)),
        raw("a very long side", "along a side", png_header(1, 65_536)),
        Bad(
            "images: embeddings of texts",
            "/v1/embeddings",
            as_json({"model": images, "input": "a"}),
            param="input",
            says="takes image",
        ),
        Bad(
            "images: pairs",
            "/v1/classify",
            as_json({"model": images, "inputs": [["a", "b"]]}),
            param="inputs",
            says="image",
        ),
    ]


def _finder(finder: str, dense: str) -> list[Bad]:
    def row(name: str, param: str, says: str = "", /, **fields: Any) -> Bad:
        body = {"model": finder, "inputs": "Ada", **fields}
        return Bad(f"extract: {name}", "/v1/extract", as_json(body), param=param, says=says)

    return [
        row("model that does not", "model", "/v1/encode", model=dense),
        row("no text", "inputs", inputs=""),
        row("empty list", "inputs", inputs=[]),
        row("number", "inputs", inputs=7),
        row("unknown output", "outputs[0]", "entities", outputs=["entitys"]),
        row("output that the model lacks", "outputs[0]", "entities", outputs=["layout"]),
        row("no outputs", "outputs", outputs=[]),
        row("unknown label", "labels[1]", "did you mean `odd`", labels=["even", "oddd"]),
        row("no labels", "labels", labels=[]),
        row("label empty", "labels[0]", labels=[""]),
        row("threshold over 1", "threshold", threshold=1.1),
        row("threshold negative", "threshold", threshold=-0.1),
        row("threshold string", "threshold", threshold="high"),
        row("file", "inputs", "text", inputs={"data": as_base64(b"x")}),
        Bad(
            "transcription by a finder",
            "/v1/audio/transcriptions",
            as_json({"model": finder, "file": {"data": as_base64(WAV)}}),
            param="model",
            says="/v1/extract",
        ),
        Bad(
            "moderation by a finder",
            "/v1/moderations",
            as_json({"model": finder, "input": "x"}),
            param="model",
            says="/v1/extract",
        ),
    ]


def _sounds(sounds: str) -> list[Bad]:
    path = "/v1/audio/transcriptions"

    def row(name: str, param: str, says: str = "", file: bytes = WAV, /, **fields: str) -> Bad:
        parts = [("model", sounds.encode()), *((k, v.encode()) for k, v in fields.items())]
        body = form(*parts, ("file=a.wav", file))
        kind = {"content-type": "multipart/form-data; boundary=x"}
        return Bad(f"sounds: {name}", path, body, param=param, says=says, headers=kind)

    return [
        row("zero bytes", "file", "empty", b""),
        row("picture", "file", "takes audio", png_header(4, 4)),
        row("nothing known", "file", "no kind", b"hello"),
        row("language", "language", language="English"),
        row("response_format", "response_format", "verbose_json", response_format="mp3"),
        row("temperature", "temperature", temperature="0.7"),
        row("stream", "stream", "unknown field", stream="true"),
        row(
            "times of words",
            "timestamp_granularities[][0]",
            "segment",
            **{"timestamp_granularities[]": "word"},
        ),
        row("file twice", "file", file="x"),
        Bad("sounds: no file", path, as_json({"model": sounds}), param="file", says="required"),
    ]
