"""What every task costs on real weights, bare and served, and what serving many at once is worth.

    python bench/tasks.py [--quick] [--part N] [--json FILE]

1. Each task of each model of the demo catalog: inputs per second of the bare runtime with its best
   batch size (as many one-thread processes as cores, inputs prepared beforehand) and through the
   server, their ratio, a call alone, and the memory of one copy.
2. The agent of `examples/contract_review`: documents a minute with its calls together, against the
   same calls made one after another.

Headline: `served_models` (models that answered in this run), `served_over_raw_min` and its median
(over the cases whose bare runtime computes for a millisecond or longer on an input; below that the
comparison is one of reading and carrying inputs, and stands in the table only), `agent_speedup`.
The parts are in `task_cases/`.
"""

from __future__ import annotations

import time

from harness import Report, options, serving
from task_cases import agent, models

PARTS = {1: models.run, 2: agent.run}


def main() -> None:
    """Runs the parts that are asked for."""
    chosen = options(__doc__, parts=len(PARTS))
    whole = Report("Every task on real weights")
    with serving() as server:
        for number in chosen.part or PARTS:
            begun_s = time.monotonic()
            part = Report(f"Part {number}")
            PARTS[number](part, server, quick=chosen.quick)
            print(f"part {number} took {time.monotonic() - begun_s:.0f} s", flush=True)
            part.show()
            whole.rows += part.rows
            whole.headline |= part.headline
            whole.save(chosen)  # what is measured is kept, whatever becomes of the next part


if __name__ == "__main__":
    main()
