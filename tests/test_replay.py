import json
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from torch import Tensor
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybridop.callbacks import ComuTi, PeakMemory
from lightning_hybridop.replay import (
    LogRecorder,
    ReplayError,
    merged_reports,
    outputs_are_read,
    replay,
    share_metrics,
)


class Logging(LightningModule):
    """Notes what `self.log` is called with, outside a Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []
        self.accuracy = MulticlassAccuracy(num_classes=2, average="micro")
        self.metrics = MetricCollection({"mean": MeanMetric()})

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]
        self.logged.append((name, value, options))


def recorded(
    module: LightningModule, calls: list[tuple[float, int, Callable[[], None]]]
) -> list[dict[str, Any]]:
    """Record one call per micro-batch of (weight, rows) and return the entries."""
    recorder = LogRecorder(module)
    for weight, rows, call in calls:
        with recorder.recording(weight=weight, rows=rows):
            call()
    logged: list[dict[str, Any]] = recorder.report()["logged"]
    return logged


def of_values(weights_and_values: list[tuple[float, Any]], **options: Any) -> dict[str, Any]:
    module = Logging()
    (entry,) = recorded(
        module,
        [(w, 2, lambda value=value: module.log("key", value, **options)) for w, value in weights_and_values],
    )
    assert module.logged == []
    return entry


def test_means_are_weighted_as_the_loss_is() -> None:
    entry = of_values([(0.25, torch.tensor(4.0)), (0.75, torch.tensor(8.0))], prog_bar=True)

    assert entry == {"name": "key", "value": 7.0, "options": {"prog_bar": True, "batch_size": 4}}


@pytest.mark.parametrize(("reduce_fx", "expected"), [("min", 1.0), ("max", 5.0), ("sum", 9.0), ("mean", 2.2)])
@pytest.mark.parametrize("as_function", [False, True])
def test_reductions(reduce_fx: str, expected: float, as_function: bool) -> None:
    function = getattr(torch, reduce_fx) if as_function else reduce_fx

    entry = of_values([(0.2, 3.0), (0.6, 1.0), (0.2, 5.0)], reduce_fx=function)

    assert entry["value"] == pytest.approx(expected)
    assert entry["options"]["reduce_fx"] == reduce_fx


@pytest.mark.parametrize(("reduce_fx", "expected"), [("min", 1.0), ("max", 5.0), ("sum", 6.0), ("mean", 3.0)])
def test_micro_batch_of_weight_0_without_a_value_takes_no_part(reduce_fx: str, expected: float) -> None:
    entry = of_values([(0.5, 1.0), (0.0, math.nan), (0.5, 5.0)], reduce_fx=reduce_fx)

    assert entry["value"] == pytest.approx(expected)
    assert of_values([(0.0, math.nan)], reduce_fx="mean")["value"] == 0.0


def test_what_micro_batches_of_weight_0_count_is_not_lost() -> None:
    assert of_values([(1.0, 3), (0.0, 4)], reduce_fx="sum")["value"] == 7.0
    assert of_values([(1.0, 3), (0.0, 4)], reduce_fx="max")["value"] == 4.0
    assert of_values([(0.0, 1.0), (0.0, 3.0)])["value"] == 2.0  # no labels at all: by rows


def test_a_batch_size_that_is_not_the_number_of_rows_says_what_a_mean_is_over() -> None:
    module = Logging()
    calls = [
        (0.5, 2, lambda: module.log("per_token", 1.0, batch_size=2)),
        (0.5, 2, lambda: module.log("per_token", 5.0, batch_size=6)),
    ]

    (entry,) = recorded(module, calls)

    assert entry == {"name": "per_token", "value": 4.0, "options": {"batch_size": 8}}


def test_options_may_be_given_by_position() -> None:
    module = Logging()

    (entry,) = recorded(module, [(1.0, 2, lambda: module.log("x", 1.0, True, False))])  # type: ignore[call-arg]

    assert entry["options"] == {"prog_bar": True, "logger": False, "batch_size": 2}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, 3), r"self\.log\('x', \.\.\.\) got a tensor of shape \(2, 3\), expected one element"),
        ("high", r"self\.log\('x', \.\.\.\) got a value of type str, expected a number"),
        ({"a": 1.0}, r"self\.log\('x', \.\.\.\) got a value of type dict, expected a number"),
    ],
)
def test_what_is_no_number_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        of_named("x", value)


def of_named(name: str, value: Any) -> None:
    module = Logging()
    recorded(module, [(1.0, 1, lambda: module.log(name, value))])


@pytest.mark.parametrize("value", [1, 1.0, True, torch.tensor(1), torch.tensor([1.0], requires_grad=True)])
def test_everything_that_is_a_number_can_be_logged(value: Any) -> None:
    assert of_values([(1.0, value)])["value"] == 1.0


def test_calls_merge_by_name_and_keep_their_order_and_options() -> None:
    module = Logging()

    def call(offset: float) -> Callable[[], None]:
        def log() -> None:
            module.log("loss", 1.0 + offset, on_epoch=True)
            module.log("norm", 2.0 + offset, batch_size=10, logger=False)

        return log

    entries = recorded(module, [(0.5, 3, call(0.0)), (0.5, 2, call(1.0))])

    assert entries == [
        {"name": "loss", "value": 1.5, "options": {"on_epoch": True, "batch_size": 5}},
        {"name": "norm", "value": 2.5, "options": {"logger": False, "batch_size": 20}},
    ]
    assert json.loads(json.dumps(entries)) == entries


def test_log_dict_is_recorded_key_by_key() -> None:
    module = Logging()

    entries = recorded(
        module, [(1.0, 3, lambda: module.log_dict({"a": 1.0, "b": torch.tensor(2.0)}, on_step=True))]
    )

    assert [(entry["name"], entry["value"]) for entry in entries] == [("a", 1.0), ("b", 2.0)]
    assert all(entry["options"]["on_step"] is True for entry in entries)


def test_log_is_the_modules_own_again_afterwards() -> None:
    module = Logging()
    recorder = LogRecorder(module)
    with pytest.raises(ArithmeticError), recorder.recording(weight=1.0, rows=1):
        raise ArithmeticError

    module.log("after", 1.0)

    assert module.logged == [("after", 1.0, {})]
    assert recorder.report() == {"logged": [], "printed": []}


def test_silenced_calls_leave_nothing() -> None:
    module = Logging()
    recorder = LogRecorder(module)

    with recorder.recording(weight=1.0, rows=1):
        module.log("base", 1.0)
    with recorder.silenced():
        module.print("perturbed")
        module.log("perturbed", 2.0)
        module.log_dict({"exit": 3.0})
    module.log("after", 4.0)

    report = recorder.report()
    assert [entry["name"] for entry in report["logged"]] == ["base"]
    assert report["printed"] == []
    assert [name for name, _, _ in module.logged] == ["after"]


# torchmetrics objects.


def test_metrics_are_recorded_by_the_name_of_their_attribute() -> None:
    module = Logging()

    def step(predicted: list[int]) -> Callable[[], None]:
        def log() -> None:
            module.accuracy(torch.tensor(predicted), torch.zeros(len(predicted), dtype=torch.long))
            module.log("accuracy", module.accuracy, on_epoch=True, metric_attribute="accuracy")

        return log

    (entry,) = recorded(module, [(0.5, 2, step([0, 0])), (0.5, 2, step([1, 0]))])

    assert entry["metric"] == "accuracy"
    assert entry["step_value"] == 0.75  # that of the mini-batch, not of its last micro-batch
    assert entry["options"] == {"on_epoch": True, "batch_size": 4}
    assert module.accuracy.compute() == 0.75
    assert json.loads(json.dumps(entry)) == entry


def test_metric_inside_a_collection_is_found() -> None:
    module = Logging()
    module.metrics.update(torch.tensor(3.0))

    (entry,) = recorded(module, [(1.0, 1, lambda: module.log("mean", module.metrics["mean"]))])

    assert module.get_submodule(entry["metric"]) is module.metrics["mean"]
    assert entry["step_value"] is None


def test_metric_that_other_ranks_cannot_find_is_refused() -> None:
    module, lost = Logging(), MeanMetric()
    lost.update(1.0)

    with pytest.raises(
        ReplayError, match=r"self\.log\('mean', \.\.\.\) got a MeanMetric that is no attribute"
    ):
        recorded(module, [(1.0, 1, lambda: module.log("mean", lost))])


class Spread(Metric):
    """The largest minus the smallest value: of a kind that must see all values at once."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        values = torch.cat(self.values)
        return values.max() - values.min()


