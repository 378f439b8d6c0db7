"""`/v1/audio/transcriptions` in the shape of OpenAI's API.

Owns its fields, its five forms of an answer, and what of that API is refused rather than ignored.
Does not own forms on the wire (`uploads`), files (`files`) or recognising speech.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from shoal.errors import Bug
from shoal.gateway.ask import Ask, ModelName
from shoal.gateway.files import File, good_file
from shoal.gateway.forms import Form
from shoal.gateway.jobs import Answer, Job
from shoal.gateway.respond import Text
from shoal.wire.envelope import Inputs, Params
from shoal.wire.records import Record, Segment, unpack


class TranscriptionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/audio/transcriptions, also as multipart/form-data."""

    file: Annotated[File, Meta(description="The sound: WAV, FLAC, MP3, Ogg or another.")]
    model: ModelName
    language: Annotated[
        Annotated[str, Meta(pattern="^[a-z]{2,3}$")] | None,
        Meta(description="Of the speech, as ISO 639-1; null leaves it to the model."),
    ] = None
    response_format: Annotated[
        Literal["json", "text", "verbose_json", "srt", "vtt"],
        Meta(description="`verbose_json`, `srt` and `vtt` have the times of each stretch."),
    ] = "json"
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=0)] | None,
        Meta(description="Nothing is sampled: 0 is accepted."),
    ] = None
    granularities: Annotated[
        list[Literal["segment"]] | None,
        Meta(description="Times are those of stretches; there are none of single words."),
    ] = msgspec.field(default=None, name="timestamp_granularities[]")


class DurationUsage(msgspec.Struct):
    """Seconds of sound."""

    seconds: float
    type: Literal["duration"] = "duration"


class TranscriptSegment(msgspec.Struct):
    """A stretch of speech; times in seconds."""

    id: int
    start: float
    end: float
    text: str


class Transcription(msgspec.Struct, omit_defaults=True):
    """Answer of POST /v1/audio/transcriptions as `json`, and with all fields as `verbose_json`."""

    text: str
    usage: DurationUsage
    task: Literal["transcribe"] | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[TranscriptSegment] | None = None


def transcription_job(body: TranscriptionRequest, ask: Ask) -> Job:
    """The job that a request asks for."""
    entry = ask.entry(body.model, "transcribe")
    sound = good_file(entry, body.file.data, "file")
    return ask.job("transcribe", entry, Inputs(blobs=[sound]), Params(language=body.language))


def transcription_answer(
    body: TranscriptionRequest, job: Job, answer: Answer, form: Form
) -> Transcription | Text:
    """The transcript in the form that was asked for."""
    del job, form
    if len(answer.result.records) != 1:
        raise Bug(f"{len(answer.result.records)} records for one sound")
    record = unpack(answer.result.records[0])
    plain = _PLAIN.get(body.response_format)
    if plain is not None:
        return plain(record)
    usage = DurationUsage(record.duration_s)
    if body.response_format == "json":
        return Transcription(record.text, usage)
    segments = [
        TranscriptSegment(at, one.start_s, one.end_s, one.text)
        for at, one in enumerate(_segments(record))
    ]
    return Transcription(
        record.text, usage, "transcribe", record.language, record.duration_s, segments
    )


def _segments(record: Record) -> Sequence[Segment]:
    """At least one: a model without times has said everything in one stretch."""
    return record.segments or [Segment(0.0, record.duration_s, record.text)]


def _text(record: Record) -> Text:
    return Text(b"text/plain; charset=utf-8", f"{record.text}\n")


def _srt(record: Record) -> Text:
    cues = [
        f"{at}\n{_time(one.start_s, ',')} --> {_time(one.end_s, ',')}\n{one.text.strip()}\n"
        for at, one in enumerate(_segments(record), start=1)
    ]
    return Text(b"application/x-subrip; charset=utf-8", "\n".join(cues))


def _vtt(record: Record) -> Text:
    cues = [
        f"{_time(one.start_s, '.')} --> {_time(one.end_s, '.')}\n{one.text.strip()}\n"
        for one in _segments(record)
    ]
    return Text(b"text/vtt; charset=utf-8", "\n".join(["WEBVTT\n", *cues]))


_PLAIN: Final[dict[str, Callable[[Record], Text]]] = {"text": _text, "srt": _srt, "vtt": _vtt}


def _time(at_s: float, point: str) -> str:
    """`hh:mm:ss` and milliseconds."""
    ms = round(at_s * 1e3)
    seconds, ms = divmod(ms, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{ms:03}"
