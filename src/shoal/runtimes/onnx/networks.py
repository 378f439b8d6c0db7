"""Networks that ONNX Runtime computes: a BERT checkpoint, or a graph somebody exported.

Owns what goes into and comes out of a session. Does not own the session's set-up (`session`), the
graphs of checkpoints (`graph`) or anything of items (`shoal.runtimes.encoder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.spelling import did_you_mean
from shoal.errors import ModelUnavailable, RunFailed
from shoal.ipc.messages import ModelSpec
from shoal.runtimes.bert import (
    WORDS,
    BertShape,
    BertWeights,
    Floats,
    classifier_of,
    config_beside,
    expected,
    expected_vocabulary,
    labels_of,
    positive_of,
    read_config,
    token_classifier_of,
)
from shoal.runtimes.checkpoint import SafetensorsFile, read_header
from shoal.runtimes.encoder import Network
from shoal.runtimes.heads import Head, called
from shoal.runtimes.onnx.cache import cached
from shoal.runtimes.onnx.families import ABOUT
from shoal.runtimes.onnx.prepared import place
from shoal.runtimes.onnx.session import Session
from shoal.runtimes.pooling import Hidden
from shoal.runtimes.sequences import Limits, Padded, TokenSequence, pad
from shoal.runtimes.static import StaticNetwork

# Stands for the code of `graph` in the cache's digest. It is not asked itself, because importing
# it brings the graph library along, which a process with a warm cache does without.
GRAPH_VERSION = 1
_IDS = {"int64": np.int64, "int32": np.int32}


def open_network(path: Path, spec: ModelSpec, *, device: str, threads: int) -> Network:
    """The network of a file: of the family that the spec names, or found from the file.

    Raises `ModelUnavailable`.
    """
    family = spec.family or ("graph" if path.suffix == ".onnx" else _family_of(path))
    if family not in ABOUT:
        raise ModelUnavailable(
            f"{spec.key}: this runtime has no family `{family}`{did_you_mean(family, ABOUT)}; "
            f"known: {', '.join(ABOUT)}"
        )
    if family == "static":
        return StaticNetwork(path, spec)
    kind = GraphNetwork if family == "graph" else BertNetwork
    return kind(path, spec, device=device, threads=threads)


def sessions_of(network: Network) -> list[Session]:
    """The sessions that a network runs; a table of vectors has none."""
    return network.sessions if isinstance(network, (BertNetwork, GraphNetwork)) else []


def _family_of(path: Path) -> str:
    """A checkpoint of BERT has a `config.json` that says so; a table's says nothing of the kind."""
    config = config_beside(path.parent)
    named = config.get("architectures") or config.get("model_type")
    return "bert" if named or "embeddings" not in read_header(path) else "static"


class BertNetwork:
    """A checkpoint of the BERT family, computed from graphs that are derived from its shape."""

    packs = False

    def __init__(self, weights_file: Path, spec: ModelSpec, *, device: str, threads: int) -> None:
        config = read_config(weights_file.parent)
        shape = BertShape.read(config, spec.key)
        file = SafetensorsFile(weights_file)
        weights = BertWeights(file, shape)
        if spec.pooling == "none":
            raise ModelUnavailable(f"{spec.key}: pooling none needs a graph that pools")
        self.limits = Limits(shape.positions, shape.vocab)
        self.classifier: Head | None = classifier_of(weights, shape, config, spec)
        self.has_vocabulary = weights.has_vocabulary
        self._token_classes = token_classifier_of(weights, shape)
        self._pad_id = shape.pad_id
        # The word table is only ever looked up: it stays in the mapped file, which every process
        # on the machine shares.
        self._words = weights[WORDS]

        def session(kind: str, names: Sequence[str]) -> Session:
            cache_dir, facts = Path(spec.cache_dir), f"{GRAPH_VERSION} {shape}"
            graph = cached(cache_dir, kind, facts, lambda: _build(kind, shape))
            return Session(
                graph,
                {name: weights[name] for name in names},
                device=device,
                threads=threads,
                where=spec.key,
                prepared=place(cache_dir, f"{kind} {facts}", weights_file),
            )

        self._encoder = session("encoder", [name for name in expected(shape) if name != WORDS])
        self._vocabulary: Session | None = None
        if "sparse" in spec.outputs and self.has_vocabulary:
            self._vocabulary = session("vocabulary", list(expected_vocabulary(shape)))
        self.sessions = [self._encoder, *([self._vocabulary] if self._vocabulary else [])]
        self.memory_bytes = (
            self._words.nbytes
            + sum(session.weights_bytes for session in self.sessions)
            + (self.classifier.nbytes if self.classifier else 0)
        )
        file.release_pages()

    def hidden(self, group: Sequence[TokenSequence]) -> Hidden:
        """Hidden states [n, longest, d] of a group."""
        rows = pad(group, self._pad_id)
        words = self._words[rows.ids]
        feeds: dict[str, Any] = {"words": words, "mask": rows.mask, "types": rows.types}
        return Hidden(self._encoder.run("hidden", feeds), rows.lengths)

    def vocabulary(self, states: Floats) -> Floats:
        """SPLADE weights [n, vocab]."""
        if self._vocabulary is None:
            raise RunFailed("the model was loaded without its masked-language head")
        return self._vocabulary.run("weights", {"hidden": states})

    def token_logits(self, group: Sequence[TokenSequence]) -> list[Floats]:
        """Class logits [tokens, k] of each sequence."""
        if self._token_classes is None:
            raise RunFailed("the checkpoint has no token classifier")
        hidden = self.hidden(group)
        weight, bias = self._token_classes
        return [hidden.rows(i) @ weight.T + bias for i in range(len(group))]


