"""What serving costs over the bare runtime: CPU per request, throughput, time to the first answer.

    python bench/serving_tax.py [--quick] [--json FILE]

1. CPU per request of gateway, broker, worker and a runtime that computes nothing, at concurrency
   64; beside it what a bare uvicorn application costs on this machine at this moment.
2. Tokens per second of all-MiniLM-L6-v2 at saturation, over HTTP, against the same runtime called
   directly in a loop with the best batch size, interleaved in one run.
3. Seconds from `shoal serve` to the first embedding, with everything installed and cached.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import uvloop
from harness import Report, Server, closed_loop, http_request, median, options, serving
from tokenizers import Tokenizer

from shoal.catalog.load import load
from shoal.catalog.resolve import model_spec, tokenizer_path
from shoal.ipc.messages import RunItem
from shoal.runtimes.registry import create

MODEL = "all-minilm-l6-v2"
PASSAGES = 2048

NULL_MODEL = """\
id: null-model
tasks: [encode]
source: file:///
runtime: "null"
outputs: {dense: {dim: 8}}
"""

# Words of one to three tokens each; lengths are drawn like those of real passages.
WORDS = (  # noqa: SIM905 - prose reads better than a list
    "river market window engine letter garden signal bridge winter paper copper harbour lesson "
    "motor valley silver ticket doctor island planet cotton ladder mirror orange pencil rocket"
).split()
CONCURRENCY = 64


def passages(count: int, seed: int) -> list[str]:
    """Texts of a lognormal length: 6 to 200 words, 40 on average."""
    rng = random.Random(seed)
    lengths = [min(200, max(6, int(rng.lognormvariate(3.5, 0.6)))) for _ in range(count)]
    return [" ".join(rng.choice(WORDS) for _ in range(n)) for n in lengths]


YARDSTICK = """
import sys, uvicorn
async def app(scope, receive, send):
    await receive()
    length = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": b"ok"})
uvicorn.run(app, port=int(sys.argv[1]), http="httptools", loop="uvloop", ws="none", lifespan="off",
            access_log=False, log_level="error", proxy_headers=False)
"""


def yardstick(report: Report, *, quick: bool) -> None:
    """What a bare uvicorn application costs here: machines differ, and busy ones more."""
    count = 4_000 if quick else 20_000
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", YARDSTICK, str(port)])
    url = f"http://127.0.0.1:{port}"
    request = http_request(url, "/", b"a shoal of fish", "text/plain")
    try:
        give_up_s = time.monotonic() + 10
        while time.monotonic() < give_up_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
        used = psutil.Process(process.pid)
        costs = []
        for _ in range(3):
            before = sum(used.cpu_times()[:2])
            uvloop.run(closed_loop(url, [request] * count, CONCURRENCY))
            costs.append(1e6 * (sum(used.cpu_times()[:2]) - before) / count)
    finally:
        process.kill()
        process.wait()
    report.add(measure="CPU us/request, bare uvicorn as a yardstick", gateway=median(costs))
    report.headline["cpu_us_bare_uvicorn"] = median(costs)


def cpu_per_request(report: Report, *, quick: bool) -> None:
    """Part 1."""
    yardstick(report, quick=quick)
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


def _raw_loop(threads: int, batch: int, seconds: float, seed: int, pipe: Any) -> None:
    """In a process of its own: the bare runtime over tokenised passages, again and again."""
    entry = load(None).resolve(MODEL)
    cache = Path(tempfile.gettempdir()) / "shoal-bench-cache"
    cache.mkdir(exist_ok=True)
    runtime = create(entry.runtime, device="cpu", threads=threads)
    runtime.load(model_spec(entry, cache))
    tokenizer = Tokenizer.from_file(str(tokenizer_path(entry)))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    items = []
    for n, text in enumerate(passages(PASSAGES, seed)):
        ids = tokenizer.encode(text).ids
        items.append(RunItem(str(n), "encode", [len(ids)], ids=array("H", ids).tobytes()))
    runtime.run(entry.key, items[:batch])
    pipe.send("ready")
    pipe.recv()
    tokens, at, begun_s = 0, 0, time.monotonic()
    while (took_s := time.monotonic() - begun_s) < seconds:
        chosen = items[at : at + batch]
        runtime.run(entry.key, chosen)
        tokens += sum(item.lengths[0] for item in chosen)
        at = (at + batch) % len(items)
    pipe.send(tokens / took_s)


def raw_tokens_per_s(processes: int, threads: int, batch: int, seconds: float) -> float:
    """Tokens/s of bare loops side by side, all at the same time."""
    context = multiprocessing.get_context("spawn")
    running = []
    for seed in range(processes):
        ours, theirs = context.Pipe()
        arguments = (threads, batch, seconds, seed, theirs)
        process = context.Process(target=_raw_loop, args=arguments)
        process.start()
        running.append((process, ours))
    for _, pipe in running:
        pipe.recv()
    for _, pipe in running:
        pipe.send("go")
    total = sum(float(pipe.recv()) for _, pipe in running)
    for process, _ in running:
        process.join()
    return total


def served_tokens_per_s(
    server: Server, per_request: int, concurrency: int, seconds: float
) -> float:
    """Tokens/s over HTTP in a closed loop that keeps the worker's windows full."""
    texts = passages(PASSAGES, seed=7)
    groups = [texts[i : i + per_request] for i in range(0, len(texts), per_request)]
    packed = [msgspec.msgpack.encode({"model": MODEL, "inputs": group}) for group in groups]
    requests = [http_request(server.url, "/v1/encode", p, "application/msgpack") for p in packed]

    def endless() -> Iterator[bytes]:
        give_up_s = time.monotonic() + seconds
        for request in itertools.cycle(requests):
            if time.monotonic() > give_up_s:
                return
            yield request

    before = _counted(server)
    load_done = uvloop.run(closed_loop(server.url, endless(), concurrency))
    return (_counted(server) - before) / load_done.took_s


