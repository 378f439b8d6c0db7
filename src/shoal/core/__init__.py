"""Policies and plain data: pure, driven alike by the worker and by a simulator."""
