"""Replays on every rank what the last stage logs, so that callbacks and loggers agree."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "max": max, "sum": sum}


class ReplayError(TypeError):
    """A call of `self.log` that cannot be repeated on other ranks."""


@dataclass(slots=True)
class LogRecorder:
    """Records `self.log` calls of the micro-batches of one mini-batch instead of carrying them out."""

    values: dict[str, list[tuple[float, Any]]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @contextmanager
    def recording(self, module: LightningModule, *, weight: float, rows: int) -> Iterator[None]:
        """Inside the block `module.log` is recorded as of a micro-batch of this weight and row count."""

        def record(name: str, value: Any, *, batch_size: int | None = None, **options: Any) -> None:
            self.values.setdefault(name, []).append((weight, value))
            known = self.options.setdefault(name, {**options, "batch_size": 0})
            known["batch_size"] += rows if batch_size is None else batch_size

        with _log_replaced(module, record):
            yield

    def entries(self, module: LightningModule) -> list[dict[str, Any]]:
        """Return the recorded calls, one per name and merged over micro-batches, as JSON-serialisable dicts.

        Numbers are averaged by micro-batch weight, or reduced by the call's `reduce_fx` if that is min, max or sum.
        """
        names_of_metrics = {
            id(child): name for name, child in module.named_modules() if isinstance(child, Metric)
        }
        merged = []
        for name, values in self.values.items():
            options = dict(self.options[name])
            reduce_fx = options.get("reduce_fx", "mean")
            if callable(reduce_fx):
                options["reduce_fx"] = reduce_fx = reduce_fx.__name__
            options = {key: value for key, value in options.items() if key != "metric_attribute"}
            last = values[-1][1]
            if isinstance(last, Metric):
                if id(last) not in names_of_metrics:
                    raise ReplayError(
                        f"self.log({name!r}, ...) got a {type(last).__name__} that is no attribute of the module; "
                        "assign it in __init__ so that every rank has it."
                    )
                entry = {"metric": names_of_metrics[id(last)], "step_value": _number(last._forward_cache)}
            else:
                numbers = [(weight, float(torch.as_tensor(value).detach())) for weight, value in values]
                entry = {"value": _merge(numbers, reduce_fx)}
            merged.append({"name": name, "options": options, **entry})
        return merged


@contextmanager
def log_silenced(module: LightningModule) -> Iterator[None]:
    """Inside the block `module.log` does nothing: perturbed and early-exit passes are not the user's metrics."""
    with _log_replaced(module, lambda *_, **__: None):
        yield


@contextmanager
def _log_replaced(module: LightningModule, replacement: Callable[..., None]) -> Iterator[None]:
    module.__dict__["log"] = replacement
    try:
        yield
    finally:
        del module.__dict__["log"]


def replay(module: LightningModule, entries: Sequence[dict[str, Any]], *, owns_metrics: bool) -> None:
    """Carry out recorded `self.log` calls on this rank.

    `owns_metrics` is true on the rank whose torchmetrics objects were updated; elsewhere they only stand for the
    values that `share_metrics` delivers.
    """
    for entry in entries:
        if "metric" not in entry:
            module.log(entry["name"], torch.tensor(entry["value"]), **entry["options"])
            continue
        metric = module.get_submodule(entry["metric"])
        assert isinstance(metric, Metric)
        if not owns_metrics:
            metric._update_count = max(metric._update_count, 1)
            step_value = entry["step_value"]
            metric.__dict__["_forward_cache"] = None if step_value is None else torch.tensor(step_value)
        module.log(entry["name"], metric, **entry["options"])


def share_metrics(
    module: LightningModule, *, owner: bool, inside_step: Callable[[], bool], broadcast: Callable[[Any], Any]
) -> None:
    """Let `compute()` of every torchmetrics object return the owner's value on all ranks.

    Inside a step only the owner computes (a metric's `forward` does), so nothing is exchanged there. Outside, as at
    the end of an epoch, all ranks compute together.
    """
    for metric in (child for child in module.modules() if isinstance(child, Metric)):
        if "_hybridop_shared" in metric.__dict__:
            continue
        metric.__dict__["_hybridop_shared"] = True
        # torchmetrics gathers over all ranks as soon as a process group exists; here one rank has everything.
        metric.sync_on_compute = metric._to_sync = False
        metric.__dict__["compute"] = _shared_compute(
            metric.compute, owner=owner, inside_step=inside_step, broadcast=broadcast
        )


def _shared_compute(
    compute: Callable[[], Any],
    *,
    owner: bool,
    inside_step: Callable[[], bool],
    broadcast: Callable[[Any], Any],
) -> Callable[[], Any]:
    def shared() -> Any:
        if inside_step():
            return compute()
        return broadcast(compute() if owner else None)

    return shared


def _merge(numbers: Sequence[tuple[float, float]], reduce_fx: str) -> float:
    # A micro-batch of weight 0 has no loss of its own (0/0), so it takes no part.
    weighed = [(weight, value) for weight, value in numbers if weight > 0.0]
    if reduce_fx in _REDUCTIONS and weighed:
        return _REDUCTIONS[reduce_fx]([value for _, value in weighed])
    total = math.fsum(weight for weight, _ in weighed)
    return math.fsum(weight * value for weight, value in weighed) / total if total > 0.0 else 0.0


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None
