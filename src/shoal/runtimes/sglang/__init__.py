"""The runtime `sglang`: a supervised SGLang server, spoken to in its own HTTP contract."""