@pytest.mark.parametrize("make", [Spread, MeanMetric, lambda: MeanMetric() + 1.0])
def test_the_value_of_a_step_is_that_of_its_mini_batch(make: Callable[[], Metric]) -> None:
    module = Logging()
    module.metric = make()
    alone = make()
    mini_batches = [
        [torch.tensor([1.0, 2.0]), torch.tensor([5.0])],
        [torch.tensor([3.0]), torch.tensor([7.0, 4.0])],
    ]

    for rows in mini_batches:

        def step(values: Tensor) -> Callable[[], None]:
            def log() -> None:
                module.metric(values)
                module.log("metric", module.metric, on_step=True)

            return log

        (entry,) = recorded(module, [(len(part) / 3, len(part), step(part)) for part in rows])
        assert entry["step_value"] == pytest.approx(float(alone(torch.cat(rows))))

    assert module.metric.compute() == pytest.approx(float(alone.compute()))


def test_perturbed_passes_count_nowhere() -> None:
    module = Logging()
    module.spread = Spread()
    recorder = LogRecorder(module)
    right, wrong = torch.zeros(2, dtype=torch.long), torch.ones(2, dtype=torch.long)

    with recorder.recording(weight=1.0, rows=2):
        module.accuracy(right, right)
        module.metrics(torch.tensor(1.0))
        module.spread.update(torch.tensor([1.0, 2.0]))
    with recorder.silenced():
        assert module.accuracy(wrong, right) == 0.0  # a step may go on with the value
        module.metrics(torch.tensor(9.0))
        module.spread.update(torch.tensor([9.0]))

    assert module.accuracy.compute() == 1.0
    assert module.metrics.compute() == {"mean": 1.0}
    assert module.spread.compute() == 1.0
    assert module.accuracy._forward_cache == 1.0
    assert module.accuracy.update_count == 1


