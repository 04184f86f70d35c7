"""A Trainer in one process whose strategy pretends to run a pipeline of two stages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hybridop.planning.plan import Plan, Stage
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.timeline import TimedAction, Timeline

PLAN = Plan(blocks=2, stages=(Stage(first=0, last=1, role="zo"), Stage(first=1, last=2)), micro_batches=1)


def two_stage_timeline(busy: float) -> Timeline:
    """Makespan 10 s; stage 0 works for `busy` of them, stage 1 for the last two."""
    action = Action(kind=Kind.FORWARD, micro_batch=0)
    return (
        TimedAction(stage=0, action=action, start=5, end=5 + busy),
        TimedAction(stage=1, action=action, start=13, end=15),
    )


class StubStrategy(SingleDeviceStrategy):
    """One process that hands out the given timelines, one per gather, the last one again when they run out."""

    def __init__(self, timelines: list[Timeline], state: dict[str, Tensor] | None = None) -> None:
        super().__init__("cpu")
        self.plan = PLAN
        self.timelines = list(timelines)
        self.gathered = 0
        self.state = state or {}
        self.events: list[str] = []
        self.rank_zero = True

    @property
    def is_global_zero(self) -> bool:
        return self.rank_zero

    def gather_timeline(self) -> Timeline:
        self.gathered += 1
        return self.timelines.pop(0) if len(self.timelines) > 1 else self.timelines[0]

    def trainable_state_dict(self) -> dict[str, Tensor]:
        self.events.append("collect")
        return self.state

    @contextmanager
    def whole_model(self) -> Iterator[None]:
        self.events.append("enter")
        yield
        self.events.append("leave")

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("barrier")


class Line(LightningModule):
    """The smallest module that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch["x"]).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Rows:
    """A data set of `count` rows."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((1,), float(index))}


def rows(count: int, batch_size: int) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Rows(count), batch_size=batch_size)  # type: ignore[arg-type]


@pytest.fixture
def loader() -> Callable[[int, int], DataLoader[dict[str, Tensor]]]:
    """Make a loader of `count` rows in batches of `batch_size`."""
    return rows


@pytest.fixture
def line() -> Line:
    """A module to train."""
    return Line()


@pytest.fixture
def timeline() -> Callable[[float], Timeline]:
    """Make a timeline in which stage 0 is busy for the given part of ten seconds and stage 1 for two."""
    return two_stage_timeline


@pytest.fixture
def pipeline() -> Callable[..., Any]:
    """Make a strategy that pretends to run a pipeline."""
    return StubStrategy


@pytest.fixture
def trainer() -> Callable[..., Trainer]:
    """Make a Trainer that leaves out what these tests do not look at."""

    def make(**arguments: Any) -> Trainer:
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": False,
            "max_epochs": 1,
        }
        return Trainer(**(defaults | arguments))

    return make
