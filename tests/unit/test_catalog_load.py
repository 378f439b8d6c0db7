import re
import tomllib
from pathlib import Path

import pytest

from shoal.catalog.load import load, read
from shoal.errors import CatalogError

GOOD = """\
id: tiny
tasks: [encode]
source: package://tiny/model
outputs:
  dense: {dim: 4}
"""
HEADED = """\
id: tiny
tasks: [score, classify]
source: package://tiny/model
scorer: head
heads:
  score: {kind: pair, file: h.safetensors, prefix: a., labels: [x, y], positive: x}
  classify: {kind: linear, file: h.safetensors, prefix: a., labels: [x, y]}
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def said(folder: Path) -> str:
    with pytest.raises(CatalogError) as caught:
        load(folder)
    return caught.value.message


def test_load_reads_every_entry_of_a_folder(tmp_path):
    """Each YAML file is an entry; hidden files, Markdown and folders are passed over."""
    write(tmp_path, a=GOOD, b=GOOD.replace("tiny", "other"))
    (tmp_path / "README.md").write_text("words")
    (tmp_path / ".hidden").write_text("words")
    (tmp_path / "sub").mkdir()
    assert [entry.id for entry in load(tmp_path).entries] == ["other", "tiny"]


def test_load_accepts_heads(tmp_path):
    """An entry with a score head and a classify head is sound."""
    (entry,) = load(write(tmp_path, a=HEADED)).entries
    assert entry.heads["score"].positive == "x"


ADAPTER = "name: formal\nbase: tiny\nsource: file:///formal\n"


def test_load_reads_adapters_beside_models(tmp_path):
    """A file with a `base` is an adapter of that model."""
    catalog = load(write(tmp_path, a=GOOD, b=ADAPTER, c=ADAPTER.replace("formal", "curt")))
    assert [adapter.id for adapter in catalog.adapters] == ["tiny@curt", "tiny@formal"]
    assert catalog.find("tiny@curt").entry is catalog.resolve("tiny")


@pytest.mark.parametrize(
    ("change", "line", "message"),
    [
        (("base: tiny", "base: tny"), 2, "no model of the catalog has the id `tny`"),
        (("name: formal", "name: '1'"), 2, "that is the name of revision `1` of `tiny`"),
        (("name: formal", "name: a@b"), 1, "name: `a@b` must be a letter"),
        (("source: file:///formal", "source: formal"), 3, "source: `formal` must be"),
        (("source: file:///formal", "rank: 4"), 1, "`source` is missing"),
        (("name: formal", "name: formal\nrank: 4"), 2, "unknown key `rank`"),
    ],
)
def test_load_names_what_is_wrong_with_an_adapter(tmp_path, change, line, message):
    """An adapter's faults have their file, line and place, as a model's have."""
    write(tmp_path, a=GOOD, bad=ADAPTER.replace(*change))
    assert f"  bad.yaml:{line}: " in said(tmp_path)
    assert message in said(tmp_path)


def test_load_refuses_two_adapters_of_one_name(tmp_path):
    """The second file is told which one has the name."""
    write(tmp_path, a=GOOD, b=ADAPTER, c=ADAPTER)
    assert "c.yaml:1: id `tiny@formal` is taken by `tiny@formal` in b.yaml" in said(tmp_path)


def test_load_of_the_builtin_catalog_succeeds():
    """The demo catalog is sound, and every entry says its licence, purpose and packages."""
    entries = load(None).entries
    assert {"all-minilm-l6-v2", "splade-tiny"} <= {entry.id for entry in entries}
    assert all(entry.licence and entry.description and entry.requires for entry in entries)


@pytest.mark.parametrize(
    ("change", "line", "message"),
    [
        (("outputs:", "poling: mean\noutputs:"), 4, "unknown key `poling`, did you mean `pooling`"),
        (("dim: 4", "dim: 4, dims: 4"), 5, "outputs.dense: unknown key `dims`, did you mean `dim`"),
        (("id: tiny\n", ""), 1, "`id` is missing"),
        (("id: tiny", "id: Tiny Model"), 1, "id: `Tiny Model` must be lower-case"),
        (("id: tiny", "id: 7"), 1, "id: 7 is a number; put it in quotes"),
        (
            ("[encode]", "[encod]"),
            2,
            "tasks[0]: `encod` is none of encode, score, classify, extract,",
        ),
        (("[encode]", "[]"), 2, "tasks: Expected `list` of length >= 1"),
        (("[encode]", "encode"), 2, "tasks: Expected `list`, got `str`"),
        (("[encode]", "[encode, encode]"), 2, "tasks: `encode` stands there twice"),
        (("package:", "http:"), 3, "source: `http://tiny/model` must be `package://"),
        (("package://tiny/model", "package://a/../b"), 3, "source: `../b` must not have"),
        (("package://tiny/model", "package://a.b/c"), 3, "source: `a.b` is no import name"),
        (("package://tiny/model", "file://x"), 3, "source: file:// takes an absolute path"),
        (("package://tiny/model", "hf://o/n"), 3, "source: hf:// needs a pinned revision"),
        (("package://tiny/model", "hf://o/n@main"), 3, "source: `main` moves; pin a commit"),
        (("package://tiny/model", "hf://o/n/m@v1"), 3, "source: `o/n/m` is no <org>/<name>"),
        (("outputs:\n  dense: {dim: 4}\n", ""), 1, "`encode` needs an output"),
        (("dense: {dim: 4}", "dens: {dim: 4}"), 4, "outputs: `dens` is none of dense, sparse"),
        (("dim: 4", "dim: 0"), 5, "outputs.dense.dim: Expected `int` >= 1"),
        (("dim: 4", "dim: four"), 5, "outputs.dense.dim: Expected `int`, got `str`"),
        (
            ("dense: {dim: 4}", "dense: 4"),
            5,
            "outputs.dense: must be a mapping of fields, not a nu",
        ),
        (("[encode]", "[encode, classify]"), 2, "tasks: `classify` needs `heads.classify`"),
        (("[encode]", "[encode, score]\nscorer: maxsim"), 3, "`outputs.multivector` is missing"),
        (("[encode]", "[encode, generate]"), 2, "tasks: a generator has a process of its own"),
        (("[encode]", "[encode, extract]"), 1, "extracts: `extract` needs what it returns"),
        (("outputs:", "extracts: [entities]\noutputs:"), 4, "`tasks` does not have `extract`"),
        (("[encode]", "[encode, transcribe]"), 1, "inputs: `transcribe` listens: `audio` is"),
        (("outputs:", "inputs: [text, text]\noutputs:"), 4, "inputs: `text` stands there twice"),
        (("outputs:", "labels: [x, y]\noutputs:"), 4, "labels: name classes, and no task"),
        (
            ("outputs:", "pinned: true\nidle_timeout_s: 9\noutputs:"),
            5,
            "idle_timeout_s: evicts what `pinned` keeps",
        ),
        (
            ("outputs:", "min_replicas: 2\nidle_timeout_s: 9\noutputs:"),
            5,
            "idle_timeout_s: evicts what `min_replicas` keeps",
        ),
        (
            ("outputs:", "facts: [here]\noutputs:"),
            4,
            "facts[0]: `here` must be an https:// address",
        ),
        (("outputs:", "scorer: joint\noutputs:"), 4, "scorer: `joint` serves `score` and"),
        (("outputs:", "weights: ../w.onnx\noutputs:"), 4, "weights: `../w.onnx` must not have"),
        (("outputs:", "weights: /w.onnx\noutputs:"), 4, "weights: `/w.onnx` must be a relative"),
        (("outputs:", "weights: w.bin\noutputs:"), 4, "weights: `w.bin` is a pickle, which needs"),
        (("outputs:", "tokenizer: file:///t.pkl\noutputs:"), 4, "tokenizer: is a pickle, which"),
        (("outputs:", "weights: w.h5\noutputs:"), 4, "weights: `w.h5` is an unknown file type"),
        (("package://tiny/model", "s3://b"), 3, "is missing: the folder of the model"),
        (("outputs:", "digests: {a: b}\noutputs:"), 4, "digests"),
        (("outputs:", "tokenizer: x\noutputs:"), 4, "tokenizer: `x` must be `package://"),
        (("outputs:", "aliases: [a b]\noutputs:"), 4, "aliases[0]: `a b` must have no space"),
        (("outputs:", "aliases: [a@1]\noutputs:"), 4, "aliases[0]: `a@1` must have no space"),
        (("outputs:", "aliases: [x, x]\noutputs:"), 4, "aliases: `x` stands there twice"),
        (("outputs:", "aliases: [tiny]\noutputs:"), 4, "aliases: `tiny` stands there twice"),
        (("outputs:", "prompts: {Query: x}\noutputs:"), 4, "prompts.Query: a prompt's name is"),
        (("outputs:", "revision: 1\noutputs:"), 4, "revision: 1 is a number; put it in quotes"),
        (("outputs:", "normalize: 1\noutputs:"), 4, "normalize: Expected `bool`, got `int`"),
        (("outputs:", "profile: {batch_tokens: 0}\noutputs:"), 4, "profile.batch_tokens: Expected"),
        (
            ("outputs:", "id: again\noutputs:"),
            4,
            "id: key `id` stands there twice (first in line 1",
        ),
        (("dim: 4", "dim: 4, dim: 5"), 5, "outputs.dense.dim: key `dim` stands there twice"),
        (("[encode]", "&a [*a]"), 2, "anchors and aliases are not supported"),
        (("[encode]", "[encode"), 3, "no valid YAML"),
        (("tiny\n", "tiny\n\t"), 2, "no valid YAML"),
    ],
)
def test_load_names_file_line_and_place(tmp_path, change, line, message):
    """Each kind of fault is reported with its file, its line and what would be right."""
    write(tmp_path, bad=GOOD.replace(*change))
    assert f"  bad.yaml:{line}: " in said(tmp_path)
    assert message in said(tmp_path)


@pytest.mark.parametrize(
    ("found", "inputs", "needed"),
    [
        ("entities", "image", "`text`"),
        ("text", "text", "`document` or `image`"),
        ("layout", "audio", "`document` or `image`"),
        ("speech", "document", "`audio`"),
    ],
)
def test_load_knows_what_is_read_from_what(tmp_path, found, inputs, needed):
    """Each thing that can be extracted wants an input that it can be read from."""
    text = (
        f"id: a\ntasks: [extract]\nsource: package://a/b\nextracts: [{found}]\ninputs: [{inputs}]"
    )
    write(tmp_path, bad=text)
    assert f"bad.yaml:4: extracts[0]: `{found}` is read from {needed}" in said(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        "tasks: [encode, classify]\noutputs: {dense: {dim: 4}}\nlabels: [x, y]",
        "tasks: [encode, classify]\noutputs: {dense: {dim: 4}}\ninputs: [image]",
        "tasks: [classify]",
        "tasks: [classify]\ninputs: [file]",
        "tasks: [classify]\nscorer: joint",
        "tasks: [score]\nscorer: maxsim\noutputs: {multivector: {dim: 4}}",
        "tasks: [extract]\nextracts: [text, layout]\ninputs: [document]",
        "tasks: [transcribe, extract]\nextracts: [speech]\ninputs: [audio]",
    ],
)
def test_load_accepts_a_network_that_needs_no_head(tmp_path, fields):
    """Classifiers of their own, late interaction, files and sounds are sound entries."""
    assert len(load(write(tmp_path, a=f"id: a\nsource: package://a/b\n{fields}\n"))) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("kind: pair", "kind: pear"), "heads.score.kind: `pear` is none of linear, pair, did you"),
        (
            ("prefix: a., labels: [x, y], pos", "labels: [x, y], pos"),
            "heads.score: `prefix` is mis",
        ),
        (("kind: pair", "kind: linear"), "heads.score.kind: a score is of two texts"),
        ((", positive: x", ""), "heads.score.positive: is missing"),
        (("positive: x", "positive: z"), "heads.score.positive: `z` is none of the labels"),
        (("positive: x", "positive: x, alow_pickle: true"), "did you mean `allow_pickle`"),
        (("labels: [x, y], pos", "labels: [x], pos"), "heads.score.labels: at least two labels"),
        (("labels: [x, y], pos", "labels: [x, x], pos"), "heads.score.labels: `x` stands there tw"),
        (
            ("labels: [x, y], pos", "labels: [x, yes], pos"),
            "heads.score.labels[1]: True is true/fa",
        ),
        (("h.safetensors", "h.pt"), "a checkpoint needs `allow_pickle: true`"),
        (("h.safetensors", "../h.safetensors"), "must not have empty, `.` or `..` parts"),
        (("  score:", "  scores:"), "heads: `scores` is none of score, classify, did you mean `sc"),
        (("[score, classify]", "[score]"), "heads.classify: is there, but `tasks` does not have"),
        (
            ("scorer: head\n", "outputs: {dense: {dim: 4}}\n"),
            "heads.score: is used by task `score`",
        ),
        (("scorer: head\n", ""), "scorer: `similarity` compares dense vectors"),
    ],
)
def test_load_names_the_fault_of_a_head(tmp_path, change, message):
    """Faults below `heads` are named with their whole place."""
    write(tmp_path, bad=HEADED.replace(*change, 1))
    assert message in said(tmp_path)


@pytest.mark.parametrize("value", ['!!int ""', '!!float ""', "!!bool x", "!!timestamp x"])
def test_load_names_the_file_of_a_value_that_does_not_fit_its_tag(tmp_path, value):
    """What the YAML library stumbles over is a fault of that file, and other files are read."""
    good = "id: a\ntasks: [encode]\nsource: package://a/b\noutputs: {dense: {dim: 4}}\n"
    entries, (fault,) = read(write(tmp_path, a=good, bad=f"id: {value}"))
    assert [entry.id for entry in entries] == ["a"]
    assert str(fault).startswith("bad.yaml: cannot be read: ")


def test_load_reads_no_folder_that_cannot_be_looked_at(tmp_path):
    """A folder that the system refuses is a fault like any other."""
    with pytest.raises(CatalogError, match="cannot be read"):
        load(tmp_path / ("a" * 300))


def test_load_reports_all_faults_of_a_folder_together(tmp_path):
    """Two bad files, one of them with two faults, are three lines of one error."""
    two = GOOD.replace("outputs:", "poling: x\nrevison: x\noutputs:")
    write(tmp_path, a=two, b="[]", c=GOOD)
    assert said(tmp_path).count("\n  ") == 3
    assert "3 errors" in said(tmp_path)
    assert "b.yaml:1: must be a mapping of fields, not a list" in said(tmp_path)


def test_load_names_both_owners_of_a_name(tmp_path):
    """The same id twice, and an alias that is another's id, name the file that has it already."""
    other = GOOD.replace("id: tiny", "id: other\naliases: [tiny]")
    write(tmp_path, a=GOOD, b=GOOD, c=other)
    assert "b.yaml:1: id `tiny` is taken by `tiny` in a.yaml" in said(tmp_path)
    assert "c.yaml:2: name `tiny` is taken by `tiny` in a.yaml" in said(tmp_path)


