"""Replays on every rank what the last stage logs and prints, so that callbacks and loggers agree."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_hybridop.trainers import callbacks_of

_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "max": max, "sum": sum}
_LOG = inspect.signature(LightningModule.log)
# What means nothing on another rank: an object that only one of them has, a name that Lightning looks up itself.
_OWN_OPTIONS = {"self", "name", "value", "batch_size", "metric_attribute", "sync_dist_group"}


# Packages whose callbacks count and time batches, and leave alone what a step returned.
_DO_NOT_READ_OUTPUTS = ("lightning.", "pytorch_lightning.", "lightning_hybridop.callbacks.")


class ReplayError(TypeError):
    """A call of `self.log` that cannot be repeated on other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of `self.log`: by a micro-batch of this weight and row count, with this `batch_size` if it named one."""

    weight: float
    rows: int
    batch_size: int | None
    value: Tensor | Metric


class LogRecorder:
    """Records what the micro-batches of one mini-batch log and print instead of carrying it out.

    torchmetrics objects gather as ever. What a metric's `forward` left as the value of its latest input becomes the
    value of the whole mini-batch.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._calls: dict[str, list[_Call]] = {}
        self._options: dict[str, dict[str, Any]] = {}
        self._printed: list[str] = []
        self._updates = [metric._update_count for metric in self._metrics]
        # By id: a metric's own hash changes with what it has gathered.
        self._of_mini_batch: dict[int, list[tuple[Metric, dict[str, Any]]]] = {}

    @contextmanager
    def recording(self, *, weight: float, rows: int) -> Iterator[None]:
        """Inside the block calls are recorded as of a micro-batch of this share of the loss and row count.

        With a weight of 1 there is no other micro-batch, and metrics need not be kept track of.
        """

        def log(*arguments: Any, **options: Any) -> None:
            call = _LOG.bind(self._module, *arguments, **options).arguments
            name, batch_size = call["name"], call.get("batch_size")
            value = _loggable(name, call["value"])
            self._calls.setdefault(name, []).append(
                _Call(weight=weight, rows=rows, batch_size=batch_size, value=value)
            )
            shared = {key: option for key, option in call.items() if key not in _OWN_OPTIONS}
            self._options.setdefault(name, shared)

        def write(*parts: Any, sep: str | None = " ", **_: Any) -> None:
            self._printed.append((" " if sep is None else sep).join(str(part) for part in parts))

        with ExitStack() as replaced:
            replaced.enter_context(_attribute(self._module, "log", log))
            replaced.enter_context(_attribute(self._module, "print", write))
            for metric in self._metrics if weight < 1.0 else ():
                replaced.enter_context(_attribute(metric, "forward", self._followed(metric)))
            yield

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside the block nothing is logged, printed or counted: perturbed and early-exit passes are not the user's."""
        with ExitStack() as replaced:
            for name in ("log", "print"):
                replaced.enter_context(_attribute(self._module, name, lambda *_, **__: None))
            replaced.enter_context(_put_aside(self._metrics))
            yield

    def report(self) -> dict[str, Any]:
        """Return what was recorded, as a JSON-serialisable dict for `replay`.

        Calls of `self.log` are merged over micro-batches by name. A number is taken to be a mean over what the loss
        averages over, or over as many things as its call's `batch_size` says, if that is not the number of rows;
        with `reduce_fx` min, max or sum it is reduced by that instead.
        """
        return {"logged": [self._merged(name) for name in self._calls], "printed": self._printed}

    def report_of_share(self) -> dict[str, Any]:
        """Return what was recorded of one replica's share of the micro-batches, for `merged_reports`.

        Raises:
            ReplayError: a torchmetrics object was updated or logged, whose state would lack the other replicas' shares.
        """
        updated = [metric._update_count for metric in self._metrics] != self._updates
        if updated or any(isinstance(call.value, Metric) for calls in self._calls.values() for call in calls):
            raise ReplayError(
                "training_step updated or logged a torchmetrics object, of which each replica would know its own share only; "
                "log its value as a number, or measure in validation_step."
            )
        calls = {
            name: [[call.weight, call.rows, call.batch_size, float(call.value)] for call in calls]  # type: ignore[arg-type]
            for name, calls in self._calls.items()
        }
        options = {name: _sendable(options) for name, options in self._options.items()}
        return {"calls": calls, "options": options, "printed": self._printed}

    def _merged(self, name: str) -> dict[str, Any]:
        calls, options = self._calls[name], _sendable(self._options[name])
        last = calls[-1].value
        if isinstance(last, Metric):
            options["batch_size"] = sum(_counted(call) for call in calls)
            entry = {"metric": self._attribute_of(name, last), "step_value": self._step_value(last)}
            return {"name": name, "options": options, **entry}
        return _merged_numbers(name, calls, options)

    def _attribute_of(self, name: str, metric: Metric) -> str:
        for attribute, child in self._module.named_modules():
            if child is metric:
                return str(attribute)
        raise ReplayError(
            f"self.log({name!r}, ...) got a {type(metric).__name__} that is no attribute of the module; "
            "assign it in __init__ so that every rank has it."
        )

    def _followed(self, metric: Metric) -> Callable[..., Any]:
        """Return the metric's `forward`, which also gathers for the mini-batch alone."""
        forward = metric.forward
        family = _family(metric)

        def followed(*arguments: Any, **keywords: Any) -> Any:
            value = forward(*arguments, **keywords)
            with _put_aside(family):
                for member, state in self._of_mini_batch.get(id(metric), []):
                    member.__dict__.update(state)
                metric.update(*arguments, **keywords)
                self._of_mini_batch[id(metric)] = [(member, _state(member)) for member in family]
            return value

        return followed

    def _step_value(self, metric: Metric) -> float | None:
        if id(metric) not in self._of_mini_batch:
            return _number(metric._forward_cache)
        states = self._of_mini_batch[id(metric)]
        with _put_aside([member for member, _ in states]):
            for member, state in states:
                member.__dict__.update(state)
            return _number(metric.compute())