def _build(kind: str, shape: BertShape) -> bytes:
    from shoal.runtimes.onnx import graph

    return graph.encoder(shape) if kind == "encoder" else graph.vocabulary(shape)


class GraphNetwork:
    """A graph file: token ids in, token vectors out, or one vector (or logits) for each sequence.

    With pooling `none` the first float output with two axes is taken as it is; with any other
    pooling, the first with three. For `extract` it is the one that is called `logits`, if there is
    one. Option `output` names another one.
    """

    packs = False
    has_vocabulary = False

    def __init__(self, path: Path, spec: ModelSpec, *, device: str, threads: int) -> None:
        self._session = Session(
            path,
            {},
            device=device,
            threads=threads,
            where=spec.key,
            prepared=place(Path(spec.cache_dir), "graph", path),
        )
        self.sessions = [self._session]
        self._where = spec.key
        self._inputs = {node.name: _id_type(node, spec.key) for node in self._session.inputs}
        self._axes = 2 if spec.pooling == "none" else 3
        output = _choose_output(self._session.outputs, self._axes, spec)
        self._output = output.name
        self._token_output: str | None = None
        if "extract" in spec.tasks:
            named = [one for one in self._session.outputs if one.name == "logits"]
            self._token_output = _choose_output(named or self._session.outputs, 3, spec).name
        last = output.shape[-1] if output.shape else None
        # Exports put graphs into a folder of their own, below the model's other files.
        config = config_beside(path.parent) or config_beside(Path(spec.path))
        positions = int(config.get("max_position_embeddings") or spec.max_tokens)
        self.limits = Limits(positions, int(config.get("vocab_size") or 0))
        self._pad_id = int(config.get("pad_token_id") or 0)
        self.classifier: Head | None = None
        if self._axes == 2:
            found = labels_of(config, last if isinstance(last, int) else 0)
            labels = called(found, spec.labels, spec.key)
            self.classifier = Head(
                (),
                labels,
                positive=positive_of(labels, spec),
                independent=config.get("problem_type") == "multi_label_classification",
            )
        self.memory_bytes = path.stat().st_size

    def hidden(self, group: Sequence[TokenSequence]) -> Hidden:
        """What the graph gives for a group: [n, longest, d], or [n, d] where it pools."""
        return self._run(group, self._output, self._axes)

    def token_logits(self, group: Sequence[TokenSequence]) -> list[Floats]:
        """Class logits [tokens, k] of each sequence."""
        if self._token_output is None:
            raise RunFailed(f"{self._where} was loaded without a token classifier")
        logits = self._run(group, self._token_output, 3)
        return [np.array(logits.rows(i)) for i in range(len(group))]

    def _run(self, group: Sequence[TokenSequence], output: str, axes: int) -> Hidden:
        rows = pad(group, self._pad_id)
        feeds = {name: _feed(name, rows).astype(kind) for name, kind in self._inputs.items()}
        states = self._session.run(output, feeds)
        if states.ndim != axes or len(states) != len(group):
            raise RunFailed(
                f"{self._where}: output {output} is {states.shape} for {len(group)} inputs, "
                f"{axes} axes were expected"
            )
        return Hidden(states, rows.lengths)

    def vocabulary(self, states: Floats) -> Floats:
        """A graph file has no vocabulary head apart."""
        raise RunFailed(f"{self._where} gives no sparse vectors for {states.shape}")


_FEEDS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def _feed(name: str, rows: Padded) -> Any:
    if name == "input_ids":
        return rows.ids
    if name == "attention_mask":
        return rows.mask
    if name == "token_type_ids":
        return rows.types
    return np.broadcast_to(np.arange(rows.ids.shape[1]), rows.ids.shape)


def _id_type(node: Any, where: str) -> type:
    kind = str(node.type).removeprefix("tensor(").removesuffix(")")
    if node.name not in _FEEDS or kind not in _IDS:
        raise ModelUnavailable(
            f"{where}: the graph wants {node.name} ({kind}); known inputs: {', '.join(_FEEDS)}, "
            "int64 or int32"
        )
    return _IDS[kind]


def _choose_output(outputs: Sequence[Any], axes: int, spec: ModelSpec) -> Any:
    named = spec.options.get("output")
    for output in outputs:
        if named == output.name or (
            named is None and output.type == "tensor(float)" and len(output.shape) == axes
        ):
            return output
    found = ", ".join(f"{output.name} {output.type} {output.shape}" for output in outputs)
    what = f"called {named!r}" if named else f"of floats with {axes} axes (pooling {spec.pooling})"
    raise ModelUnavailable(f"{spec.key}: the graph has no output {what}; it has {found}")
