"""Copies of a store's folder: whole or not there, continued, made once. Over a store on disk."""

from __future__ import annotations

import threading

import pytest
from obstore.store import LocalStore, MemoryStore

from shoal.catalog import stores
from shoal.catalog.sources import wanted_files
from shoal.errors import WeightsMissing

WANTED = wanted_files(None, [], allow_pickle=False)
CONTENT = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 64,
    "onnx/model.onnx": b"graph",
    "tokenizer.json": b"",
}
OTHERS = {"pytorch_model.bin": b"pickle", "README.md": b"words", ".fetched.json": b"[]"}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of a few KiB, so that a file has several."""
    monkeypatch.setattr(stores, "PIECE_BYTES", 4096)


@pytest.fixture
def store(tmp_path):
    """A store with a model's files and some that nobody should fetch."""
    store = LocalStore(tmp_path / "store", mkdir=True)
    for name, content in (CONTENT | OTHERS).items():
        store.put(name, content)
    return store


class Ended(Exception):
    """What a listener raises to end the work."""


class Progress:
    """What was told; raises once so many bytes are done."""

    def __init__(self, stop_at_bytes=None):
        self.told = []
        self._stop_at_bytes = stop_at_bytes

    def __call__(self, done_bytes, total_bytes):
        self.told.append((done_bytes, total_bytes))
        if self._stop_at_bytes is not None and done_bytes >= self._stop_at_bytes:
            raise Ended


def files_of(folder):
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".")}


def test_stores_copy_has_the_wanted_files_and_no_others(store, tmp_path):
    """Weights and data come along, in their folders; pickles, texts for people and dotfiles not."""
    progress = Progress()
    stores.copy(store, tmp_path / "copy", WANTED, progress)
    assert files_of(tmp_path / "copy") == CONTENT
    total_bytes = sum(map(len, CONTENT.values()))
    assert progress.told[-1] == (total_bytes, total_bytes)
    assert progress.told == sorted(progress.told)


def test_stores_copy_goes_on_where_it_was_ended(store, tmp_path):
    """What was fetched is not fetched again, and nothing looks whole before it is."""
    first, second = Progress(stop_at_bytes=8192), Progress()
    with pytest.raises(Ended):
        stores.copy(store, tmp_path / "copy", WANTED, first)
    assert "model.safetensors" not in files_of(tmp_path / "copy")
    stores.copy(store, tmp_path / "copy", WANTED, second)
    assert files_of(tmp_path / "copy") == CONTENT
    assert second.told[0][0] > first.told[-1][0] - stores.PIECE_BYTES


def test_stores_copy_never_mixes_two_versions(store, tmp_path):
    """Files that change between an ended copy and the next one are all fetched anew."""
    with pytest.raises(Ended):
        stores.copy(store, tmp_path / "copy", WANTED, Progress(stop_at_bytes=8192))
    changed = CONTENT | {"model.safetensors": bytes(len(CONTENT["model.safetensors"]))}
    store.put("model.safetensors", changed["model.safetensors"])
    stores.copy(store, tmp_path / "copy", WANTED, Progress())
    assert files_of(tmp_path / "copy") == changed


def test_stores_copy_begins_anew_where_its_notes_are_damaged(store, tmp_path):
    """Bytes that are no text in the place of what is being fetched are not believed, nor fatal."""
    with pytest.raises(Ended):
        stores.copy(store, tmp_path / "copy", WANTED, Progress(stop_at_bytes=8192))
    (tmp_path / "copy" / stores._BEGUN).write_bytes(b"\xff\xfe")
    stores.copy(store, tmp_path / "copy", WANTED, Progress())
    assert files_of(tmp_path / "copy") == CONTENT


def test_stores_file_that_changes_under_a_copy_is_an_error(store, tmp_path):
    """A piece of another version than the one listed is refused, not appended."""

    def change(done_bytes, total_bytes):
        store.put("model.safetensors", b"other" * 9000)

    with pytest.raises(stores._errors()):
        stores.copy(store, tmp_path / "copy", WANTED, change)
    assert "model.safetensors" not in files_of(tmp_path / "copy")


def test_stores_copies_at_once_are_made_by_one(store, tmp_path):
    """Of several that want the same folder one fetches it; the others wait and find it whole."""
    told, found = [Progress() for _ in range(4)], []
    start = threading.Barrier(len(told))

    def want(progress):
        start.wait()
        stores.copy(store, tmp_path / "copy", WANTED, progress)
        found.append(files_of(tmp_path / "copy"))

    threads = [threading.Thread(target=want, args=(progress,)) for progress in told]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * len(told)
    assert sum(any(total_bytes for _, total_bytes in each.told) for each in told) == 1


def test_stores_forgotten_file_is_fetched_again(store, tmp_path):
    """A file that was dropped makes the copy incomplete, and alone is fetched anew."""
    folder, again = tmp_path / "copy", Progress()
    stores.copy(store, folder, WANTED, Progress())
    (folder / "onnx" / "model.onnx").write_bytes(b"spoilt")
    stores.forget(folder / "onnx" / "model.onnx")
    stores.copy(store, folder, WANTED, again)
    assert files_of(folder) == CONTENT


def test_stores_folder_with_nothing_to_fetch_says_so(tmp_path):
    """No file that fits is an error that says what was looked for."""
    store = MemoryStore()
    store.put("pytorch_model.bin", b"pickle")
    with pytest.raises(WeightsMissing, match=r"none of its 1 objects fits .*\*\.safetensors"):
        stores.copy(store, tmp_path / "copy", WANTED, Progress())


def test_stores_folder_with_too_many_objects_is_refused(tmp_path, monkeypatch):
    """A source that names a whole bucket by mistake is not listed to its end."""
    monkeypatch.setattr(stores, "MAX_LISTED", 3)
    store = MemoryStore()
    for n in range(stores.MAX_LISTED + 1):
        store.put(f"{n}.json", b"{}")
    with pytest.raises(WeightsMissing, match="more than 3 objects"):
        stores.copy(store, tmp_path / "copy", WANTED, Progress())


def test_stores_copy_that_the_disk_cannot_hold_is_refused(store, tmp_path, monkeypatch):
    """Too little room is found before the first byte is fetched."""
    full = stores.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(stores.shutil, "disk_usage", lambda _: full)
    progress = Progress()
    with pytest.raises(WeightsMissing, match="left on its disk"):
        stores.copy(store, tmp_path / "copy", WANTED, progress)
    assert progress.told == []
