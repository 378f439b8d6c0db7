"""What each runtime takes and gives, side by side, and what they do to one another.

    python bench/runtimes.py [--quick] [--part N] [--json FILE]

1. Each (model, runtime) in a process of its own, by `shoal models bakeoff`: the environment's size
   on disk, process start, load, first answer (medians of several starts), useful tokens per second
   of uniform and ragged texts in the best batch, memory, copies in 24 GiB; of a generator the time
   to the first token and tokens per second of 1, 4 and 16 texts at once.
2. Adapters: several mixed in one batch against a batch for each, loading one and going from one to
   another, on torch, Candle and SGLang; what an adapter that was extracted from a fine-tuned model
   gives beside that model.
3. Nine embedders beside two generators through one server, in an open loop: the embedders' 99th
   percentile with the generators at work over that with them idle, who is first in turn.
4. A model of each runtime through one gateway.

Headline: `torch_first_answer_s`, `candle_first_answer_s`, `lora_cosine`,
`embed_p99_ratio_with_generators`, `runtimes_proven` (runtimes that served a real model in this
run: all that it was asked). The bundle of Candle is built where it is missing; SGLang takes part
where its bundle is built already, by `make check-engines` for instance. The parts are in
`runtime_cases/`.
"""

from __future__ import annotations

import time

from harness import Report, options
from runtime_cases import adapters, alone, beside, together

PARTS = {1: alone.run, 2: adapters.run, 3: beside.run, 4: together.run}


def main() -> None:
    """Runs the parts that are asked for."""
    chosen = options(__doc__, parts=len(PARTS))
    whole = Report("Runtimes")
    for number in chosen.part or PARTS:
        begun_s = time.monotonic()
        part = Report(f"Part {number}")
        PARTS[number](part, quick=chosen.quick)
        print(f"part {number} took {time.monotonic() - begun_s:.0f} s", flush=True)
        part.show()
        whole.rows += part.rows
        whole.headline |= part.headline
        whole.save(chosen)  # what is measured is kept, whatever becomes of the next part


if __name__ == "__main__":
    main()
