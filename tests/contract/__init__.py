"""One contract for all runtimes: the same claims, checked in each one's real process.

`subjects` says what each runtime is checked with, `declared` what it does not support, `hosted`
drives its process, and the `test_` modules hold the claims. `python -m tests.contract` writes what
was found to `docs/runtimes.json`, of which `make docs` makes the page on runtimes.
"""
