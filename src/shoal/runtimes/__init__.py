"""Runtimes: what loads weights and runs batches, each in a process of its own."""
