"""What every runtime keeps to that takes adapters, in batches or as it generates.

As in `test_contract`: the names of the tests are those of the claims, their docstrings the words of
the documentation.
"""

from __future__ import annotations

import pytest

from shoal.errors import ModelUnavailable
from tests.contract.adapted import BARE, Adapted

pytestmark = pytest.mark.slow

MIB = 2**20
CYCLES = 40
# Allocators keep some of what they got.
SLACK_BYTES = 4 * MIB


@pytest.fixture
def three(adapted):
    """The keys of three adapters that are loaded."""
    keys = [adapted.key(name) for name in ("a", "b", "c")]
    for key, path in zip(keys, adapted.folders.fits, strict=True):
        adapted.load(key, path)
    yield keys
    adapted.unload(*keys)


def _each(adapted: Adapted, keys: list[str]) -> list:
    """The answer to the first input by each adapter, each asked by itself."""
    return [adapted.ask((0, key))[0] for key in keys]


def test_contract_adapters_differ(adapted: Adapted, three):
    """Each adapter gives answers of its own, and without one the model's are as they were."""
    assert adapted.hello.traits.lora
    (before,) = adapted.bare[:1]
    found = [before, *_each(adapted, three)]
    for at, one in enumerate(found):
        assert not any(adapted.same(one, other) for other in found[at + 1 :])
    assert adapted.same(adapted.ask((0, BARE))[0], before)


def test_contract_adapter_parity(adapted: Adapted, three):
    """Its answers are those of the makers' own code with the same adapter."""
    expected = adapted.reference(adapted.folders.fits[0])
    found = adapted.ask((0, three[0]), (1, three[0]))
    assert all(map(adapted.same, found, expected))


def test_contract_adapters_mixed(adapted: Adapted, three):
    """Asked at once, with several adapters and without, each answer is as it is alone."""
    asked = [(at, key) for at in (0, 1) for key in (*three, BARE)]
    alone = [adapted.ask(one)[0] for one in asked]
    for order in (asked, asked[::-1]):
        mixed = adapted.ask(*order)
        expected = alone if order is asked else alone[::-1]
        assert all(map(adapted.same, mixed, expected))


def test_contract_adapter_unknown(adapted: Adapted, three):
    """An item with an adapter that is not loaded fails alone."""
    first, failed, last = adapted.ask((0, three[0]), (0, adapted.key("nobody")), (1, BARE))
    assert isinstance(failed, ModelUnavailable)
    assert adapted.same(first, _each(adapted, three)[0])
    assert adapted.same(last, adapted.bare[1])


def test_contract_adapter_broken(adapted: Adapted, three):
    """One for another model, or of which a part is missing, is refused and leaves nothing."""
    before = _each(adapted, three)
    for fault, path in adapted.folders.broken.items():
        key = adapted.key(fault.replace(" ", "-"))
        with pytest.raises(ModelUnavailable):
            adapted.load(key, path)
        assert isinstance(adapted.ask((0, key))[0], ModelUnavailable), fault
    assert all(map(adapted.same, _each(adapted, three), before))
    assert adapted.same(adapted.ask((0, BARE))[0], adapted.bare[0])


def test_contract_adapter_fresh(adapted: Adapted, tmp_path):
    """Published again in the same place, it answers anew; the earlier one answers as before."""
    place, keys = tmp_path / "published", [adapted.key("p", revision) for revision in "12"]
    found = []
    for key, path in zip(keys, adapted.folders.fits, strict=False):
        place.unlink(missing_ok=True)
        place.symlink_to(path)
        adapted.load(key, place)
        found.append(adapted.ask((0, key))[0])
    older, newer = adapted.ask((0, keys[0]), (0, keys[1]))
    adapted.unload(*keys)
    assert not adapted.same(*found)
    assert adapted.same(older, found[0])
    assert adapted.same(newer, found[1])


def test_contract_adapter_memory(adapted: Adapted):
    """It says what an adapter takes; loaded and unloaded many times, the process grows no more."""
    key, held = adapted.key("a"), []
    model_bytes = adapted.process.memory().models[adapted.subject.entry.key]
    for _ in range(CYCLES):
        loaded = adapted.load(key, adapted.folders.fits[0])
        assert 0 < loaded.memory_bytes < model_bytes
        adapted.unload(key)
        held.append(adapted.process.held_bytes())
    assert max(held[-5:]) <= max(held[4:10]) + SLACK_BYTES, [each // MIB for each in held]


def test_contract_adapter_unload(adapted: Adapted, three):
    """Unloaded, it is unknown and the others are as before; loaded again, so is it."""
    before = _each(adapted, three)
    adapted.unload(three[1], three[1], adapted.key("nobody"))
    gone, *others = adapted.ask((0, three[1]), (0, three[0]), (0, three[2]))
    assert isinstance(gone, ModelUnavailable)
    assert all(map(adapted.same, others, (before[0], before[2])))
    adapted.load(three[1], adapted.folders.fits[1])
    assert all(map(adapted.same, _each(adapted, three), before))


def test_contract_adapters_go_with_the_model(adapted: Adapted, three):
    """Unloading a model forgets its adapters; the model alone comes back."""
    adapted.process.unload(adapted.subject.entry)
    adapted.process.load(adapted.subject.entry)
    gone, bare = adapted.ask((0, three[0]), (0, BARE))
    assert isinstance(gone, ModelUnavailable)
    assert adapted.same(bare, adapted.bare[0])
