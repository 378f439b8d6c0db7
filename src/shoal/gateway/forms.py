"""JSON and MessagePack: which one a request is in, which one it wants, and reading either.

Owns content negotiation and the translation of a codec's complaint into an `InvalidRequest` that
names the field. Does not own what the fields mean (the routes) or floats (`respond`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import msgspec

from shoal.core.spelling import did_you_mean
from shoal.errors import InvalidRequest, UnsupportedMedia

MAX_MESSAGE_CHARS = 400
MAX_HEADER_BYTES = 512
_MSGPACK_NAMES = frozenset(
    {"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"}
)
_JSON_RANGES = frozenset({"application/json", "application/*", "*/*"})
_PLACE = re.compile(r"(?s)^(.*) - at `\$\.?(.*)`$")
_FIELD = re.compile(r"(?s)^Object (?:contains unknown|missing required) field `(.*)`$")


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One of the two forms of a body."""

    name: str
    content_type: bytes
    encode: Callable[[Any], bytes]


JSON = Form("JSON", b"application/json", msgspec.json.Encoder().encode)
MSGPACK = Form("MessagePack", b"application/msgpack", msgspec.msgpack.Encoder().encode)


def sent_form(content_type: bytes | None) -> Form:
    """The form that a `Content-Type` announces. Raises `UnsupportedMedia`.

    A missing header means JSON. Parameters such as a charset are ignored: JSON is always UTF-8.
    """
    return _sent_form(content_type[:MAX_HEADER_BYTES]) if content_type else JSON


def wanted_form(accept: bytes | None) -> Form:
    """The form that an `Accept` header prefers; JSON on a tie and where it names neither."""
    return _wanted_form(accept[:MAX_HEADER_BYTES]) if accept else JSON


# Clients send the same few header values for ever, so the answers are kept.
@lru_cache(maxsize=256)
def _sent_form(content_type: bytes) -> Form:
    name = content_type.partition(b";")[0].strip().lower().decode("latin-1")
    if name == "application/json":
        return JSON
    if name in _MSGPACK_NAMES:
        return MSGPACK
    raise UnsupportedMedia(
        f"content type {name[:100]!r} is not supported; send application/json or "
        "application/msgpack",
        param="Content-Type",
    )


@lru_cache(maxsize=256)
def _wanted_form(accept: bytes) -> Form:
    json_q = msgpack_q = 0.0
    for part in accept.decode("latin-1").lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        q = _quality(parameters)
        if name in _MSGPACK_NAMES:
            msgpack_q = max(msgpack_q, q)
        elif name in _JSON_RANGES:
            json_q = max(json_q, q)
    # An exact name outranks a range of the same quality, hence >= only where JSON is not exact.
    if msgpack_q > json_q or (0 < msgpack_q == json_q and b"json" not in accept.lower()):
        return MSGPACK
    return JSON


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


S = TypeVar("S", bound=msgspec.Struct)


class Reader(Generic[S]):
    """Reads bodies of one struct in either form. `lists` names the fields that hold lists only."""

    def __init__(self, kind: type[S]) -> None:
        self.kind = kind
        fields = msgspec.structs.fields(kind)
        self.lists = frozenset(field.encode_name for field in fields if _is_list(field.type))
        self._json = msgspec.json.Decoder(kind)
        self._msgpack = msgspec.msgpack.Decoder(kind)

    def convert(self, fields: Mapping[str, Any]) -> S:
        """The struct of named values, of which numbers may be texts. Raises as `read`."""
        try:
            return msgspec.convert(fields, self.kind, strict=False)
        except msgspec.ValidationError as error:
            raise _wrong_field(str(error), self.kind) from error

    def read(self, body: bytes, form: Form) -> S:
        """The struct that `body` holds. Raises `InvalidRequest` that names the field."""
        try:
            if form is JSON:
                return self._json.decode(body)
            return self._msgpack.decode(body)
        except msgspec.ValidationError as error:
            raise _wrong_field(str(error), self.kind) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            what = str(error) if body else "it is empty"
            raise InvalidRequest(f"the body is not valid {form.name}: {_short(what)}") from error
        except RecursionError as error:
            raise InvalidRequest("the body is nested too deeply") from error


def _is_list(annotation: Any) -> bool:
    schema = msgspec.json.schema(annotation)
    return {one.get("type") for one in schema.get("anyOf", [schema])} in (
        {"array"},
        {"array", "null"},
    )


def _wrong_field(complaint: str, kind: type[msgspec.Struct]) -> InvalidRequest:
    match = _PLACE.match(complaint)
    what, place = (match[1], match[2]) if match else (complaint, "")
    field = _FIELD.match(what)
    if field is not None:
        name = _short(field[1])
        param = f"{place}.{name}" if place else name
        if "missing" in what[:20]:
            return InvalidRequest(f"`{param}` is required", param=param)
        guess = did_you_mean(name, _fields_at(kind, place))
        return InvalidRequest(f"unknown field `{param}`{guess}", param=param)
    what = what[:1].lower() + what[1:]
    if what.startswith("invalid enum value"):
        what = f"{what}{_choices(kind, place)}"
    if not place:
        return InvalidRequest(f"the body: {_short(what)}")
    return InvalidRequest(f"`{_short(place)}`: {_short(what)}", param=_short(place))


def _fields_at(kind: type[msgspec.Struct], place: str) -> list[str]:
    """Names of the fields that an object at `place` may have."""
    if not place:
        return [field.encode_name for field in msgspec.structs.fields(kind)]
    for field in msgspec.structs.fields(kind):
        if place.startswith(f"{field.encode_name}["):
            _, components = msgspec.json.schema_components([field.type])
            return [name for part in components.values() for name in part.get("properties", {})]
    return []


def _choices(kind: type[msgspec.Struct], place: str) -> str:
    """`; one of ...` for a field that takes one of a few strings."""
    for field in msgspec.structs.fields(kind):
        if place == field.encode_name or place.startswith(f"{field.encode_name}["):
            choices = _enums(msgspec.json.schema(field.type))
            return f"; one of {', '.join(choices)}" if choices else ""
    return ""


def _enums(schema: object) -> list[str]:
    """All values of every `enum` inside a JSON schema."""
    if isinstance(schema, list):
        return [value for part in schema for value in _enums(part)]
    if not isinstance(schema, dict):
        return []
    return [*map(str, schema.get("enum", [])), *_enums(list(schema.values()))]


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}..."
