"""What was found in a contract, and how that compares with what is in it.

Owns the findings, joining pieces of personal data, the notes for the summary, and precision and
recall. Does not own asking the models (`agent`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from examples.contract_review.documents import Contract
from examples.contract_review.library import Clause
from examples.contract_review.paragraphs import Paragraph
from shoal.client import Entity

# The labels of the model for personal data that the review asks for, and what they are called.
PII = {"GIVEN_NAME": "name", "SURNAME": "name", "EMAIL": "e-mail", "PHONE": "phone"}


# Of a contract: what is there, and what was found.
Sets = tuple[Collection[str], Collection[str]]


@dataclass(frozen=True, slots=True)
class Match:
    """A paragraph and the clause of the library that is closest to it."""

    text: str
    clause: Clause
    score: float


@dataclass(slots=True)
class Findings:
    """All that the review found. pii: kind and text. image: the image guard's label.

    suspicious: paragraphs that instruct the reader.
    """

    document: str
    file_type: str = ""
    paragraphs: list[Paragraph] = field(default_factory=list)
    parties: list[str] = field(default_factory=list)
    pii: list[tuple[str, str]] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)
    image: str | None = None
    suspicious: list[str] = field(default_factory=list)
    summary: str = ""

    @property
    def risky(self) -> list[Match]:
        """The matches with a risky clause."""
        return [match for match in self.matches if match.clause.risky]


def personal_data(text: str, entities: Sequence[Entity]) -> list[tuple[str, str]]:
    """Kind and text of each.

    Pieces of one kind with at most a character between them are one: a first and a last name are,
    and the model may part an address at a dot.
    """
    joined: list[tuple[str, int, int]] = []
    for entity in entities:
        kind = PII[entity.label]
        if joined and joined[-1][0] == kind and entity.start - joined[-1][2] <= 1:
            joined[-1] = (kind, joined[-1][1], entity.end)
        else:
            joined.append((kind, entity.start, entity.end))
    return [(kind, text[start:end]) for kind, start, end in joined]


def notes(found: Findings) -> str:
    """What a summary has to say, in short sentences."""
    parties = " and ".join(found.parties) or "unknown parties"
    names = list(dict.fromkeys(match.clause.name for match in found.risky))
    risks = f"{len(names)} to look at: {', '.join(names)}" if names else "none that is unusual"
    text = f"A contract between {parties}. Of {len(found.matches)} known clauses, {risks}."
    if found.suspicious:
        text += " It tries to instruct its reader; have a person read it."
    return text


@dataclass(frozen=True, slots=True)
class Quality:
    """Of what was found, the share that is right; of what is there, the share that was found."""

    precision: float
    recall: float


def compare(pairs: Sequence[tuple[Contract, Findings]]) -> dict[str, Quality]:
    """The quality of each kind of finding over all contracts; spaces do not count."""
    kinds: dict[str, list[Sets]] = {
        "personal data": [(c.pii, {text for _, text in f.pii}) for c, f in pairs],
        "parties": [(c.parties, f.parties) for c, f in pairs],
        "risky clauses": [(c.risky, {m.clause.name for m in f.risky}) for c, f in pairs],
        "all clauses": [(c.risky | c.usual, {m.clause.name for m in f.matches}) for c, f in pairs],
        "instructions": [
            ({"one"} if c.injected else set(), {"one"} if f.suspicious else set()) for c, f in pairs
        ],
    }
    return {kind: _quality(sets) for kind, sets in kinds.items()}


def _quality(sets: Sequence[Sets]) -> Quality:
    there = [{"".join(one.split()) for one in truth} for truth, _ in sets]
    found = [{"".join(one.split()) for one in said} for _, said in sets]
    right = sum(len(a & b) for a, b in zip(there, found, strict=True))
    return Quality(
        right / max(1, sum(map(len, found))),
        right / max(1, sum(map(len, there))),
    )
