"""Averages of weights over training, kept by Lightning's own callbacks, one part on each stage."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, optim

from tests.distributed.alone import Outcome, assert_close, learn, learn_together
from tests.distributed.runs import Job
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]

EPOCHS = 3


class Swinging(TinyModule):
    """Steps so large that an average lies far from where training stands."""

    def __init__(self) -> None:
        super().__init__(blocks=2)

    def configure_optimizers(self) -> Any:
        return optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5, momentum=0.5)


def _ema() -> Callback:
    return EMAWeightAveraging(decay=0.8)


def _ema_later() -> Callback:
    return EMAWeightAveraging(decay=0.5, update_every_n_steps=2, update_starting_at_step=2, use_buffers=False)


def _mean() -> Callback:
    return WeightAveraging()


def _stochastic() -> Callback:
    return StochasticWeightAveraging(swa_lrs=0.2, swa_epoch_start=1, annealing_epochs=1)


AVERAGES = {"ema": _ema, "ema later": _ema_later, "mean": _mean, "stochastic": _stochastic}
RESUMED = ("ema", "stochastic")


def _callbacks(average: Any, folder: Path) -> list[Callback]:
    saving = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    return [saving] if average is None else [average(), saving]


def _job(
    average: Any, folder: Path, *, epochs: int = EPOCHS, checkpoint: Path | None = None, **strategy: Any
) -> Job:
    return Job(
        strategy={"micro_batches": 2, **strategy},
        module=Swinging,
        train=partial(loader, 12, batch_size=4),
        validation=partial(loader, 6, batch_size=4, length=9),
        trainer={"max_epochs": epochs, "enable_checkpointing": True},
        callbacks=partial(_callbacks, average, folder),
        checkpoint=None if checkpoint is None else str(checkpoint),
    )


Pairs = dict[str, tuple[Path, dict[str, list[Outcome]]]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Per average: a run from start to end, and for some one resumed in its middle and one behind a zo stage."""
    folder = tmp_path_factory.mktemp("averages")
    kinds = {
        "straight": lambda name: _job(AVERAGES[name], folder / name),
        "resumed": lambda name: _job(
            AVERAGES[name], folder / f"{name} resumed", checkpoint=folder / name / "epoch=1.ckpt"
        ),
        "mixed": lambda name: _job(AVERAGES[name], folder / f"{name} mixed", zo_stages=1),
    }
    wanted = {name: list(kinds) if name in RESUMED else ["straight"] for name in AVERAGES}
    found = iter(learn_together([kinds[kind](name) for name in AVERAGES for kind in wanted[name]], 2))
    return {name: (folder / name, {kind: next(found) for kind in wanted[name]}) for name in AVERAGES}


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_over_stages_is_that_of_one_process(name: str, pairs: Pairs, tmp_path: Path) -> None:
    folder, outcomes = pairs[name]
    expected = learn(_job(AVERAGES[name], tmp_path), alone=True)
    plain = learn(_job(None, tmp_path / "plain"), alone=True)

    for outcome in outcomes["straight"]:
        assert outcome.losses == pytest.approx(expected.losses, abs=2e-6)
        assert outcome.metrics == pytest.approx(expected.metrics, abs=2e-6)
        assert_close(outcome.parameters, expected.parameters, 2e-6)
    assert expected.metrics["val_loss"] != pytest.approx(plain.metrics["val_loss"], abs=1e-4)
    for parameter, value in plain.parameters.items():
        assert not torch.allclose(value, expected.parameters[parameter], atol=1e-5), parameter

    # What is saved is what one process saves, but for the frozen weights.
    for epoch in range(EPOCHS):
        mine, alone = (
            torch.load(place / f"epoch={epoch}.ckpt", weights_only=True) for place in (folder, tmp_path)
        )
        assert_close(mine["state_dict"], _trained(alone["state_dict"]), 2e-6)
        if "current_model_state" in alone:
            assert_close(mine["current_model_state"], _trained(alone["current_model_state"]), 2e-6)
            assert mine["averaging_state"] == alone["averaging_state"]
        for callback, state in alone["callbacks"].items():
            if "average_model_state" in state:
                average = mine["callbacks"][callback]["average_model_state"]
                assert_close(average, _trained(state["average_model_state"]), 2e-6)


def _trained(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if "lora" in name}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_average_goes_on_where_it_stood(name: str, pairs: Pairs) -> None:
    _, outcomes = pairs[name]
    for straight, resumed in zip(outcomes["straight"], outcomes["resumed"], strict=True):
        assert resumed.losses == straight.losses[-3:]
        assert resumed.metrics == straight.metrics
        assert_close(resumed.parameters, straight.parameters, 0.0)


@pytest.mark.parametrize("name", RESUMED)
def test_an_average_of_a_pipeline_goes_on_in_one_process(name: str, pairs: Pairs, tmp_path: Path) -> None:
    folder, outcomes = pairs[name]
    one_stage = _job(AVERAGES[name], tmp_path, checkpoint=folder / "epoch=1.ckpt", stages=1)
    (resumed,) = _on_one_stage(one_stage)
    assert_close(resumed.parameters, outcomes["straight"][0].parameters, 2e-6)


def _on_one_stage(job: Job) -> list[Outcome]:
    ((outcome,),) = learn_together([job], 1)
    return [outcome]


@pytest.mark.parametrize("name", RESUMED)
def test_a_zo_stage_is_averaged_too(name: str, pairs: Pairs) -> None:
    folder, outcomes = pairs[name]
    first, second = outcomes["mixed"]
    assert_close(second.parameters, first.parameters, 0.0)
    saved = torch.load(folder.with_name(f"{name} mixed") / f"epoch={EPOCHS - 1}.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == first.parameters.keys()
    if name == "ema":
        average = saved["state_dict"]
        assert_close(average, first.parameters, 0.0)  # training ends on the average
        for parameter, value in saved["current_model_state"].items():
            assert not value.equal(average[parameter]), parameter
