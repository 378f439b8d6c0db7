"""The runtime `candle`: embeddings and generation on Candle (Rust), on CPUs, without torch."""

from shoal.runtimes.candle.runtime import CandleRuntime

__all__ = ["CandleRuntime"]
