"""What choosing batches is worth: policies through the whole system, on real models.

    python bench/batching.py [--quick] [--part N] [--json FILE]

1. Ragged texts at saturation: useful tokens per second, padding and latency of batch formers that
   others use (`fifo32`, `window64`, `buckets`) and of Shoal's own (`fair`).
2. Nine models on one device, some popular and some not: the rate that keeps the tail in bounds.
3. Short jobs beside long ones: the tail of the short ones under one FIFO, lanes, and lanes whose
   long batches are cut and capped.
4. What the policy itself costs, in CPU time for each item.
5. Single calls beside a call of 2,000 texts, of the same tenant and of another.
6. The policy on emulated devices, 1, 5 and 20 times slower, and after a long idle time.

Rounds of all variants are taken in turn, in rotated order, over the same texts; ratios are of
pairs from the same round, with bootstrap intervals of 95 %. The parts are in `batches/`.
"""

from __future__ import annotations

import time

from batches import beside, emulated, formers, lanes, models, price
from harness import Report, options

PARTS = {
    1: formers.run,
    2: models.run,
    3: lanes.run,
    4: price.run,
    5: beside.run,
    6: emulated.run,
}


def main() -> None:
    """Runs the parts that are asked for."""
    chosen = options(__doc__, parts=len(PARTS))
    whole = Report("What choosing batches is worth")
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