def _counted(server: Server) -> float:
    """Tokens that the gateway says its answers took, from /metrics."""
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("shoal_gateway_tokens_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def throughput(report: Report, *, quick: bool) -> None:
    """Part 2: bare and served rounds in turn, so that a drifting machine touches both alike."""
    rounds, seconds = (1, 3.0) if quick else (5, 8.0)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    layouts = [(cores, 1, 32), (cores, 1, 64), (cores, 1, 256), (1, cores, 64)]
    if quick:
        layouts = [(cores, 1, 64)]
    raw: dict[tuple[int, int, int], list[float]] = {layout: [] for layout in layouts}
    served: dict[tuple[int, int], list[float]] = {(1, 192): [], (16, 24): []}
    with serving() as server:
        for shape in served:
            served_tokens_per_s(server, *shape, seconds=2.0)
        for _ in range(rounds):
            for layout, rates in raw.items():
                rates.append(raw_tokens_per_s(*layout, seconds))
            for shape, rates in served.items():
                rates.append(served_tokens_per_s(server, *shape, seconds))
    for (processes, threads, batch), rates in raw.items():
        name = f"bare runtime, {processes} x {threads} thread(s), {batch} texts a call"
        report.add(measure=name, **{"tokens/s": median(rates)})
    best = max(raw.values(), key=median)
    for (per_request, concurrency), rates in served.items():
        ratios = [rate / base for rate, base in zip(rates, best, strict=True)]
        report.add(
            measure=f"served, {per_request} text(s) a request, concurrency {concurrency}",
            **{"tokens/s": median(rates), "of the bare best": median(ratios)},
        )
    report.headline["served_over_raw"] = max(
        median([r / b for r, b in zip(rates, best, strict=True)]) for rates in served.values()
    )


def first_answer(report: Report, model: str, name: str, *, quick: bool) -> None:
    """Part 3."""
    times = []
    for _ in range(1 if quick else 3):
        begun_s = time.monotonic()
        with serving() as server:
            body = {"model": model, "inputs": "a shoal of fish"}
            answer = httpx.post(f"{server.url}/v1/encode", json=body, timeout=120)
            took_s = time.monotonic() - begun_s
            if answer.status_code != 200:
                report.add(measure=f"first answer, {name}", seconds=answer.text[:60])
                return
            times.append((took_s, server.ready_s))
    seconds, ready_s = (median([t[i] for t in times]) for i in (0, 1))
    report.add(measure=f"first answer, {name}", seconds=seconds, **{"ready line": ready_s})
    report.headline[f"first_answer_{name}_s"] = seconds


def main() -> None:
    """Runs all three parts."""
    chosen = options(__doc__)
    report = Report("What serving costs")
    cpu_per_request(report, quick=chosen.quick)
    throughput(report, quick=chosen.quick)
    first_answer(report, MODEL, "onnx", quick=chosen.quick)
    first_answer(report, f"{MODEL}-torch", "torch", quick=chosen.quick)
    report.finish(chosen)


if __name__ == "__main__":
    main()