def merged_reports(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what `LogRecorder.report` would have, had one process recorded all that replicas report of their shares."""
    names = list(dict.fromkeys(name for report in reports for name in report["calls"]))
    logged = []
    for name in names:
        with_it = [report for report in reports if name in report["calls"]]
        calls = [
            _Call(
                weight=weight,
                rows=rows,
                batch_size=batch_size,
                value=torch.tensor(value, dtype=torch.float64),
            )
            for report in with_it
            for weight, rows, batch_size, value in report["calls"][name]
        ]
        logged.append(_merged_numbers(name, calls, with_it[0]["options"][name]))
    return {"logged": logged, "printed": [text for report in reports for text in report["printed"]]}


def replay(module: LightningModule, report: dict[str, Any], *, owns_metrics: bool) -> None:
    """Carry out on this rank what a `LogRecorder` reported.

    `owns_metrics` is true on the rank whose torchmetrics objects were updated; elsewhere they only stand for the
    values that `share_metrics` delivers.
    """
    for text in report["printed"]:
        module.print(text)
    for entry in report["logged"]:
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
        # A copy of a shared metric has the mark, but computes for itself.
        if metric.__dict__.get("_hybridop_shared") == id(metric):
            continue
        metric.__dict__["_hybridop_shared"] = id(metric)
        # torchmetrics gathers over all ranks as soon as a process group exists; here one rank has everything.
        metric.sync_on_compute = metric._to_sync = metric.dist_sync_on_step = False
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


def compute_together(trainer: Trainer) -> None:
    """Let all ranks compute what was logged as soon as an epoch has ended.

    A progress bar reads it then, but on rank 0 alone, where it would be waiting for the others in `compute()`.
    """
    connector = trainer._logger_connector

    def ended() -> None:
        type(connector).epoch_end_reached(connector)
        if trainer._results is not None:
            trainer._results.metrics(on_step=False)

    connector.__dict__["epoch_end_reached"] = ended


def outputs_are_read(module: LightningModule, hook: str) -> bool:
    """Return whether the module or a callback may read a step's outputs: has a `hook` that is not Lightning's own."""
    hooks = [getattr(listener, hook, None) for listener in (module, *callbacks_of(module.trainer))]
    return any(
        not (getattr(function, "__module__", None) or "").startswith(_DO_NOT_READ_OUTPUTS)
        for function in hooks
        if function is not None
    )


# Calls of `self.log`.


def _loggable(name: str, value: Any) -> Tensor | Metric:
    if isinstance(value, Metric):
        return value
    try:
        number = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise ReplayError(
            f"self.log({name!r}, ...) got a value of type {type(value).__name__}, expected a number, a tensor of one "
            "element or a torchmetrics object."
        ) from None
    if number.numel() != 1:
        raise ReplayError(
            f"self.log({name!r}, ...) got a tensor of shape {tuple(number.shape)}, expected one element; reduce it "
            "first, for example by .mean()."
        )
    return number.clone()


def _sendable(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of `self.log` as JSON can hold them."""
    reduce_fx = options.get("reduce_fx", "mean")
    return {**options, "reduce_fx": reduce_fx.__name__} if callable(reduce_fx) else dict(options)


def _merged_numbers(name: str, calls: Sequence[_Call], options: dict[str, Any]) -> dict[str, Any]:
    value = _reduced(_numbers(calls), options.get("reduce_fx", "mean"))
    batch_size = sum(_counted(call) for call in calls)
    return {"name": name, "options": {**options, "batch_size": batch_size}, "value": value}


def _counted(call: _Call) -> int:
    return call.rows if call.batch_size is None else call.batch_size


def _numbers(calls: Sequence[_Call]) -> list[tuple[float, float]]:
    """Return the values that were logged, each with how much it counts in a mean."""
    as_batch_size = any(_counted(call) != call.rows for call in calls)
    without_labels = not any(call.weight > 0.0 for call in calls)
    numbers = []
    for call in calls:
        assert isinstance(call.value, Tensor)
        value = float(call.value)
        # A micro-batch of weight 0 may have no loss of its own (0/0), which takes no part.
        if call.weight > 0.0 or not math.isnan(value):
            weight = _counted(call) if as_batch_size or without_labels else call.weight
            numbers.append((float(weight), value))
    return numbers


def _reduced(numbers: Sequence[tuple[float, float]], reduce_fx: str) -> float:
    if reduce_fx in _REDUCTIONS and numbers:
        return _REDUCTIONS[reduce_fx]([value for _, value in numbers])
    total = math.fsum(weight for weight, _ in numbers)
    return math.fsum(weight * value for weight, value in numbers) / total if total > 0.0 else 0.0


# Attributes and states that are exchanged for a while.


@contextmanager
def _attribute(owner: torch.nn.Module, name: str, value: Any) -> Iterator[None]:
    """Inside the block the object has an attribute of its own in the place of its class's."""
    owner.__dict__[name] = value
    try:
        yield
    finally:
        del owner.__dict__[name]


def _family(metric: Metric) -> list[Metric]:
    """Return a metric and those that it wraps."""
    return [child for child in metric.modules() if isinstance(child, Metric)]


@contextmanager
def _put_aside(metrics: Sequence[Metric]) -> Iterator[None]:
    """Inside the block the metrics have gathered nothing; behind it they hold what they held before."""
    kept = [dict(metric.__dict__) for metric in metrics]
    for metric in metrics:
        # Not reset(), which empties the lists that are kept.
        for name, default in metric._defaults.items():
            fresh: Any = default.detach().clone().to(metric.device) if isinstance(default, Tensor) else []
            metric.__dict__[name] = fresh
        metric.__dict__.update(_update_count=0, _computed=None, _forward_cache=None)
    try:
        yield
    finally:
        for metric, attributes in zip(metrics, kept, strict=True):
            metric.__dict__.clear()
            metric.__dict__.update(attributes)


def _state(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in (*metric._defaults, "_update_count")}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None
