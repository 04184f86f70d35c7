"""The strategy in one process: options, one stage alone, and what needs no peers. Peers: tests/distributed."""

import math
import re
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy, StrategyRegistry
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import Tensor

from lightning_hybridop import HybridOPStrategy, Plan, PlanError, Stage, even_plan, save_plan
from tests.tiny import TinyModule, loader

# Lightning has its say about loaders without workers and runs without a logger.
pytestmark = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")


# Options.


@pytest.mark.parametrize("name", ["epsilon", "timeout", "zo_lr_scale"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_numbers_that_must_be_positive(name: str, value: float) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"^{name} is {value}, expected a number above 0.$"):
        HybridOPStrategy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": 0}, "micro_batches: found 0, expected a whole number of at least 1."),
        ({"micro_batches": 2.0}, "micro_batches: found 2.0, expected a whole number of at least 1."),
        ({"queries": -1}, "queries: found -1, expected a whole number of at least 0."),
        ({"schedule": "zigzag"}, "schedule: found 'zigzag', expected one of hybridop, gpipe, 1f1b."),
        (
            {"difference": "backward"},
            "difference: found 'backward', expected one of forward, central, antithetic.",
        ),
        ({"exit_baseline": "none"}, "exit_baseline: found 'none', expected one of exit, full, running."),
    ],
)
def test_a_bad_option_is_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        HybridOPStrategy(**options)
    assert str(caught.value) == message


def test_unknown_ways_of_reading_data() -> None:
    with pytest.raises(ValueError, match="data is 'rank 0', expected 'same' or 'broadcast'"):
        HybridOPStrategy(data="rank 0")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": "token"}, "directions is 'token', expected 'microbatch', 'minibatch' or 'row'"),
        ({"distribution": "uniform"}, "distribution is 'uniform', expected 'normal' or 'rademacher'"),
        ({"shrinkage": "yes"}, "shrinkage is 'yes', expected True or False"),
        ({"directions": "row"}, "directions is 'row', but the estimator loss knows one loss per micro-batch"),
        (
            {"directions": "row", "estimator": "boundary", "exit_queries": 2},
            "directions is 'row' with exit_queries 2, but an early exit gives one loss per micro-batch",
        ),
    ],
)
def test_directions_that_cannot_be_drawn(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        HybridOPStrategy(**options)


def test_a_plan_file_that_misses_a_block_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    save_plan(even_plan(blocks=6, stages=2), path)
    text = path.read_text(encoding="utf-8")
    assert "first: 3" in text
    path.write_text(text.replace("first: 3", "first: 4"), encoding="utf-8")
    with pytest.raises(PlanError, match=r"^stages\[1\].first: block 3 is in no stage; start at 3.$"):
        HybridOPStrategy(path)


# Who and where.


def test_the_strategy_is_registered_by_name() -> None:
    assert isinstance(StrategyRegistry.get("hybridop"), HybridOPStrategy)


def test_one_process_per_stage_is_started_on_this_host() -> None:
    for strategy in (HybridOPStrategy(stages=3), HybridOPStrategy(even_plan(blocks=6, stages=3))):
        trainer = Trainer(strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False)
        assert trainer.strategy is strategy
        assert strategy.num_processes == 3
        assert isinstance(strategy.cluster_environment, LightningEnvironment)
        assert isinstance(strategy.launcher, _SubprocessScriptLauncher)


def test_processes_of_torchrun_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
    }
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "one"}
    for name, value in (variables | address).items():
        monkeypatch.setenv(name, value)
    strategy = HybridOPStrategy(cluster_environment=TorchElasticEnvironment())
    strategy.accelerator = lightning.pytorch.accelerators.CPUAccelerator()
    strategy._configure_launcher()
    assert strategy.launcher is None
    assert (strategy.global_rank, strategy.local_rank, strategy.world_size) == (1, 0, 3)
    assert strategy.pipelined


def test_every_rank_reads_every_batch() -> None:
    assert HybridOPStrategy().is_distributed is False
    assert HybridOPStrategy().reduce("anything") == "anything"


