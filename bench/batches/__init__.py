"""The parts of `bench/batching.py`."""
