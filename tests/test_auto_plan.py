import copy
import dataclasses
from typing import Any

import pytest
from torch import nn

from lightning_hybridop import HybridOPStrategy
from lightning_hybridop.auto_plan import _language_model, _measured_name, _planned
from lightning_hybridop.pipeline.anatomy import CutError
from lightning_hybridop.planning.cluster import Cluster, Device, DeviceProfile
from lightning_hybridop.planning.plan import PlanError
from lightning_hybridop.planning.workload import Architecture, Workload
from tests.tiny import TinyModule

SIZES = Architecture(
    name="tiny",
    blocks=12,
    hidden=64,
    heads=4,
    key_value_heads=4,
    head_size=16,
    intermediate=128,
    vocabulary=100,
)


def test_the_language_model_and_its_adapter_are_found() -> None:
    config, lora = _language_model(TinyModule())

    assert config.num_hidden_layers == 6
    assert lora is not None
    assert lora.r == 2


def test_a_module_without_a_language_model_is_refused() -> None:
    module = TinyModule()
    module.model = nn.Linear(2, 2)

    with pytest.raises(CutError, match="plan='auto' measures the blocks of a Hugging Face model"):
        _language_model(module)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"difference": "central"},
        {"estimator": "boundary", "queries_per_forward": 2},
        {"estimator": "boundary", "difference": "central"},
    ],
)
def test_the_estimator_is_planned_for(given: dict[str, Any]) -> None:
    profile = DeviceProfile(
        name="any", forward_tflops={"float32": 1.0}, backward_tflops={"float32": 1.0}, memory_gb=1.0
    )
    board = dataclasses.replace(profile, forward_only=True)
    cluster = Cluster(
        name="ranks",
        devices=(Device(name="rank 0", profile=board), Device(name="rank 1", profile=profile)),
    )
    options = {
        "micro_batches": 2,
        "queries": 9,
        "exit_queries": 0,
        "difference": "forward",
        "exit_baseline": "exit",
        "estimator": "loss",
        "queries_per_forward": 1,
    }

    plan = _planned(cluster, Workload(architecture=SIZES, dtype="float32"), {**options, **given})

    assert (plan.estimator, plan.queries_per_forward) == (
        given.get("estimator", "loss"),
        given.get("queries_per_forward", 1),
    )
    assert [stage.role for stage in plan.stages] == ["zo", "bp"]


def test_bad_options_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(ValueError, match="mini_batch is \\(0, 5\\)"):
        HybridOPStrategy(plan="auto", mini_batch=(0, 5))
    with pytest.raises(PlanError, match="micro_batches: found None"):
        HybridOPStrategy(micro_batches=None)
    HybridOPStrategy(plan="auto", micro_batches=None)


def test_a_measurement_is_only_reused_for_equal_blocks() -> None:
    config, _ = _language_model(TinyModule())
    longer, wider = copy.deepcopy(config), copy.deepcopy(config)
    longer.num_hidden_layers += 1
    wider.intermediate_size += 1

    name = _measured_name(config, 2)
    assert _measured_name(longer, 2) == name
    assert _measured_name(wider, 2) != name
    assert _measured_name(config, 3) != name
