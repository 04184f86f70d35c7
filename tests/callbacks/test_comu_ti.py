import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger

from lightning_hybridop.callbacks import ComuTi

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
]

Make = Callable[..., Any]


def logged(logger: CSVLogger) -> list[dict[str, str]]:
    """Return the rows of metrics.csv."""
    with open(Path(logger.log_dir) / "metrics.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_step_is_logged_once_beside_the_loss(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule, tmp_path: Path
) -> None:
    logger = CSVLogger(tmp_path)
    strategy = pipeline([timeline(4), timeline(8)])
    trainer(strategy=strategy, logger=logger, log_every_n_steps=1, callbacks=[ComuTi()]).fit(
        line, loader(4, 2)
    )

    rows = logged(logger)
    assert [row["step"] for row in rows] == ["0", "1"]
    for row, comu, first in zip(rows, (0.3, 0.5), (0.4, 0.8), strict=True):
        assert float(row["comu_ti"]) == pytest.approx(comu)
        assert float(row["comu_ti/stage_0"]) == pytest.approx(first)
        assert float(row["comu_ti/stage_1"]) == pytest.approx(0.2)
        assert float(row["bubble_rate"]) == pytest.approx(1 - comu)
        assert float(row["samples_per_second"]) > 0
        assert row["train/loss"]


def test_log_every_n_steps_is_honoured_and_the_means_still_see_every_step(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule, tmp_path: Path
) -> None:
    logger, callback = CSVLogger(tmp_path), ComuTi()
    strategy = pipeline([timeline(2), timeline(4), timeline(6), timeline(8)])
    trainer(strategy=strategy, logger=logger, log_every_n_steps=2, callbacks=[callback]).fit(
        line, loader(7, 2)
    )

    assert [(row["step"], round(float(row["comu_ti"]), 6)) for row in logged(logger)] == [
        ("1", 0.3),
        ("3", 0.5),
    ]
    means = callback.means
    assert means is not None
    assert strategy.gathered == 4
    assert (means.mini_batches, means.samples) == (4, 7)
    assert means.comu_ti == pytest.approx(0.35)
    assert means.comu_ti_per_stage == pytest.approx((0.5, 0.2))
    assert means.bubble_rate == pytest.approx(0.65)
    assert means.samples_per_second == pytest.approx(7 / means.seconds)


def test_values_may_be_monitored(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule
) -> None:
    running = trainer(strategy=pipeline([timeline(4)]), callbacks=[ComuTi()])
    running.fit(line, loader(2, 2))
    assert running.callback_metrics["comu_ti"].item() == pytest.approx(0.3)


def test_seconds_come_from_rank_zero_and_leave_validation_out(
    trainer: Make,
    pipeline: Make,
    timeline: Make,
    loader: Make,
    line: LightningModule,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("lightning_hybridop.callbacks.comu_ti.time.perf_counter", lambda: clock[0])
    strategy = pipeline([timeline(4)])
    broadcast: list[float] = []

    def from_rank_zero(value: Any, src: int = 0) -> Any:
        if not isinstance(value, float):
            return value  # the Trainer's own
        broadcast.append(value)
        return value + 1  # rank 0's clock says one second more than this rank's

    step = line.training_step

    def slow_step(*arguments: Any) -> Any:
        clock[0] += 3
        return step(*arguments)

    def slow_validation(*arguments: Any) -> None:
        clock[0] += 100

    monkeypatch.setattr(strategy, "broadcast", from_rank_zero)
    monkeypatch.setattr(line, "training_step", slow_step)
    monkeypatch.setattr(type(line), "validation_step", slow_validation)
    callback = ComuTi()
    running = trainer(strategy=strategy, callbacks=[callback], max_epochs=2, val_check_interval=1)
    running.fit(line, loader(4, 2), loader(1, 1))

    assert broadcast == [3, 3, 3, 3]
    assert callback.means is not None
    assert callback.means.seconds == 16
    assert callback.means.samples_per_second == 0.5


def test_one_stage_without_peers_logs_only_its_throughput(
    trainer: Make, pipeline: Make, loader: Make, line: LightningModule
) -> None:
    callback = ComuTi()
    running = trainer(strategy=pipeline([()]), callbacks=[callback])
    running.fit(line, loader(2, 2))
    assert "samples_per_second" in running.callback_metrics
    assert "comu_ti" not in running.callback_metrics
    assert callback.means is not None
    assert callback.means.samples == 2
    assert callback.means.comu_ti is callback.means.comu_ti_per_stage is callback.means.bubble_rate is None


def test_a_second_fit_starts_anew(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule
) -> None:
    callback = ComuTi()
    assert callback.means is None
    for busy, comu in ((4, 0.3), (8, 0.5)):
        trainer(strategy=pipeline([timeline(busy)]), callbacks=[callback]).fit(line, loader(2, 2))
        assert callback.means is not None
        assert callback.means.comu_ti == pytest.approx(comu)


def test_a_strategy_without_a_timeline_is_refused(trainer: Make, loader: Make, line: LightningModule) -> None:
    with pytest.raises(TypeError, match=r"ComuTi found the strategy SingleDeviceStrategy.*HybridOPStrategy"):
        trainer(callbacks=[ComuTi()]).fit(line, loader(2, 2))
