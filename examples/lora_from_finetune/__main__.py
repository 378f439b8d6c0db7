"""`python -m examples.lora_from_finetune`: extracts the adapter, writes it, says how near it is.

Owns the options and the report.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from examples.lora_from_finetune.compare import TEXTS, cosines
from examples.lora_from_finetune.extract import extract
from shoal.catalog.load import load
from shoal.errors import ShoalError
from shoal.settings import let_threads_sleep
from shoal.train.encoder import open_encoder
from shoal.worker.devices import usable_cores


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns the exit status."""
    options = _options(arguments)
    if options.out.exists():
        print(f"{options.out} is there already; name a new folder with --out")
        return 2
    let_threads_sleep()
    try:
        catalog = load(options.catalog)
        with TemporaryDirectory() as cache:
            base, tuned = (
                open_encoder(catalog.resolve(name), Path(cache), threads=usable_cores())
                for name in (options.base, options.tuned)
            )
        made = extract(base, tuned, options.rank, options.out)
    except (ShoalError, ValueError) as error:
        print(error)
        return 1
    print(
        f"{options.out}: rank {options.rank}, {made.layers} linear layers, "
        f"{made.parameters / 1e6:.2f} million numbers; it keeps {made.kept:.1%} of their "
        f"difference\nnot in it: {made.left_out} other tensors that differ"
    )
    texts = options.texts.read_text("utf-8").splitlines() if options.texts else TEXTS
    bare, adapted = cosines(base, tuned, options.out, [text for text in texts if text.strip()])
    print(
        f"cosine with {tuned.entry.id}: {base.entry.id} {bare:.4f}, with the adapter {adapted:.4f}"
    )
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.lora_from_finetune")
    parser.add_argument("--base", default="all-minilm-l6-v2-torch", metavar="MODEL")
    parser.add_argument("--tuned", default="sre-minilm", metavar="MODEL", help="made from the base")
    parser.add_argument("--catalog", type=Path, metavar="DIR", help="the demo when left out")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True, help="folder to be made")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="to compare on, one on a line")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
