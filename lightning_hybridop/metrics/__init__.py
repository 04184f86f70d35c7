"""Scores of tasks that torchmetrics lacks, as torchmetrics objects."""

from lightning_hybridop.metrics.multirc import AnswerF1, QuestionExactMatch
from lightning_hybridop.metrics.squad import SpanExactMatch, SpanF1

__all__ = ["AnswerF1", "QuestionExactMatch", "SpanExactMatch", "SpanF1"]
