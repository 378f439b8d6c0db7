"""Training LoRA adapters of embedders: pairs of texts in, an adapter in PEFT's form out."""
