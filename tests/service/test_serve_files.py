"""Files and structures through the whole server: gateway, queue, worker, runtime process."""

from __future__ import annotations

import numpy as np
import pytest

from shoal import Client
from shoal.client import InputsFailed
from shoal.errors import InvalidRequest, RunFailed
from shoal.runtimes.null import numbers
from shoal.runtimes.null_records import record
from shoal.wire.envelope import Params
from tests.support.bad_files import WAV, png_header
from tests.support.ports import free_port
from tests.support.shoal_process import ShoalProcess

ENTRIES = {
    "pictures": "tasks: [encode, classify]\ninputs: [image]\noutputs: {dense: {dim: 8}}",
    "pages": "tasks: [extract]\ninputs: [document]\nextracts: [text, layout]",
    "sounds": "tasks: [transcribe]\ninputs: [audio]",
    "names": "tasks: [extract]\nextracts: [entities]",
    "frail": "tasks: [classify]\ninputs: [file]\noptions: {poison: boom}",
}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    catalog = folder / "catalog"
    catalog.mkdir()
    for name, fields in ENTRIES.items():
        text = f'id: {name}\nruntime: "null"\nsource: file:///\n{fields}\n'
        (catalog / f"{name}.yaml").write_text(text)
    port = free_port()
    flags = ("--catalog", str(catalog), "--port", str(port), "--data-dir", str(folder / "data"))
    server = ShoalProcess("serve", *flags, "--devices", "cpu:1")
    try:
        server.wait_for("ready in")
        with Client(f"http://127.0.0.1:{port}", timeout_s=30) as client:
            yield client
    finally:
        server.leave()


def test_serve_files_come_back_in_order_with_errors_in_place(client):
    """Of many pictures each has its own vector; the broken and the refused ones fail alone."""
    files = [png_header(n + 1, 1) for n in range(40)]
    assert np.array_equal(client.encode(files, "pictures"), numbers(files, 8))
    files[7] += b"broken"
    files[20] = b""
    with pytest.raises(InputsFailed) as failed:
        client.encode(files, "pictures")
    assert failed.value.indices == [at for at in range(40) if at not in (7, 20)]
    well = [files[at] for at in failed.value.indices]
    assert np.array_equal(failed.value.results, numbers(well, 8))
    assert "broken" in failed.value.errors[7].message
    assert all(isinstance(error, InvalidRequest) for error in failed.value.errors.values())


def test_serve_files_too_large_for_the_queue_go_by_another_way(client):
    """A document of a megabyte is read as it was sent, beside a small one."""
    documents = [b"%PDF-1.7" + b"x" * 1_000_000, b"%PDF-1.7"]
    found = client.extract(documents, "pages", outputs=["layout", "text"])
    expected = [record(one, ["text", "layout"], Params()) for one in documents]
    assert [one.pages for one in found] == [one.pages for one in expected]


def test_serve_transcribes_and_finds_names(client):
    """A transcript and entities come through the queue as the runtime made them."""
    assert client.transcribe(WAV, "sounds").text == record(WAV, ["transcript"], Params()).text
    texts = [f"Ada Lovelace {n}" for n in range(100)]
    found = client.extract(texts, "names", threshold=0.0)
    assert {entity.text for one in found for entity in one.entities} == {"Lovelace"}
    scores = [record(text, ["entities"], Params()).entities[0].score for text in texts]
    assert [one.entities[0].score for one in found] == scores


def test_serve_file_that_is_too_large_to_be_kept_is_answered(client):
    """A poisoned file of nine megabytes fails clearly and at once, though no letter can hold it."""
    with pytest.raises(RunFailed, match="poison"):
        client.classify([b"\0" * (9 * 2**20) + b"boom"], "frail")
