"""The runtime of each test: one process for all claims of a group, gone before the next starts."""

from __future__ import annotations

import pytest

from tests.contract.adapted import Adapted
from tests.contract.adapters import adaptable
from tests.contract.declared import FIXTURES, GROUPS, OPTIONAL, UNSUPPORTED, about, claim_of
from tests.contract.hosted import Hosted
from tests.contract.speakers import speaker
from tests.contract.speaking import Speaking
from tests.contract.subjects import subject


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A claim is checked on every runtime of its group that does not declare it unsupported."""
    claim = claim_of(metafunc.function.__name__)
    for fixture in FIXTURES.keys() & set(metafunc.fixturenames):
        if metafunc.definition.get_closest_marker("parametrize") is not None:
            continue  # it says itself which runtimes it is about
        group = FIXTURES[fixture]
        chosen = [name for name in GROUPS[group] if claim not in UNSUPPORTED[group][name]]
        metafunc.parametrize(fixture, chosen, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of one runtime stand together, so that its process is started once."""
    for item in items:
        if (tested := about(item)) is None:
            continue
        item.add_marker(pytest.mark.xdist_group("-".join(tested)))
        if tested[1] in OPTIONAL:
            item.add_marker(pytest.mark.timeout(900))  # each load starts a server
    order = [(group, name) for group, names in GROUPS.items() for name in names]
    at = [i for i, item in enumerate(items) if about(item) is not None]
    ours = sorted((items[i] for i in at), key=lambda item: order.index(about(item)))
    for i, item in zip(at, ours, strict=True):
        items[i] = item


def _running(made):
    try:
        made.start()
        yield made
    finally:
        made.leave()


@pytest.fixture(scope="session")
def hosted(request, tmp_path_factory):
    """A running process of the runtime, with its subject's first model loaded."""
    yield from _running(Hosted(subject(request.param), tmp_path_factory.mktemp("hosted")))


@pytest.fixture(scope="session")
def speaking(request, tmp_path_factory):
    """A running process of the runtime, with a model loaded that generates."""
    yield from _running(Speaking(speaker(request.param), tmp_path_factory.mktemp("speaking")))


@pytest.fixture(scope="session")
def adapted(request, tmp_path_factory):
    """A running process of the runtime, with a model loaded that takes adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    yield from _running(Adapted(adaptable(request.param, folder), folder))
