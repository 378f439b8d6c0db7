"""The parts of `bench/runtimes.py`."""
