"""A four-class set of short headlines, generated from a seeded grammar: a first run needs no download.

The rule: a headline belongs to the class of what is *done* in it, the object of its main verb. Who does it is
drawn from all four classes, from its own more often; what happens around it from all four alike. So
"Northmere football club delays the record bond sale ahead of border talks" is Business. The same actors,
verbs and matters stand in headlines of every class: no single word gives the class away.

All names are invented. The texts depend on `random.Random(seed).random()` alone, which Python keeps equal on
all versions and machines.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.classification import ClassificationData, LabelForm, LabelledText
from lightning_hybridop.modules.language_models import SMOLLM2
from lightning_hybridop.modules.prompts import CLASSES

TRAIN_ROWS = 1600
HELD_OUT_ROWS = 400

_Item = TypeVar("_Item")

_PLACES = (
    *("Ardenne Bay", "Brimfell", "Calder Quay", "Dunmarsh", "Eastfen", "Farholm", "Greywick", "Holtby Cross"),
    *(
        "Iverness Point",
        "Juniper Vale",
        "Kestrel Bay",
        "Larkmoor",
        "Millhaven",
        "Northmere",
        "Oakfirth",
        "Quillport",
    ),
    *(
        "Pinewater",
        "Redmarsh",
        "Stonebeck",
        "Thornmere",
        "Upper Wrayle",
        "Vale Hollow",
        "Westmarch",
        "Yarrowdale",
    ),
)

# Class by class, as everything below.
_ACTORS = (
    (
        "government",
        "president",
        "parliament",
        "foreign minister",
        "rebels",
        "army",
        "opposition",
        "aid agency",
    ),
    (
        "football club",
        "head coach",
        "rowing crew",
        "goalkeeper",
        "cycling team",
        "athletes",
        "hockey side",
        "fans",
    ),
    ("bank", "retailer", "airline", "investors", "insurer", "car maker", "mining firm", "shareholders"),
    (
        "software firm",
        "engineers",
        "chip maker",
        "phone maker",
        "robot lab",
        "programmers",
        "web company",
        "hackers",
    ),
)

# What a headline is about. Each can be the object of every verb below and of every connective.
_MATTERS = (
    (
        *(
            "ceasefire",
            "peace treaty",
            "border talks",
            "election recount",
            "refugee camp",
            "embassy evacuation",
        ),
        *("asylum law", "hostage release", "flood relief", "arms embargo", "war crimes trial", "state visit"),
    ),
    (
        *(
            "cup final",
            "title race",
            "relay squad",
            "playoff match",
            "marathon",
            "penalty shootout",
            "rowing regatta",
        ),
        *("season opener", "tennis doubles", "boxing bout", "league fixture", "sprint final"),
    ),
    (
        *(
            "bond sale",
            "share offer",
            "merger",
            "dividend",
            "profit forecast",
            "price rise",
            "debt refinancing",
        ),
        *("takeover bid", "factory order", "store closures", "wage deal", "rate cut"),
    ),
    (
        *(
            "software update",
            "chip design",
            "search engine",
            "battery prototype",
            "robot trial",
            "browser patch",
        ),
        *(
            "data encryption",
            "satellite network",
            "cloud server",
            "phone app",
            "speech recognition",
            "virus scanner",
        ),
    ),
)

_VERBS = (
    "plans",
    "delays",
    "backs",
    "prepares for",
    "rethinks",
    "criticizes",
    "welcomes",
    "wants",
    "reviews",
)
_QUALITIES = ("disputed", "planned", "costly", "second", "delayed", "annual", "record", "latest")
_CONNECTIVES = ("ahead of", "after", "despite", "amid", "before")

# How often the actor is of the headline's own class, beyond chance; how often the circumstance comes first.
_OWN_ACTOR = 0.5
_CIRCUMSTANCE_FIRST = 0.25


def headlines(
    *, train_rows: int = TRAIN_ROWS, held_out_rows: int = HELD_OUT_ROWS, seed: int = 0
) -> tuple[list[LabelledText], list[LabelledText]]:
    """Return `train_rows` and `held_out_rows` distinct headlines, no text in both, classes in turn.

    The classes are equally frequent (to within one row) in both lists and in every beginning of them.
    """
    draws = random.Random(seed)
    seen: set[str] = set()
    rows: list[LabelledText] = []
    while len(rows) < train_rows + held_out_rows:
        label = len(rows) % len(CLASSES)
        text = _headline(draws, label)
        if text not in seen:
            seen.add(text)
            rows.append(LabelledText(text=text, label=label))
    # The held-out rows come first, so that they stay the same however many training rows are asked for.
    return rows[held_out_rows:], rows[:held_out_rows]


def _headline(draws: random.Random, label: int) -> str:
    actors = _ACTORS[label] if draws.random() < _OWN_ACTOR else _pick(draws, _ACTORS)
    actor = _pick(draws, actors)
    verb = _pick(draws, _VERBS)
    if actor.endswith("s"):
        verb = _plural(verb)
    matter = _pick(draws, _MATTERS[label])
    main = f"{_pick(draws, _PLACES)} {actor} {verb} the {_pick(draws, _QUALITIES)} {matter}"
    other = [other for other in _pick(draws, _MATTERS) if other != matter]
    circumstance = f"{_pick(draws, _CONNECTIVES)} {_pick(draws, other)}"
    if draws.random() < _CIRCUMSTANCE_FIRST:
        return f"{circumstance[0].upper()}{circumstance[1:]}, {main}"
    return f"{main} {circumstance}"


def _plural(verb: str) -> str:
    first, *rest = verb.split(" ")
    return " ".join([first.removesuffix("s"), *rest])


def _pick(draws: random.Random, items: Sequence[_Item]) -> _Item:
    return items[int(draws.random() * len(items))]


class HeadlinesData(ClassificationData):
    """Generated headlines as prompts with label words; validation, test and prediction use one held-out set.

    `train_rows` and `held_out_rows` say how many are generated, from `seed`; `tokenizer` is a tokenizer or
    what `load_tokenizer` takes.

    Batches are dictionaries of `input_ids`, `attention_mask` and `labels`, int64 (rows, tokens), of at most
    `max_length` tokens; with `labels="number"` the labels are class indices, int64 (rows,).
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase | str = SMOLLM2,
        train_rows: int = TRAIN_ROWS,
        held_out_rows: int = HELD_OUT_ROWS,
        batch_size: int = 8,
        max_length: int = 32,
        num_workers: int = 0,
        seed: int = 0,
        labels: LabelForm = "word",
    ) -> None:
        super().__init__(
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=max_length,
            num_workers=num_workers,
            labels=labels,
        )
        self.train_rows = train_rows
        self.held_out_rows = held_out_rows
        self.seed = seed

    def splits(self) -> tuple[list[LabelledText], list[LabelledText]]:
        """Generate both splits."""
        return headlines(train_rows=self.train_rows, held_out_rows=self.held_out_rows, seed=self.seed)
