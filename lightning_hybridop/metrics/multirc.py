"""The scores of MultiRC (Khashabi et al., 2018), where a question has several answer options, right or wrong each."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class AnswerF1(Metric):
    """F1a: the F1 of the right answers, over the answer options of all questions together.

    `update` takes `predicted` and `target`, 0 (wrong) or 1 (right), int64 (options,). 0 while no option is right or
    taken for right.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    hits: Tensor
    predicted: Tensor
    right: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("hits", "predicted", "right"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Count the options of a batch."""
        # Not in place: a state that was reset in inference mode could not be changed outside.
        self.hits = self.hits + (predicted * target).sum()
        self.predicted = self.predicted + predicted.sum()
        self.right = self.right + target.sum()

    def compute(self) -> Tensor:
        """Return the harmonic mean of precision and recall."""
        return 2 * self.hits / (self.predicted + self.right).clamp(min=1)


class QuestionExactMatch(Metric):
    """EM: the share of questions all of whose answer options are judged rightly.

    `update` takes `predicted` and `target`, 0 or 1, and `question`, the number of each option's question; int64
    (options,) all three. The options of a question may come in different batches.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    questions: list[Tensor] | Tensor
    correct: list[Tensor] | Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("questions", [], dist_reduce_fx="cat")
        self.add_state("correct", [], dist_reduce_fx="cat")

    def update(self, predicted: Tensor, target: Tensor, question: Tensor) -> None:
        """Keep which options of a batch are judged rightly."""
        assert isinstance(self.questions, list) and isinstance(self.correct, list)
        self.questions.append(question)
        self.correct.append((predicted == target).long())

    def compute(self) -> Tensor:
        """Return the share of the questions seen; 0 of none."""
        if not any(len(seen) for seen in self.questions):
            return torch.tensor(0.0)
        numbers, options = torch.unique(dim_zero_cat(self.questions), return_inverse=True)
        correct = dim_zero_cat(self.correct)
        return torch.ones_like(numbers).scatter_reduce(0, options, correct, reduce="amin").float().mean()
