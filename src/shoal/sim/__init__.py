"""Simulations that drive the very policies of `shoal.core`, so that a plan is no guess."""
