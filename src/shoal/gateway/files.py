"""Files as inputs: pictures, documents and sounds, as bytes inside a body.

Owns how a file stands in JSON and MessagePack, whether a model takes it, and what is refused before
anything is queued: the wrong kind, no bytes at all, more pixels than anybody should decode. Does
not own reading what is in it (the runtimes) or bodies that are files themselves (`uploads`).
Nothing is ever fetched from an address: a server that does is a way into its network.
"""

from __future__ import annotations

import re
from binascii import Error as Base64Error
from binascii import a2b_base64
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from shoal.catalog.schema import Entry
from shoal.errors import InvalidRequest
from shoal.gateway.ask import Ask
from shoal.wire.envelope import Failure, Inputs
from shoal.wire.media import Media, size_fault, sniff

_DATA_URI = re.compile(r"data:[\w.+-]*/?[\w.+-]*(?:;[\w.+-]+=[\w.+-]*)*;base64,")
_ADDRESS = re.compile(r"(?i)(?:https?|ftp|file|s3|gs)://")
_TAKEN_BY: Final = {"image": {"image", "document"}, "pdf": {"document"}, "audio": {"audio"}}


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file. A string that is a `data:` URI with base64 stands for one, too."""

    data: Annotated[bytes, Meta(description="Its bytes: base64 in JSON, binary in MessagePack.")]


def inputs_of(ask: Ask, entry: Entry, value: Any, field: str) -> tuple[Inputs, dict[int, Failure]]:
    """The inputs of a request, texts or files, and what of a list is refused, by its index.

    value: a text, a `File`, a list of either kind, or token ids. A request without a single good
    file is refused whole. Raises `InvalidRequest` that names the field.
    """
    given = value if isinstance(value, list) else [value]
    if not given or not _is_file(given[0], entry):
        if given and "text" not in entry.inputs:
            raise _no_text(entry, given[0], field)
        return ask.texts_or_ids(value, field), {}
    ask.count(given, field)
    blobs: list[bytes] = []
    refused: dict[int, Failure] = {}
    for i, one in enumerate(given):
        name = f"{field}[{i}]" if given is value else field
        if not _is_file(one, entry):
            raise InvalidRequest(
                f"`{name}` is of another kind than the entries before it; send files or texts, "
                "not a mixture",
                param=name,
            )
        try:
            blobs.append(good_file(entry, _bytes(one, name), name))
        except InvalidRequest as error:
            error.input_index = i
            refused[i] = Failure.of(error)
    if not blobs:
        raise refused[0].error()
    return Inputs(blobs=blobs), refused


def all_inputs_of(ask: Ask, entry: Entry, value: Any, field: str) -> Inputs:
    """As `inputs_of`, where one wrong input fails the request."""
    inputs, refused = inputs_of(ask, entry, value, field)
    if refused:
        raise refused[min(refused)].error()
    return inputs


def good_file(entry: Entry, data: bytes, name: str) -> bytes:
    """The bytes again. Raises `InvalidRequest` where the model takes no such file."""
    if not data:
        raise InvalidRequest(f"`{name}` is an empty file", param=name)
    if "file" in entry.inputs:
        return data
    media = sniff(data)
    if not _TAKEN_BY.get(media.kind, set()).intersection(entry.inputs):
        raise InvalidRequest(
            f"model `{entry.id}` takes {' or '.join(entry.inputs)}, and `{name}` is {_what(media)}",
            param=name,
        )
    fault = size_fault(media.width, media.height)
    if fault is not None:
        raise InvalidRequest(f"`{name}` has {fault}", param=name)
    return data


def _is_file(one: object, entry: Entry) -> bool:
    """A text that looks like a `data:` URI is a text all the same where a model takes only such."""
    if isinstance(one, str):
        return entry.inputs != ["text"] and _DATA_URI.match(one[:256]) is not None
    return isinstance(one, File)


def _bytes(one: str | File, name: str) -> bytes:
    if isinstance(one, File):
        return one.data
    try:
        return a2b_base64(one.partition(",")[2], strict_mode=True)
    except (Base64Error, ValueError) as error:  # ValueError: characters outside ASCII
        raise InvalidRequest(f"`{name}` is no base64: {error}", param=name) from error


def _what(media: Media) -> str:
    if media.kind == "unknown":
        return "a file of no kind that is known"
    return f"{'an' if media.kind in ('image', 'audio') else 'a'} {media.kind} file ({media.format})"


def _no_text(entry: Entry, one: object, field: str) -> InvalidRequest:
    takes = " or ".join(entry.inputs)
    if isinstance(one, str) and _ADDRESS.match(one):
        return InvalidRequest(
            f"`{field}` is an address, and nothing is fetched from addresses; send the bytes of "
            f'the file: {{"data": "<base64>"}}, or a `data:` URI',
            param=field,
        )
    return InvalidRequest(
        f'model `{entry.id}` takes {takes}, not text: send {{"data": "<base64>"}}, a `data:` URI, '
        "or the file itself as the body",
        param=field,
    )