def test_load_refuses_a_folder_without_entries(tmp_path):
    """An empty or missing folder is an error, never an empty catalog."""
    assert "there is no *.yaml file in it" in said(tmp_path)
    assert "there is no such folder" in said(tmp_path / "none")


@pytest.mark.parametrize("name", ["a.json", "a.yam", "weights"])
def test_load_refuses_a_file_of_unknown_type(tmp_path, name):
    """A stray file was meant to be something: it is named instead of passed over."""
    write(tmp_path, good=GOOD)
    (tmp_path / name).write_text("x")
    assert f"{name}: unknown file type" in said(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"# only words\n", b"\xff\xfe\x00", b"[" * 1500, b"a: b\n" * 60_000]
)
def test_load_survives_a_file_that_is_no_entry(tmp_path, data):
    """Empty, binary, deeply nested and huge files are faults of that file."""
    (tmp_path / "bad.yaml").write_bytes(data)
    assert "bad.yaml" in said(tmp_path)


def test_read_keeps_the_sound_entries(tmp_path):
    """`read` gives the good entries beside the faults of the others."""
    entries, faults = read(write(tmp_path, a=GOOD, b="id: 1"))
    assert [entry.id for entry in entries] == ["tiny"]
    assert {fault.file for fault in faults} == {"b.yaml"}


def test_builtin_packages_are_pinned_alike_everywhere():
    """An entry's `requires`, the extra `demo` and constraints/demo.txt name the same packages."""
    root = Path(__file__).resolve().parents[2]
    required = {package for entry in load(None).entries for package in entry.requires}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    pinned = re.findall(
        r"^([\w-]+==[\w.]+)", (root / "constraints/demo.txt").read_text(), re.MULTILINE
    )
    extra = {named.partition(";")[0] for named in project["optional-dependencies"]["demo"]}
    assert required == extra == set(pinned)