def test_the_plan_is_not_known_before_the_setup() -> None:
    with pytest.raises(RuntimeError, match=r"^The plan is made in the Trainer's setup; read it from a hook"):
        _ = HybridOPStrategy().plan


@pytest.mark.parametrize(
    ("options", "pipelined"),
    [
        ({}, False),
        ({"zo_stages": 0}, False),
        ({"zo_stages": 1}, True),
        ({"plan": even_plan(blocks=6, stages=1)}, False),
        ({"plan": Plan(blocks=6, stages=(Stage(first=0, last=6, role="zo"),))}, True),
    ],
)
def test_a_single_stage_is_a_pipeline_only_if_it_estimates(options: dict[str, Any], pipelined: bool) -> None:
    strategy = HybridOPStrategy(cluster_environment=LightningEnvironment(), **options)
    assert strategy.pipelined is pipelined


# One stage alone.


class HookOrder(Callback):
    """Notes the order of hooks and the gradient that each optimizer step sees."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gradients: list[Tensor] = []

    def on_before_backward(self, *_: Any) -> None:
        self.calls.append("before_backward")

    def on_after_backward(self, *_: Any) -> None:
        self.calls.append("after_backward")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.calls.append("before_zero_grad")

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.calls.append("before_optimizer_step")
        gradients = [p.grad.reshape(-1) for p in pl_module.parameters() if p.grad is not None]
        self.gradients.append(torch.cat(gradients))

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls.append("batch_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.calls.append("batch_end")


def _plain_fit(strategy: Strategy) -> tuple[HookOrder, dict[str, Tensor], dict[str, float]]:
    watch = HookOrder()
    module = TinyModule()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(20, batch_size=4), loader(10, batch_size=4))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return watch, {name: p.detach() for name, p in module.named_parameters()}, metrics


def test_one_stage_trains_as_plain_lightning_does() -> None:
    found, parameters, metrics = _plain_fit(HybridOPStrategy())
    expected, expected_parameters, expected_metrics = _plain_fit(SingleDeviceStrategy(device="cpu"))

    assert found.calls == expected.calls
    assert len(found.gradients) == len(expected.gradients) == 3
    for gradient, reference in zip(found.gradients, expected.gradients, strict=True):
        assert gradient.equal(reference)
    assert parameters.keys() == expected_parameters.keys()
    assert all(value.equal(expected_parameters[name]) for name, value in parameters.items())
    assert metrics == expected_metrics


def test_one_stage_knows_its_trainable_parameters_and_no_timeline() -> None:
    strategy = HybridOPStrategy()
    module = TinyModule()
    strategy.connect(module)
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert strategy.trainable_state_dict().keys() == trainable.keys()
    assert strategy.gather_timeline() == ()
    with strategy.whole_model():
        assert dict(module.named_parameters()).keys() >= trainable.keys()


def test_a_checkpoint_is_read_before_a_module_is_attached(tmp_path: Path) -> None:
    torch.save({"state_dict": {"weight": torch.ones(2)}}, tmp_path / "last.ckpt")

    checkpoint = HybridOPStrategy().load_checkpoint(tmp_path / "last.ckpt", weights_only=True)

    assert checkpoint["state_dict"]["weight"].equal(torch.ones(2))


@pytest.mark.parametrize(
    ("option", "value", "own"),
    [("estimator", "adjoint", "loss"), ("queries", 3, 2), ("difference", "central", "forward")],
)
def test_options_that_contradict_a_given_plan_are_refused(option: str, value: Any, own: Any) -> None:
    plan = even_plan(blocks=6, stages=2, zo_stages=1, queries=2)

    with pytest.raises(
        ValueError, match=f"^{option} is {value!r}, but the given plan says {own!r}; change it in the plan"
    ):
        HybridOPStrategy(plan, **{option: value})


def test_options_that_say_what_a_given_plan_says_are_taken() -> None:
    plan = even_plan(blocks=6, stages=2, zo_stages=1, queries=2)

    assert HybridOPStrategy(plan, queries=2, micro_batches=4).num_processes == 2
