"""`hybridop gradients`: how near each estimator comes to the true gradient, and what it costs."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from lightning_hybridop.commands.configuration import ConfigurationError
from lightning_hybridop.commands.parts import factory, run_module, run_plan
from lightning_hybridop.commands.planned import AUTO, composed, drawn
from lightning_hybridop.estimation.estimators import DEFAULT_EPSILON
from lightning_hybridop.module import HybridOPMixin
from lightning_hybridop.pipeline.anatomy import Anatomy, read_anatomy
from lightning_hybridop.pipeline.batches import label_count, loss_is_shifted, shares, split_rows
from lightning_hybridop.pipeline.estimates import EstimatorSettings
from lightning_hybridop.pipeline.gradient_quality import (
    METHODS,
    Method,
    MiniBatch,
    Quality,
    measure_method,
    true_gradients,
    zo_names,
)
from lightning_hybridop.pipeline.grouping import grouping_of
from lightning_hybridop.pipeline.ownership import block_dtype
from lightning_hybridop.pipeline.work import loss_of
from lightning_hybridop.placement import check_given_plan
from lightning_hybridop.planning.fields import check_whole
from lightning_hybridop.planning.plan import MOST_PASSES, Plan
from lightning_hybridop.reporting.gradients import draw_gradients, gradients_table
from lightning_hybridop.reporting.predictions import write_csv


def gradients(overrides: Sequence[str], *, plot: bool) -> None:
    """Measure, print the table, and write gradients.csv (and gradients.png)."""
    config, folder = composed("gradients", overrides)
    counts = _counts(config)
    if config.plan == AUTO:
        raise ConfigurationError(
            "plan=auto measures processes, and this command has one; choose a cluster or a plan file."
        )
    plan = run_plan(config)
    if not plan.zo_stages or not plan.bp_stages:
        raise ConfigurationError(
            "The plan has no zo stage with a bp stage behind it, so there is no boundary to compare estimators at; choose "
            "another cluster or plan."
        )
    for method in METHODS:  # refused now rather than behind the others
        dataclasses.replace(plan, estimator=method.estimator, exit_queries=0, queries_per_forward=1)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml")
    console = Console()
    rows = [row(quality) for quality in _measured(config, plan, counts)]
    title = f"{config.model.name}: cosine to the true gradient, norm as a multiple of its norm"
    console.print(gradients_table(rows, stages=plan.zo_stages, title=title))
    write_csv(folder / "gradients.csv", rows)
    if plot:
        why_not = drawn(lambda: draw_gradients(rows, folder / "gradients.png"))
        if why_not is not None:
            console.print(why_not, soft_wrap=True, highlight=False)
    console.print(f"Written to {folder}.", soft_wrap=True, highlight=False)


def row(quality: Quality) -> dict[str, Any]:
    """Return a quality as a row of gradients.csv."""
    by_stage = {
        f"{name}_{stage}": value
        for stage, its in quality.stages.items()
        for name, value in (("cosine", its.cosine), ("norm_ratio", its.norm_ratio))
    }
    return {
        "estimator": quality.method.name,
        "queries": quality.queries,
        "cosine": quality.whole.cosine,
        "norm_ratio": quality.whole.norm_ratio,
        **by_stage,
        "forwards": quality.forwards,
        "seconds": quality.seconds,
        "bytes": quality.sent,
    }


def _measured(config: DictConfig, plan: Plan, counts: list[int]) -> Iterator[Quality]:
    torch.manual_seed(config.seed)
    module: nn.Module = run_module(config, plan)
    data = factory(config.data)()
    data.setup("fit")
    batches = _without_end(data.train_dataloader())
    anatomy = read_anatomy(module)
    check_given_plan(plan, anatomy, ranks=plan.processes)
    hooks = module if isinstance(module, HybridOPMixin) else None
    names = zo_names(module, anatomy, plan)
    if hooks is not None:
        chosen = {name for name, _ in hooks.zo_parameters()}
        names = [name for name in names if name in chosen]
    with _quiet():
        _warm_up(module, batches, steps=config.warm_up, learning_rate=config.model.learning_rate)
        module.eval()  # another dropout mask would be another gradient
        batch = _mini_batch(module, hooks, next(batches), plan)
        true = true_gradients(module, _step, batch, names)
        settings = _settings(config, module, anatomy, plan, true)
        console = Console(stderr=True)
        methods = _possible_methods(module, anatomy, names, console)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("Measuring", total=len(methods))
            for method in methods:
                progress.update(task, description=f"Measuring {method.name}")
                yield from measure_method(
                    module,
                    anatomy,
                    _step,
                    batch,
                    method=method,
                    plan=plan,
                    counts=counts,
                    settings=settings,
                    true=true,
                )
                progress.advance(task)


def _counts(config: DictConfig) -> list[int]:
    """Return the numbers of queries to compare, ascending."""
    given = config.queries if isinstance(config.queries, ListConfig) else [config.queries]
    if not given:
        raise ConfigurationError("queries: found an empty list, expected numbers such as [1, 3, 12].")
    for count in given:
        check_whole("queries", count, 1, MOST_PASSES, error=ConfigurationError)
    check_whole("warm_up", config.warm_up, 0, error=ConfigurationError)
    return sorted(set(given))


def _settings(
    config: DictConfig, module: nn.Module, anatomy: Anatomy, plan: Plan, true: Mapping[str, Tensor]
) -> EstimatorSettings:
    first_blocks = [
        module.get_submodule(f"{anatomy.blocks_name}.{plan.stages[stage].first}") for stage in plan.zo_stages
    ]
    held = [str(block_dtype(block)).removeprefix("torch.") for block in first_blocks]
    dtypes = [plan.stages[stage].dtype or own for stage, own in zip(plan.zo_stages, held, strict=True)]
    return EstimatorSettings(
        seed=config.seed,
        epsilon=config.strategy.epsilon or max(DEFAULT_EPSILON[dtype] for dtype in dtypes),
        directions="microbatch",
        distribution=config.strategy.distribution,
        dimensions=sum(gradient.numel() for gradient in true.values()) if config.strategy.shrinkage else None,
    )


def _without_end(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a loader over and over."""
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise ConfigurationError(
                "The training data have no mini-batch; use more rows, or a smaller data.batch_size."
            )


