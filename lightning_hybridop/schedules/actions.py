"""The vocabulary of schedules."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What an action does with its micro-batch.

    A backward is what a stage does with the gradient that comes back from the next one: a bp stage back-propagates it,
    a zo stage takes from it what its estimator needs.
    """

    FORWARD = "F"
    BACKWARD = "B"
    PERTURBED = "P"
    EXIT = "X"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One piece of work of one stage.

    `query` numbers the direction of a perturbed or early-exit forward; an early-exit forward without one runs the
    unperturbed model. `sign` is -1 for the second half of a central difference. `count` is how many queries, from
    `query` on, ride together in a perturbed forward.
    """

    kind: Kind
    micro_batch: int
    query: int | None = None
    sign: int = 1
    count: int = 1


Schedule = tuple[tuple[Action, ...], ...]
"""One ordered list of actions per stage."""
