from typing import Any

import pytest
import torch
from torchmetrics import Metric

from lightning_hybridop.metrics import AnswerF1, QuestionExactMatch, SpanExactMatch, SpanF1

ONE = torch.tensor([1])
METRICS = pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (AnswerF1, (ONE, ONE)),
        (QuestionExactMatch, (ONE, ONE, ONE)),
        (SpanExactMatch, (["one"], [["one"]])),
        (SpanF1, (["one"], [["one"]])),
    ],
)


@METRICS
def test_a_metric_that_validation_has_reset_counts_on_in_a_fit(
    kind: type[Metric], arguments: tuple[Any, ...]
) -> None:
    metric = kind()
    # As Trainer.validate does, and validation inside Trainer.fit does not.
    with torch.inference_mode():
        metric.update(*arguments)
        metric.reset()
    with torch.no_grad():
        metric.update(*arguments)
        assert float(metric.compute()) == 1.0


@METRICS
def test_states_are_tensors_that_a_checkpoint_holds(kind: type[Metric], arguments: tuple[Any, ...]) -> None:
    metric = kind()
    metric.persistent(True)
    metric.update(*arguments)
    state = metric.state_dict()
    values = [item for value in state.values() for item in (value if isinstance(value, list) else [value])]
    assert values
    assert all(isinstance(value, torch.Tensor) for value in values)
    other = kind()
    other.persistent(True)
    other.load_state_dict(state)
    # torchmetrics keeps no count of updates in a state.
    other._update_count = 1
    assert float(other.compute()) == 1.0