def _warm_up(module: nn.Module, batches: Iterator[Any], *, steps: int, learning_rate: float) -> None:
    """Train the adapters for a few steps: B of LoRA is 0 when it is made, and then A has no gradient."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(_step(module, next(batches))))
        optimizer.step()
    optimizer.zero_grad()


def _mini_batch(module: nn.Module, hooks: HybridOPMixin | None, batch: Any, plan: Plan) -> MiniBatch:
    micro_batches = split_rows(batch, plan.micro_batches)
    shifted = loss_is_shifted(module)
    own = [hooks.micro_batch_weight(rows) if hooks else None for rows in micro_batches]
    counts = [
        label_count(rows, shifted=shifted) if weight is None else weight
        for rows, weight in zip(micro_batches, own, strict=True)
    ]
    return MiniBatch(micro_batches=micro_batches, weights=shares(counts))


def _possible_methods(
    module: nn.Module, anatomy: Anatomy, names: Sequence[str], console: Console
) -> list[Method]:
    """Return all methods, without directions of single rows where the adapters do not go along."""
    parameters = dict(module.named_parameters())
    refusal = grouping_of(
        module,
        {anatomy.blocks_name: module.get_submodule(anatomy.blocks_name)},
        {name: parameters[name] for name in names},
        width=anatomy.width,
    )[1].refusal
    if refusal is None:
        return list(METHODS)
    console.print(f"Directions of single rows are left out: {refusal}", soft_wrap=True, highlight=False)
    return [method for method in METHODS if method.directions != "row"]


def _step(module: nn.Module, rows: Any) -> Any:
    training_step: Callable[[Any, int], Any] = module.training_step  # type: ignore[assignment]
    return training_step(rows, 0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside the block steps may log without a Trainer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*trainer.* reference is not registered")
        yield
