"""How a server is started for a model: its command line, and what it cannot serve.

Owns the options of an entry, their bounds, and refusing by name what would give wrong answers.
Does not own starting (`server`).

Options: `slots` (texts that grow at once; 16), `kv_tokens` (tokens of all of them together; four
contexts), `dtype` (float32 on a CPU, else the model's own), `max_adapters` (how many LoRA adapters
may be loaded at once; 0, for each takes room from the start), `adapter_rank` (their largest rank;
16), `seeds` (keep to the seeds of requests, which costs speed; not on a CPU).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ModelUnavailable
from shoal.ipc.messages import ModelSpec
from shoal.runtimes.generating import whole_number

MAX_SLOTS = 192  # a connection between worker and runtime process takes 256 calls
MAX_ADAPTERS = 64
USUAL_ADAPTERS = 0
MAX_RANK = 256
_BERTS = ("bert", "roberta", "xlm-roberta")
_DTYPES = ("float32", "bfloat16", "float16", "auto")
# A server rounds its own bounds down by a few tokens.
_SPARE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What a server is started with, and what it is to keep to."""

    device: str
    slots: int
    kv_tokens: int
    dtype: str
    adapters: int
    adapter_rank: int
    seeds: bool


def plan(spec: ModelSpec, device: str) -> Plan:
    """The options of an entry, checked. Raises `ModelUnavailable`."""
    cpu = device.partition(":")[0] == "cpu"
    known = {"slots", "kv_tokens", "dtype", "max_adapters", "adapter_rank", "seeds"}
    for name in spec.options:
        if name not in known:
            raise _wrong(spec, f"has no option {name!r}; its options: {', '.join(sorted(known))}")
    most = spec.max_tokens
    made = Plan(
        device=device,
        slots=whole_number(spec, "slots", 16, 1, MAX_SLOTS),
        kv_tokens=whole_number(spec, "kv_tokens", 4 * most, most + _SPARE_TOKENS),
        dtype=str(spec.options.get("dtype", "float32" if cpu else "auto")),
        adapters=whole_number(spec, "max_adapters", USUAL_ADAPTERS, 0, MAX_ADAPTERS),
        adapter_rank=whole_number(spec, "adapter_rank", 16, 1, MAX_RANK),
        seeds=spec.options.get("seeds") is True,
    )
    if made.dtype not in _DTYPES:
        raise _wrong(spec, f"knows the dtypes {', '.join(_DTYPES)}, not {made.dtype!r}")
    if made.seeds and cpu:
        raise _wrong(spec, "cannot keep to seeds on a CPU")
    return made


def check(spec: ModelSpec, config: dict[str, Any]) -> None:
    """Refuses what a server would answer wrongly. config: of the model. Raises `ModelUnavailable`.

    Its encoders pool as their code says, whatever the entry does, and scale each vector.
    """
    if spec.tasks not in (["generate"], ["encode"]):
        raise _wrong(spec, f"serves generate or encode, one of them, not {', '.join(spec.tasks)}")
    if spec.tasks == ["generate"]:
        return
    if spec.options.get("max_adapters"):
        raise _wrong(spec, "takes adapters for models that generate: leave out max_adapters")
    kind = str(config.get("model_type", ""))
    pools = "cls" if kind in _BERTS else "last"
    if spec.pooling != pools:
        raise _wrong(spec, f"pools {kind} models by {pools}, not by {spec.pooling}")
    if not spec.normalize or set(spec.outputs) != {"dense"}:
        raise _wrong(spec, "gives dense vectors of length 1, nothing else")


def arguments(
    spec: ModelSpec, folder: Path, config: dict[str, Any], made: Plan, port: int
) -> list[str]:
    """What stands behind `python -m sglang.launch_server`. config: of the model."""
    kind, _, number = made.device.partition(":")
    given: dict[str, object] = {
        "--model-path": folder,
        "--host": "127.0.0.1",
        "--port": port,
        "--device": kind,
        "--dtype": made.dtype,
        "--context-length": spec.max_tokens,
        "--max-running-requests": made.slots,
        "--max-total-tokens": made.kv_tokens,
        "--log-level": "warning",
    }
    flags = ["--incremental-streaming-output", "--skip-server-warmup"]
    if kind == "cpu":
        given["--attention-backend"] = "torch_native"
        flags.append("--disable-cuda-graph")
    else:
        given["--base-gpu-id"] = number or 0
    if spec.tasks == ["encode"]:
        # Its cache of prefixes is for decoders: what it would reuse of an encoder's is wrong.
        flags += ["--is-embedding", "--disable-radix-cache"]
    if config.get("model_type") in _BERTS and "position_embedding_type" not in config:
        # It reads the field, which newer files leave out, as this is the only kind there is.
        given["--json-model-override-args"] = '{"position_embedding_type": "absolute"}'
    if made.seeds:
        flags.append("--enable-deterministic-inference")
    if made.adapters:
        flags.append("--enable-lora")
        given |= {
            "--lora-target-modules": "all",
            "--max-lora-rank": made.adapter_rank,
            "--max-loras-per-batch": made.adapters,
            "--max-loaded-loras": made.adapters,
        }
        if kind == "cpu":
            given["--lora-backend"] = "torch_native"
    return [*(str(part) for pair in given.items() for part in pair), *flags]


def environment(device: str) -> dict[str, str]:
    """The variables of a server. Log probabilities are the model's own, whatever temperature."""
    common = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "HF_HUB_OFFLINE": "1"}
    return common | ({"SGLANG_USE_CPU_ENGINE": "1"} if device.startswith("cpu") else {})


def _wrong(spec: ModelSpec, what: str) -> ModelUnavailable:
    return ModelUnavailable(f"{spec.key}: the sglang runtime {what}")
