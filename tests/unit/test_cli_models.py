import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from shoal.catalog.load import field
from shoal.catalog.schema import Entry, Output
from shoal.catalog.snapshot import Snapshot
from shoal.cli.main import app
from shoal.cli.models_entry import Wish, proposals
from shoal.errors import CatalogError, SettingsError, UnknownModel

ROOT = Path(__file__).resolve().parents[2]
GOOD = """\
id: tiny
tasks: [encode]
source: package://no_such_package/model
outputs: {dense: {dim: 4}}
requires: [no-such-package==1.0]
"""


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_models_check_passes_a_sound_folder(tmp_path):
    """A sound folder is exit code 0; a model that cannot run here is a note."""
    (tmp_path / "a.yaml").write_text(GOOD)
    result = invoke("models", "check", tmp_path)
    assert result.exit_code == 0
    assert "1 model, no fault" in result.output
    assert "pip install --no-deps no-such-package==1.0" in result.output


def test_models_check_names_every_fault(tmp_path):
    """Faults are one line each with file and line, and the exit code is 2."""
    (tmp_path / "a.yaml").write_text(GOOD + "poling: mean\n")
    (tmp_path / "b.yaml").write_text("id: b")
    result = invoke("models", "check", tmp_path)
    assert result.exit_code == 2
    assert "a.yaml:6: unknown key `poling`, did you mean `pooling`?" in result.output
    assert result.output.count("b.yaml:1: ") == 2


def test_models_list_shows_the_catalog(tmp_path):
    """Each model is a row; why one cannot run stands below the table."""
    (tmp_path / "a.yaml").write_text(GOOD)
    result = invoke("models", "list", "--catalog", tmp_path)
    assert result.exit_code == 0
    assert "tiny@1" in result.output
    assert "missing" in result.output
    assert "no_such_package" in result.output


def test_models_list_refuses_a_bad_folder(tmp_path):
    """A folder with a fault is a CatalogError, which the command line shows as one line."""
    result = invoke("models", "list", "--catalog", tmp_path / "none")
    assert isinstance(result.exception, CatalogError)


# --- entries that `shoal models add` is asked for


def weights(path):
    """A folder of a model that its own files say nothing of."""
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"\0")
    return path


def entry_of(*names, catalog=(), **wish):
    [made] = proposals(Wish(names, **wish), Snapshot(catalog))
    return made.entry


def base(**more):
    """A model of a catalog that others may be run like."""
    plain = {
        "id": "base",
        "aliases": ["alias"],
        "tasks": ["encode"],
        "source": "package://msgspec",
        "runtime": "torch",
        "family": "bert",
        "verified": "weights",
        "pooling": "cls",
        "prompts": {"query": "query: "},
        "outputs": {"dense": {"dim": 7}},
        "pinned": True,
        "licence": "MIT",
    }
    return msgspec.convert(plain | more, Entry)


def test_models_add_like_another_copies_how_it_is_run(tmp_path):
    """Pooling, prompts and outputs come along; names, pins and what is known of it do not."""
    entry = entry_of(
        "tuned", catalog=[base()], like="alias", source=str(weights(tmp_path)), revision="2"
    )
    assert (entry.id, entry.revision, entry.source) == ("tuned", "2", f"file://{tmp_path}")
    assert (entry.pooling, entry.prompts) == ("cls", {"query": "query: "})
    assert entry.outputs["dense"].dim == 7
    assert (entry.runtime, entry.family, entry.verified) == ("torch", "bert", "family")
    assert (entry.aliases, entry.pinned, entry.licence) == ([], False, None)


def test_models_add_takes_the_tokenizer_of_the_other_where_the_folder_has_none(tmp_path):
    """Weights alone are enough where the model that they are like has a tokenizer."""
    (tmp_path / "tuned").mkdir()
    (tmp_path / "base").mkdir()
    source = f"file://{weights(tmp_path / 'base')}"
    made = entry_of("t", catalog=[base(source=source)], like="base", source=str(tmp_path / "tuned"))
    assert made.tokenizer == source


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("outputs.dense.dim=9", "outputs", {"dense": Output(9)}),
        ("options.dtype=bfloat16", "options", {"dtype": "bfloat16"}),
        ("prompts.query=Represent this: ", "prompts", {"query": "Represent this: "}),
        ("aliases=[a, b]", "aliases", ["a", "b"]),
        ("revision=3", "revision", "3"),
        ("idle_timeout_s=60", "idle_timeout_s", 60),
        ("min_replicas=2", "min_replicas", 2),
    ],
)
def test_models_add_set_has_the_last_word(tmp_path, text, field, value):
    """Values are YAML; a text stays one where the field is a text."""
    made = entry_of("t", catalog=[base()], like="base", source=str(weights(tmp_path)), sets=[text])
    assert getattr(made, field) == value


@pytest.mark.parametrize(
    ("text", "said"), [("pooling", "field=value"), ("poling=cls", "did you mean `pooling`")]
)
def test_models_add_set_refuses_what_is_no_field(tmp_path, text, said):
    """A field that is not there is usage, with the near name."""
    with pytest.raises(SettingsError, match=said):
        entry_of("t", catalog=[base()], like="base", source=str(weights(tmp_path)), sets=[text])


