"""The scores of SQuAD (Rajpurkar et al., 2016): predicted texts against the texts that people gave."""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normal_form(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation, English articles and repeated white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, answer: str) -> float:
    """Return 1 if two texts have the same normal form, else 0."""
    return float(normal_form(predicted) == normal_form(answer))


def word_f1(predicted: str, answer: str) -> float:
    """Return the F1 of the words of two texts' normal forms; where one has none, 1 if the other has none, too."""
    words, expected = normal_form(predicted).split(), normal_form(answer).split()
    if not words or not expected:
        return float(words == expected)
    common = (Counter(words) & Counter(expected)).total()
    return 2 * common / (len(words) + len(expected))


class SpanExactMatch(Metric):
    """The share of predictions that equal one of their question's answers, texts in normal form.

    `update` takes the predicted texts and, for each, the accepted answers.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    questions: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _add_mean(self)

    def update(self, predicted: Sequence[str], answers: Sequence[Sequence[str]]) -> None:
        """Score the questions of a batch."""
        _add_best(self, exact_match, predicted, answers)

    def compute(self) -> Tensor:
        """Return the mean over questions."""
        return _mean(self)


class SpanF1(Metric):
    """The mean over questions of the words' F1 with the answer that a prediction is most like, texts in normal form.

    `update` takes the predicted texts and, for each, the accepted answers.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    total: Tensor
    questions: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _add_mean(self)

    def update(self, predicted: Sequence[str], answers: Sequence[Sequence[str]]) -> None:
        """Score the questions of a batch."""
        _add_best(self, word_f1, predicted, answers)

    def compute(self) -> Tensor:
        """Return the mean over questions."""
        return _mean(self)


def _add_mean(metric: Metric) -> None:
    metric.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
    metric.add_state("questions", torch.tensor(0), dist_reduce_fx="sum")


def _add_best(
    metric: SpanExactMatch | SpanF1,
    score: Callable[[str, str], float],
    predicted: Sequence[str],
    answers: Sequence[Sequence[str]],
) -> None:
    best = [
        max(score(text, answer) for answer in accepted)
        for text, accepted in zip(predicted, answers, strict=True)
    ]
    # Not in place: a state that was reset in inference mode could not be changed outside.
    metric.total = metric.total + sum(best)
    metric.questions = metric.questions + len(best)


def _mean(metric: SpanExactMatch | SpanF1) -> Tensor:
    return (metric.total / metric.questions.clamp(min=1)).float()
