"""The catalog: what models exist and how to load them."""
