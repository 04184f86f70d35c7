import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from rich.console import Console
from torch import nn

from lightning_hybridop.planning.plan import Plan, Stage
from lightning_hybridop.summary import held_by_stage, held_table, show_whole_model
from tests.tiny import TinyModule, loader


def test_a_stage_holds_what_it_computes_with_and_trains() -> None:
    module = nn.ModuleDict(
        {
            "frozen": nn.Linear(4, 8, bias=False).requires_grad_(False),
            "own": nn.Linear(4, 2, bias=False, dtype=torch.float64),
            "of_another_stage": nn.Linear(100, 100),
            "released": nn.Linear(50, 50, device="meta").requires_grad_(False),
        }
    )
    own = module["own"]
    assert isinstance(own, nn.Linear)

    held = held_by_stage(module, {"own.weight": own.weight})

    assert held == {"parameters": 32 + 8, "trainable": 8, "mib": (32 * 4 + 8 * 8) / 2**20}


class HasExample(TinyModule):
    """Would run its example through a model that no rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(1, 1)

    def forward(self, *_: Any) -> Any:
        raise AssertionError


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
def test_the_summary_is_made_inside_the_whole_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[str] = []
    shown: list[bool] = []

    @contextmanager
    def whole_model() -> Iterator[None]:
        inside.append("whole")
        yield
        inside.pop()

    class Notes(ModelSummary):
        def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
            shown.append(inside == ["whole"])
            assert pl_module.example_input_array is None or not inside
            if inside:
                super().on_fit_start(trainer, pl_module)

    printed: list[str] = []
    monkeypatch.setattr("lightning_hybridop.summary.rank_zero_info", printed.append)
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        max_steps=1,
        enable_progress_bar=False,
        callbacks=[Notes()],
        limit_val_batches=0,
    )
    show_whole_model(trainer, whole_model=whole_model, table="who holds what")
    module = HasExample()

    trainer.fit(module, loader(4))
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(module, loader(4))

    assert shown == [True, False]
    assert printed == ["\nwho holds what"]
    assert module.example_input_array is not None


# The table.


PLAN = Plan(blocks=5, stages=(Stage(first=0, last=4, role="zo"), Stage(first=4, last=5)))
HELD = [
    {"device": "npu:0", "dtype": "float16", "parameters": 1_200_000, "trainable": 500, "mib": 2.25},
    {"device": "cpu", "dtype": "float32", "parameters": 300, "trainable": 20, "mib": 0.5},
]


def test_every_stage_has_a_row_and_all_of_them_a_sum() -> None:
    text = io.StringIO()

    Console(file=text, width=80).print(held_table(PLAN, HELD))

    rows = [line.split() for line in text.getvalue().splitlines()]
    assert ["stage", "role", "device", "dtype", "blocks", "parameters", "trainable", "MiB"] in rows
    assert ["0", "zo", "npu:0", "float16", "0-3", "1,200,000", "500", "2.25"] in rows
    assert ["1", "bp", "cpu", "float32", "4", "300", "20", "0.50"] in rows
    assert ["all", "1,200,300", "520", "2.75"] in rows


def test_a_stage_without_figures_is_refused() -> None:
    with pytest.raises(
        ValueError, match="held has 1 entries, expected 2: pass one for each stage of the plan"
    ):
        held_table(PLAN, HELD[:1])
