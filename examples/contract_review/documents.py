"""Contracts as files, with what is to be found in them: everything follows from a seed.

Owns drawing pages (PNG, PDF) and plain text, and the truth about each contract. Does not own the
words of its clauses (`library`).
"""

from __future__ import annotations

import io
import random
import textwrap
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

from examples.contract_review.library import CLAUSES, INJECTIONS

Kind = Literal["png", "pdf", "txt"]
KINDS: tuple[Kind, ...] = ("png", "pdf", "txt")

_COMPANIES = (
    ("Northwind Logistics Ltd", "northwind.com"),
    ("Harbour Analytics Inc", "harbour.com"),
    ("Silverline Consulting Ltd", "silverline.com"),
    ("Redwood Software Inc", "redwood.com"),
    ("Bluepeak Systems Ltd", "bluepeak.com"),
    ("Oakfield Insurance Inc", "oakfield.com"),
    ("Granite Construction Ltd", "granite.com"),
    ("Eastgate Pharma Inc", "eastgate.com"),
)
_GIVEN = ("Maria", "James", "Laura", "Robert", "Emily", "Daniel", "Sarah", "Thomas")
_SURNAMES = ("Jensen", "Carter", "Miller", "Thompson", "Baker", "Walker", "Turner", "Collins")
_MONTHS = ("January", "March", "May", "July", "September", "November")
_TITLES = ("SERVICE AGREEMENT", "CONSULTING CONTRACT", "LICENCE AGREEMENT")

_CLAUSES_EACH = 5
_WIDTH_PX, _HEIGHT_PX, _MARGIN_PX = 1000, 1300, 80
_TITLE_PX, _TEXT_PX, _LINE_PX, _GAP_PX = 34, 20, 30, 26
_LINE_CHARACTERS = 75
_DOTS_PER_INCH = 150  # of the PDF: a page drawn at this has the pixels of the PNG


@dataclass(frozen=True, slots=True)
class Contract:
    """A contract as it is sent, and what a reader should find in it.

    pii: names, e-mail addresses and phone numbers. risky, usual: names of the library's clauses
    that it has. injected: an instruction to the reader stands among the clauses.
    """

    name: str
    kind: Kind
    blob: bytes
    parties: tuple[str, str]
    pii: frozenset[str]
    risky: frozenset[str]
    usual: frozenset[str]
    injected: bool


def contracts(n: int, seed: int) -> list[Contract]:
    """Every second contract has risky clauses, every third an instruction to its reader."""
    return [_contract(number, random.Random(f"{seed}/{number}")) for number in range(n)]


def _contract(number: int, rng: random.Random) -> Contract:
    kind = KINDS[number % len(KINDS)]
    (one, one_at), (two, two_at) = rng.sample(_COMPANIES, 2)
    clauses = rng.sample([c for c in CLAUSES if not c.risky], _CLAUSES_EACH)
    if number % 2 == 0:
        count = rng.choice((1, 2))
        clauses[:count] = rng.sample([c for c in CLAUSES if c.risky], count)
    rng.shuffle(clauses)
    body = [f"{at}. {rng.choice(c.wordings)}" for at, c in enumerate(clauses, 1)]
    injected = number % 3 == 1
    if injected:
        body.insert(rng.randrange(1, len(body)), rng.choice(INJECTIONS))
    day = f"{rng.randrange(1, 29)} {rng.choice(_MONTHS)} {rng.randrange(2021, 2027)}"
    opening = (
        f"This agreement is made on {day} between {one} and {two}, and takes effect on the date "
        "of the last signature."
    )
    contacts, pii = _contacts(((one, one_at), (two, two_at)), rng)
    title = rng.choice(_TITLES)
    return Contract(
        name=f"contract-{number + 1:02d}",
        kind=kind,
        blob=_file(kind, title, [opening, *body], contacts),
        parties=(one, two),
        pii=pii,
        risky=frozenset(c.name for c in clauses if c.risky),
        usual=frozenset(c.name for c in clauses if not c.risky),
        injected=injected,
    )


def _contacts(
    parties: tuple[tuple[str, str], ...], rng: random.Random
) -> tuple[list[str], frozenset[str]]:
    paragraphs, pii = [], set[str]()
    people = zip(rng.sample(_GIVEN, 2), rng.sample(_SURNAMES, 2), strict=True)
    for (company, domain), (given, surname) in zip(parties, people, strict=True):
        email = f"{given}.{surname}@{domain}".lower()
        phone = f"+1 {rng.randrange(201, 990)} 555 {rng.randrange(100, 200):04d}"
        paragraphs.append(
            f"Notices to {company} go to {given} {surname}, e-mail {email}, phone {phone}."
        )
        pii |= {f"{given} {surname}", email, phone}
    return paragraphs, frozenset(pii)


def _file(kind: Kind, title: str, body: list[str], contacts: list[str]) -> bytes:
    if kind == "txt":
        return "\n\n".join([title, *body, *contacts]).encode()
    buffer = io.BytesIO()
    if kind == "png":
        _page(title, [*body, *contacts]).save(buffer, "PNG")
    else:  # the contacts have a page of their own
        second = _page("NOTICES", contacts)
        _page(title, body).save(
            buffer, "PDF", resolution=_DOTS_PER_INCH, save_all=True, append_images=[second]
        )
    return buffer.getvalue()


def _page(title: str, paragraphs: list[str]) -> Image.Image:
    page = Image.new("RGB", (_WIDTH_PX, _HEIGHT_PX), "white")
    draw = ImageDraw.Draw(page)
    draw.text((_MARGIN_PX, _MARGIN_PX), title, "black", ImageFont.load_default(_TITLE_PX))
    font = ImageFont.load_default(_TEXT_PX)
    top_px = _MARGIN_PX + 2 * _TITLE_PX
    for paragraph in paragraphs:
        for line in textwrap.wrap(paragraph, _LINE_CHARACTERS, break_on_hyphens=False):
            draw.text((_MARGIN_PX, top_px), line, "black", font)
            top_px += _LINE_PX
        top_px += _GAP_PX
    return page
