"""The runtime `candle`: embeddings and generation on Candle (Rust), on CPUs, without torch."""