def test_models_add_names_the_flag_for_what_a_folder_does_not_say(tmp_path):
    """The error lists each gap with the flag that fills it; filled, there is an entry."""
    config = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 4}
    config |= {"vocab_size": 9, "num_hidden_layers": 1, "num_attention_heads": 1}
    config |= {"intermediate_size": 8, "max_position_embeddings": 16}
    weights(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CatalogError, match="--set pooling=") as caught:
        entry_of("t", source=str(tmp_path))
    assert "--like" in caught.value.message
    made = entry_of("t", source=str(tmp_path), sets=["pooling=mean"])
    assert (made.runtime, made.family, made.max_tokens) == ("onnx", "bert", 16)
    assert made.outputs == {"dense": Output(4)}
    with pytest.raises(CatalogError, match="pooling: `men` is none of"):
        entry_of("t", source=str(tmp_path), sets=["pooling=men"])


def test_models_add_chooses_torch_for_what_the_light_runtime_cannot_compute(tmp_path):
    """The runtime and the family follow from the network's own name."""
    weights(tmp_path)
    config = {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "hidden_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = entry_of("t", source=str(tmp_path), sets=["pooling=cls", "max_tokens=512"])
    assert (made.runtime, made.family) == ("torch", "roberta")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OtherModel"]}))
    with pytest.raises(CatalogError, match="OtherModel is not supported"):
        entry_of("t", source=str(tmp_path))


@pytest.mark.slow
def test_models_add_knows_the_field_by_name():
    """Any of its names will do; without a known revision the error says what to give."""
    pinned = next(entry for entry in field().entries if not entry.unpinned and entry.aliases)
    assert entry_of(pinned.aliases[0]) == pinned
    loose = next(entry for entry in field().entries if entry.unpinned)
    with pytest.raises(CatalogError, match=f"--source {loose.source}@<commit>"):
        entry_of(loose.id)
    commit = "0123456789abcdef0123"
    made = entry_of(loose.id, source=f"{loose.source}@{commit}")
    assert made.source == f"{loose.source}@{commit}"
    assert commit.startswith(made.revision)
    assert made.tasks == loose.tasks
    with pytest.raises(CatalogError, match=f"did you mean.*`{pinned.aliases[0]}`"):
        entry_of(f"{pinned.id}x")


def test_models_add_refuses_what_cannot_be_meant(tmp_path):
    """Flags for one model with several, files with a fault, and sources that nobody looks into."""
    with pytest.raises(SettingsError, match="for one model"):
        entry_of("a", "b", source="/")
    with pytest.raises(SettingsError, match="--source"):
        entry_of("a", like="b")
    with pytest.raises(UnknownModel, match="did you mean `base`"):
        entry_of("a", source=str(weights(tmp_path)), like="bse", catalog=[base()])
    with pytest.raises(CatalogError, match="--like"):
        entry_of("a", source="s3://bucket/a")
    (tmp_path / "a.yaml").write_text(GOOD + "poling: mean\n")
    with pytest.raises(CatalogError, match=r"a\.yaml:6: unknown key `poling`"):
        entry_of(str(tmp_path / "a.yaml"))
    (tmp_path / "a.yaml").write_text(GOOD)
    with pytest.raises(CatalogError, match="two of them"):
        entry_of(str(tmp_path / "a.yaml"), str(tmp_path / "a.yaml"))


@pytest.mark.slow
def test_models_list_shows_the_field():
    """The models that can be added by name are listed with what has been tried of each."""
    result = invoke("models", "list", "--field")
    assert result.exit_code == 0
    rows = [row for row in result.output.splitlines() if row.startswith("baai/bge-m3 ")]
    assert rows
    assert field().resolve("baai/bge-m3").verified in rows[0]


@pytest.mark.slow
def test_models_list_without_a_cluster_lists_the_built_in_catalog(tmp_path):
    """Where no serve runs in the folder, it says so and lists what a serve would have."""
    result = invoke("models", "list", "--data-dir", tmp_path)
    assert result.exit_code == 0
    assert "no `shoal serve` runs" in result.output
    assert "all-minilm-l6-v2@1" in result.output
    json_result = invoke("models", "list", "--json", "--data-dir", tmp_path)
    assert isinstance(json_result.exception, SettingsError)


def told_commands():
    """Every `shoal models ...` line of the pages that people write."""
    for page in (ROOT / "docs").glob("*.md"):
        lines = page.read_text(encoding="utf-8").splitlines() if page.name != "cli.md" else []
        for line in lines:
            found = re.match(r"(?:\$ )?shoal (models \w+.*)", line)
            if found:
                yield page.name, found[1].split("   ")[0]


def test_models_commands_of_the_pages_exist():
    """Each command and each flag that a page shows is one of the command line's."""
    root = get_command(app)
    told = list(told_commands())
    assert len(told) > 20
    for page, line in told:
        _, name, *words = shlex.split(line)
        command = root.commands["models"].commands[name]
        known = {flag for each in command.params for flag in each.opts}
        assert {word for word in words if word.startswith("--")} <= known, (page, line)
