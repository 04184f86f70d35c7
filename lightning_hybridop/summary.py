"""What Lightning's model summary shows of a pipeline: the whole model, and which stage holds what."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from io import StringIO
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from torch import nn

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.trainers import callbacks_of

BYTES_PER_MIB = 2**20


def held_by_stage(module: nn.Module, owned: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return what the cut `module` of a stage holds: its parameters, those it trains, and their size in MiB.

    Trainable parameters of other stages, of which every stage has a copy for checkpoints, are not counted; `owned`
    are the stage's own. What two stages hold, such as a tied embedding, counts on both.
    """
    own = {id(parameter) for parameter in owned.values()}
    held = [p for p in module.parameters() if not p.is_meta and (id(p) in own or not p.requires_grad)]
    return {
        "parameters": sum(p.numel() for p in held),
        "trainable": sum(p.numel() for p in owned.values()),
        "mib": sum(p.numel() * p.element_size() for p in held) / BYTES_PER_MIB,
    }


def held_table(plan: Plan, held: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row per stage: role, device, dtype, blocks, parameters held and trained, and their size.

    `held` has one mapping per stage with `device`, `dtype`, `parameters`, `trainable` and `mib` (size of the
    parameters in MiB). Raises ValueError when it does not have one per stage of the plan.
    """
    if len(held) != len(plan.stages):
        raise ValueError(
            f"held has {len(held)} entries, expected {len(plan.stages)}: pass one for each stage of the plan."
        )
    table = Table(title="Stages", title_justify="left", box=box.SIMPLE_HEAD, show_footer=len(held) > 1)
    table.add_column("stage", justify="right")
    table.add_column("role")
    table.add_column("device")
    table.add_column("dtype")
    table.add_column("blocks", footer="all")
    for name, key, form in (
        ("parameters", "parameters", "{:,}"),
        ("trainable", "trainable", "{:,}"),
        ("MiB", "mib", "{:,.2f}"),
    ):
        table.add_column(name, footer=form.format(sum(stage[key] for stage in held)), justify="right")
    for index, (stage, its) in enumerate(zip(plan.stages, held, strict=True)):
        table.add_row(
            str(index),
            stage.role,
            its["device"],
            its["dtype"],
            stage.block_range,
            f"{its['parameters']:,}",
            f"{its['trainable']:,}",
            f"{its['mib']:,.2f}",
        )
    return table


def show_whole_model(
    trainer: Trainer,
    *,
    whole_model: Callable[[], AbstractContextManager[None]],
    table: RenderableType,
) -> None:
    """Let the next summary of every ModelSummary callback be that of the whole model, with `table` below it."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelSummary):
            callback.__dict__["on_fit_start"] = partial(_summarise, callback, whole_model, table)


def _summarise(
    callback: ModelSummary,
    whole_model: Callable[[], AbstractContextManager[None]],
    table: RenderableType,
    trainer: Trainer,
    pl_module: LightningModule,
) -> None:
    callback.__dict__.pop("on_fit_start", None)
    with whole_model(), _without_example(pl_module):
        callback.on_fit_start(trainer, pl_module)
    if not callback._max_depth or not trainer.is_global_zero:
        return
    if isinstance(callback, RichModelSummary):
        Console().print(table)
        return
    text = StringIO()
    Console(file=text, width=100).print(table)
    rank_zero_info("\n" + text.getvalue().rstrip())


@contextmanager
def _without_example(module: LightningModule) -> Iterator[None]:
    """Inside the block the module has no example input: no rank has all the weights to run it through."""
    example = module.example_input_array
    if example is None:
        yield
        return
    module.example_input_array = None
    try:
        yield
    finally:
        module.example_input_array = example