def test_what_is_printed_is_reported() -> None:
    module = Logging()
    recorder = LogRecorder(module)

    with recorder.recording(weight=1.0, rows=2):
        module.print("loss", 1.5, sep=": ")

    assert recorder.report()["printed"] == ["loss: 1.5"]


class Listener(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        """Count batches."""


@pytest.mark.parametrize(
    ("callbacks", "read"),
    [
        ([], False),
        ([TQDMProgressBar(), RichProgressBar(), ModelCheckpoint(), PeakMemory(), ComuTi()], False),
        ([LambdaCallback(on_validation_batch_end=lambda *_: None)], True),
        ([Listener()], False),
    ],
)
def test_outputs_travel_only_when_a_callback_of_the_users_may_read_them(
    callbacks: list[Callback], read: bool
) -> None:
    module = Logging()
    module.trainer = SimpleNamespace(callbacks=callbacks)  # type: ignore[assignment]

    assert outputs_are_read(module, "on_validation_batch_end") is read
    assert outputs_are_read(module, "on_train_batch_end") is any(isinstance(c, Listener) for c in callbacks)


class ReadsItsOwn(Logging):
    def on_test_batch_end(self, *_: Any) -> None:
        """Read what the step returned."""


def test_a_module_may_read_its_own_outputs() -> None:
    module = ReadsItsOwn()
    module.trainer = SimpleNamespace(callbacks=[])  # type: ignore[assignment]

    assert outputs_are_read(module, "on_test_batch_end")
    assert not outputs_are_read(module, "on_validation_batch_end")


# Replaying.


def test_numbers_are_replayed_with_their_options() -> None:
    module = Logging()
    entries = [{"name": "loss", "value": 1.5, "options": {"on_epoch": True, "batch_size": 4}}]

    replay(module, {"logged": entries, "printed": []}, owns_metrics=False)

    ((name, value, options),) = module.logged
    assert name == "loss"
    assert isinstance(value, Tensor)
    assert value == 1.5
    assert options.items() >= {"on_epoch": True, "batch_size": 4}.items()


def test_metrics_are_replayed_with_the_owners_step_value() -> None:
    module = Logging()
    entries = [{"name": "accuracy", "metric": "accuracy", "step_value": 0.25, "options": {"on_step": True}}]

    replay(module, {"logged": entries, "printed": []}, owns_metrics=False)

    assert module.logged == [("accuracy", module.accuracy, {"on_step": True})]
    assert module.accuracy._forward_cache == 0.25
    assert module.accuracy.update_called  # or compute() would warn that nothing was ever counted


def test_owner_keeps_what_its_metric_holds() -> None:
    module = Logging()
    module.accuracy(torch.tensor([0, 1]), torch.tensor([0, 0]))
    entries = [{"name": "accuracy", "metric": "accuracy", "step_value": 0.25, "options": {}}]

    replay(module, {"logged": entries, "printed": []}, owns_metrics=True)

    assert module.accuracy._forward_cache == 0.25  # that of the mini-batch
    assert module.accuracy.compute() == 0.5


def test_metrics_compute_the_owners_value_on_every_rank() -> None:
    sent: list[Any] = []

    def collect(value: Any) -> Any:
        sent.append(value)
        return value

    owner, other = Logging(), Logging()
    share_metrics(owner, owner=True, inside_step=lambda: False, broadcast=collect)
    share_metrics(other, owner=False, inside_step=lambda: False, broadcast=lambda value: sent[-1])
    owner.accuracy.update(torch.tensor([0, 1, 0, 0]), torch.zeros(4, dtype=torch.long))
    other.accuracy._update_count = 1

    assert owner.accuracy.compute() == 0.75
    assert other.accuracy.compute() == 0.75
    assert len(sent) == 1


def test_nothing_is_exchanged_inside_a_step() -> None:
    module = Logging()

    def refuse(_: Any) -> Any:
        raise AssertionError("exchanged inside a step")

    share_metrics(module, owner=True, inside_step=lambda: True, broadcast=refuse)

    assert module.accuracy(torch.tensor([0, 1]), torch.tensor([0, 0])) == 0.5
    assert module.accuracy.compute() == 0.5


def test_sharing_twice_exchanges_once() -> None:
    module = Logging()
    sent: list[Any] = []

    def collect(value: Any) -> Any:
        sent.append(value)
        return value

    for _ in range(2):
        share_metrics(module, owner=True, inside_step=lambda: False, broadcast=collect)
    module.accuracy.update(torch.tensor([0]), torch.tensor([0]))
    module.accuracy.compute()

    assert len(sent) == 1


class TwoLogs(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MeanMetric()


def logged_by(module: LightningModule, parts: Sequence[tuple[float, int]], start: int) -> LogRecorder:
    recorder = LogRecorder(module)
    for number, (weight, rows) in enumerate(parts, start=start):
        with recorder.recording(weight=weight, rows=rows):
            module.log("loss", torch.tensor(number * 0.5))
            module.log("largest", float(number), reduce_fx=max)
            module.log("per_row", float(number) ** 2, batch_size=rows + 1)
            module.print("micro-batch", number)
            if number == 2:
                module.log("once", 7.0)
    return recorder


def test_what_replicas_report_of_their_shares_is_what_one_process_reports_of_all() -> None:
    parts = [(0.1, 2), (0.5, 3), (0.4, 1), (0.0, 1)]
    module = TwoLogs()
    shares = [logged_by(module, parts[:2], 0), logged_by(module, parts[2:], 2), logged_by(module, [], 4)]
    together = merged_reports([json.loads(json.dumps(share.report_of_share())) for share in shares])

    assert together == logged_by(module, parts, 0).report()


def test_a_metric_that_would_know_one_share_only_is_refused() -> None:
    module = TwoLogs()
    recorder = LogRecorder(module)
    with recorder.recording(weight=0.5, rows=1):
        module.accuracy.update(1.0)

    with pytest.raises(ReplayError, match="training_step updated or logged a torchmetrics object"):
        recorder.report_of_share()
