"""Environments of their own for runtimes whose libraries the default environment lacks."""
