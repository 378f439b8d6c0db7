"""A fine-tuned embedder as a LoRA adapter of its base; README.md says how to run it."""
