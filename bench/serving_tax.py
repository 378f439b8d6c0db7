"""What serving costs over the bare runtime: CPU per request, throughput, time to the first answer.

    python bench/serving_tax.py [--quick] [--json FILE]

1. CPU per request of gateway, broker, worker and a runtime that computes nothing, at concurrency 64.
2. Tokens per second of all-MiniLM-L6-v2 at saturation, over HTTP, against the same runtime called
   directly in a loop with the best batch size, interleaved in one run.
3. Seconds from `shoal serve` to the first embedding, with everything installed and cached.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from harness import Report, Server, closed_loop, http_request, median, options, serving

NULL_MODEL = """\
id: null-model
tasks: [encode]
source: file:///
runtime: "null"
outputs: {dense: {dim: 8}}
"""

# Words of one to three tokens each; lengths are drawn like those of real passages.
WORDS = (
    "river market window engine letter garden signal bridge winter paper copper harbour lesson "
    "motor valley silver ticket doctor island planet cotton ladder mirror orange pencil rocket"
).split()
CONCURRENCY = 64


def passages(count: int, seed: int) -> list[str]:
    """Texts of a lognormal length: 6 to 200 words, 40 on average."""
    rng = random.Random(seed)
    lengths = [min(200, max(6, int(rng.lognormvariate(3.5, 0.6)))) for _ in range(count)]
    return [" ".join(rng.choice(WORDS) for _ in range(n)) for n in lengths]


def cpu_per_request(report: Report, *, quick: bool) -> None:
    """Part 1."""
    rounds, per_round = (2, 4_000) if quick else (5, 20_000)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "null.yaml").write_text(NULL_MODEL)
        with serving("--devices", "cpu:1", catalog=Path(folder)) as server:
            for name, path, kind, body in _forms():
                request = http_request(server.url, path, body, kind)
                rows = [
                    _cpu_round(server, request, per_round if i else 1_000)
                    for i in range(rounds + 1)
                ][1:]
                row = {key: median([r[key] for r in rows]) for key in rows[0]}
                report.add(measure=f"CPU us/request, {name}", **row)
                if name == "MessagePack":
                    report.headline["cpu_us_per_request"] = row["gateway+broker+worker"]


def _forms() -> list[tuple[str, str, str, bytes]]:
    text = "a shoal of fish"
    packed = msgspec.msgpack.encode({"model": "null-model", "inputs": [text]})
    plain = json.dumps({"model": "null-model", "input": text, "encoding_format": "base64"})
    return [
        ("MessagePack", "/v1/encode", "application/msgpack", packed),
        ("OpenAI JSON", "/v1/embeddings", "application/json", plain.encode()),
    ]


def _cpu_round(server: Server, request: bytes, count: int) -> dict[str, float]:
    before = server.cpu_s()
    load = uvloop.run(closed_loop(server.url, [request] * count, CONCURRENCY))
    after = server.cpu_s()
    us = {name: 1e6 * (after[name] - before.get(name, 0.0)) / count for name in after}
    return {
        "gateway": us["gateway"],
        "broker": us["broker"],
        "worker": us["worker"],
        "runtime": us["runtime"],
        "gateway+broker+worker": us["gateway"] + us["broker"] + us["worker"],
        "requests/s": count / load.took_s,
        "p50 ms": load.quantile_ms(0.5),
    }


def _raw_loop(runtime: str, batch: int, count: int, seed: int, out: Any) -> None:
    """In a process of its own: the bare runtime over tokenised passages, one thread."""
    from tokenizers import Tokenizer

    from shoal.catalog.load import load
    from shoal.catalog.resolve import model_spec, tokenizer_path
    from shoal.ipc.messages import RunItem
    from shoal.runtimes.registry import create

    entry = load(None).resolve("all-minilm-l6-v2")
    cache = Path(tempfile.gettempdir()) / "shoal-bench-cache"
    cache.mkdir(exist_ok=True)
    made = create(runtime, device="cpu", threads=1)
    made.load(model_spec(entry, cache))
    tokenizer = Tokenizer.from_file(str(tokenizer_path(entry)))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = [tokenizer.encode(text).ids[: entry.max_tokens] for text in passages(count, seed)]
    items = [
        RunItem(str(n), "encode", [len(i)], ids=msgspec.Raw(_u16(i)), id_bytes=2)  # type: ignore[arg-type]
        for n, i in enumerate(ids)
    ]
    items = [RunItem(i.item, "encode", i.lengths, ids=bytes(i.ids), id_bytes=2) for i in items]
    made.run(entry.key, items[:8])
    out.send("ready")
    out.recv()
    begun_s = time.monotonic()
    for start in range(0, len(items), batch):
        made.run(entry.key, items[start : start + batch])
    out.send((sum(len(i) for i in ids), time.monotonic() - begun_s))


def _u16(ids: list[int]) -> bytes:
    return b"".join(i.to_bytes(2, "little") for i in ids)


def raw_tokens_per_s(runtime: str, processes: int, batch: int, count: int) -> float:
    """Tokens/s of `processes` bare loops side by side, each on one thread."""
    context = multiprocessing.get_context("spawn")
    pairs = []
    for n in range(processes):
        ours, theirs = context.Pipe()
        process = context.Process(target=_raw_loop, args=(runtime, batch, count, n, theirs))
        process.start()
        pairs.append((process, ours))
    for _, pipe in pairs:
        pipe.recv()
    for _, pipe in pairs:
        pipe.send("go")
    rates = []
    for process, pipe in pairs:
        tokens, took_s = pipe.recv()
        rates.append(tokens / took_s)
        process.join()
    return sum(rates)
