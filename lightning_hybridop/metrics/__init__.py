"""Scores of MultiRC and SQuAD as torchmetrics objects, one number each."""

from lightning_hybridop.metrics.multirc import AnswerF1, QuestionExactMatch
from lightning_hybridop.metrics.squad import SpanExactMatch, SpanF1

__all__ = ["AnswerF1", "QuestionExactMatch", "SpanExactMatch", "SpanF1"]
