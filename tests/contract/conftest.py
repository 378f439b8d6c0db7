"""The runtime of each test: one process for all claims about it, gone before the next starts."""

from __future__ import annotations

import pytest

from tests.contract.declared import RUNTIMES, runtime_of
from tests.contract.hosted import Hosted
from tests.contract.subjects import subject


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of one runtime stand together, so that its process is started once."""
    at = [i for i, item in enumerate(items) if runtime_of(item) is not None]
    ours = sorted((items[i] for i in at), key=lambda item: RUNTIMES.index(runtime_of(item)))
    for i, item in zip(at, ours, strict=True):
        items[i] = item


@pytest.fixture(scope="session")
def hosted(request, tmp_path_factory):
    """A running process of the runtime, with its subject's first model loaded."""
    made = Hosted(subject(request.param), tmp_path_factory.mktemp(request.param))
    try:
        made.start()
        yield made
    finally:
        made.leave()
