from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics import Metric
from torchmetrics.functional.classification import binary_f1_score

from lightning_hybridop.metrics import AnswerF1, QuestionExactMatch

options = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30
)


def columns(rows: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    question, predicted, target = torch.tensor(rows).unbind(dim=1)
    return predicted, target, question


@given(rows=options, cut=st.integers(1, 30))
def test_f1_over_answers_is_the_binary_f1_whatever_the_batches(
    rows: list[tuple[int, int, int]], cut: int
) -> None:
    metric = AnswerF1()
    for part in (rows[:cut], rows[cut:]):
        if part:
            predicted, target, _ = columns(part)
            metric.update(predicted, target)
    predicted, target, _ = columns(rows)
    assert float(metric.compute()) == pytest.approx(float(binary_f1_score(predicted, target)))


@given(rows=options, cut=st.integers(1, 30))
def test_a_question_matches_when_all_its_options_do_whatever_the_batches(
    rows: list[tuple[int, int, int]], cut: int
) -> None:
    metric = QuestionExactMatch()
    for part in (rows[:cut], rows[cut:]):
        if part:
            metric.update(*columns(part))
    right: dict[int, bool] = defaultdict(lambda: True)
    for question, predicted, target in rows:
        right[question] &= predicted == target
    assert float(metric.compute()) == pytest.approx(sum(right.values()) / len(right))


def test_scores_of_an_example() -> None:
    # Two questions of three options: one wholly right, one with a right answer missed.
    predicted, target = torch.tensor([1, 0, 1, 1, 0, 0]), torch.tensor([1, 0, 1, 1, 1, 0])
    f1, exact = AnswerF1(), QuestionExactMatch()
    f1.update(predicted, target)
    exact.update(predicted, target, torch.tensor([7, 7, 7, 3, 3, 3]))
    assert float(f1.compute()) == pytest.approx(2 * 1.0 * 0.75 / 1.75)
    assert float(exact.compute()) == 0.5


@pytest.mark.parametrize("metric", [AnswerF1(), QuestionExactMatch()])
def test_nothing_seen_scores_zero(metric: Metric) -> None:
    metric.update(*[torch.tensor([], dtype=torch.long)] * (2 if isinstance(metric, AnswerF1) else 3))
    assert float(metric.compute()) == 0
    metric.reset()
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert float(metric.compute()) == 0
