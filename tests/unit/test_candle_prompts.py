"""From a conversation to a prompt, and what a GGUF file says of itself."""

from __future__ import annotations

import struct

import pytest

from shoal.errors import InvalidRequest, ModelUnavailable
from shoal.ipc.messages import RunItem
from shoal.runtimes.candle.gguf import MAX_HEAD_BYTES, read_fields
from shoal.runtimes.prompts import Prompts, of_gguf
from shoal.wire.generation import ChatMessage

FIELDS = {
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
}


def head(fields, version=3):
    """The beginning of a GGUF file with these texts, numbers, truths and lists of texts."""

    def text(value):
        return struct.pack("<Q", len(value.encode())) + value.encode()

    data = b"GGUF" + struct.pack("<IQQ", version, 0, len(fields))
    for name, value in fields.items():
        data += text(name)
        if isinstance(value, bool):
            data += struct.pack("<I?", 7, value)
        elif isinstance(value, int):
            data += struct.pack("<II", 4, value)
        elif isinstance(value, str):
            data += struct.pack("<I", 8) + text(value)
        else:
            data += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    return data


def chat(*contents):
    return RunItem("i", "generate", [1], chat=[ChatMessage("user", each) for each in contents])


def text(prompt):
    return RunItem("i", "generate", [1], texts=[prompt])


def test_gguf_head_is_read_as_it_was_written(tmp_path):
    """Texts, numbers, truths and lists come back; the prompts are made of them."""
    path = tmp_path / "m.gguf"
    path.write_bytes(head(FIELDS))
    assert read_fields(path) == FIELDS
    prompts = of_gguf("m@1", read_fields(path))
    assert prompts.prompt(chat("a", "b")) == "<s>ab"
    assert prompts.prompt(text("a")) == "<s>a"
    assert prompts.prompt(text("<s>a")) == "<s>a"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGML" + head(FIELDS)[4:],
        head(FIELDS, version=1),
        head(FIELDS)[:-1],
        head(FIELDS)[:60],
        b"GGUF" + struct.pack("<IQQ", 3, 0, MAX_HEAD_BYTES + 1),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, MAX_HEAD_BYTES + 1),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 99),
    ],
)
def test_gguf_head_that_is_damaged_or_too_large_is_refused(tmp_path, data):
    """Whatever is wrong with a file, the model is unavailable, and the file is named."""
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelUnavailable, match=r"m\.gguf"):
        read_fields(path)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.no.such }}", "has no attribute"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_prompts_refuse_a_conversation_that_the_template_refuses(template, what):
    """The template's own words reach the caller; what reaches for Python's insides is refused."""
    with pytest.raises(InvalidRequest, match=what) as caught:
        Prompts("m@1", template, {}, "").prompt(chat("a"))
    assert caught.value.param == "messages"


def test_prompts_template_that_is_no_jinja_is_said_at_the_load():
    """Not at the first conversation."""
    with pytest.raises(ModelUnavailable, match="chat template cannot be read"):
        Prompts("m@1", "{% for %}", {}, "")
