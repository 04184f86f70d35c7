import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger

from lightning_hybridop import HybridOPStrategy
from lightning_hybridop.callbacks import Energy, energy
from lightning_hybridop.devices.power import HostMeter
from lightning_hybridop.planning.cluster import ClusterError
from tests.distributed.harness import run_ranks
from tests.distributed.runs import SgdModule, trainer_for
from tests.tiny import loader as token_loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
]

Make = Callable[..., Any]


class Steps:
    """A meter that counts `each` joules whenever it is read."""

    def __init__(self, each: float) -> None:
        self.each, self.read, self.stopped = each, 0, 0

    def joules(self) -> float:
        self.read += 1
        return self.each * self.read

    def stop(self) -> None:
        self.stopped += 1


class Device:
    """A device of torch's that torch need not know here."""

    def __init__(self, name: str) -> None:
        self.name, self.type = name, name.partition(":")[0]

    def __str__(self) -> str:
        return self.name


CPU = frozenset({"cpu"})
NO_COUNTERS = HostMeter(
    meters=(), source="", covers=frozenset(), problem="This host has no counter of energy."
)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_joules_of_counters_are_logged_per_sample_and_written(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    meter = Steps(6.0)
    monkeypatch.setattr(energy, "host_meter", lambda: HostMeter(meters=(meter,), source="RAPL", covers=CPU))
    logger, callback = CSVLogger(tmp_path), Energy(folder=tmp_path)
    trainer(strategy=pipeline([timeline(4)]), logger=logger, log_every_n_steps=1, callbacks=[callback]).fit(
        line, loader(8, 4)
    )

    logged = rows_of(Path(logger.log_dir) / "metrics.csv")
    assert [float(row["energy_joules_per_sample"]) for row in logged] == [1.5, 1.5]
    report = callback.report
    assert report is not None
    assert (report.samples, report.joules, report.joules_per_sample) == (8, 12.0, 1.5)
    assert str(report) == "1.5 J per sample (RAPL)."
    assert meter.stopped == 1
    assert [(row["ranks"], row["joules"]) for row in rows_of(tmp_path / "energy.csv")] == [
        ("0", "12.0"),
        ("all", "12.0"),
    ]


def test_without_counters_the_profile_and_busy_times_give_an_estimate(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    now = [0.0]

    def clock() -> float:
        now[0] += 10.0
        return now[0]

    monkeypatch.setattr(energy, "host_meter", lambda: NO_COUNTERS)
    monkeypatch.setattr(energy, "time", SimpleNamespace(perf_counter=clock))
    profile = tmp_path / "board.yaml"
    profile.write_text(json.dumps({"name": "board", "busy_w": 20, "idle_w": 5}), encoding="utf-8")
    strategy = pipeline([timeline(4)])
    strategy.stage_index = 0
    strategy.last_result = SimpleNamespace(timeline=timeline(4)[:1])  # busy for 4 s of 10
    callback = Energy(profiles={"cpu": str(profile)})
    trainer(strategy=strategy, callbacks=[callback]).fit(line, loader(8, 4))

    report = callback.report
    assert report is not None
    assert report.joules == 2 * (4 * 20 + 6 * 5)
    assert str(report) == "27.5 J per sample (estimated from the profile board)."


def test_a_profile_without_idle_power_gives_an_upper_bound_that_is_called_one(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(energy, "host_meter", lambda: NO_COUNTERS)
    strategy = pipeline([timeline(4)])
    strategy.stage_index = 0
    callback = Energy(profiles={"cpu": "atlas-200i-dk-a2"})
    trainer(strategy=strategy, callbacks=[callback]).fit(line, loader(8, 4))
    assert "(estimated from the profile atlas-200i-dk-a2, an upper bound)" in str(callback.report)


def test_what_nothing_tells_is_unknown_and_says_why(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(energy, "host_meter", lambda: NO_COUNTERS)
    logger = CSVLogger(tmp_path)
    strategy = pipeline([timeline(4)])
    strategy.stage_index = 1
    callback = Energy(folder=tmp_path)
    trainer(strategy=strategy, logger=logger, log_every_n_steps=1, callbacks=[callback]).fit(
        line, loader(8, 4)
    )
    assert str(callback.report) == (
        "Energy per sample is unknown: This host has no counter of energy. No profile is given for cpu (rank 0)."
    )
    assert "energy_joules_per_sample" not in rows_of(Path(logger.log_dir) / "metrics.csv")[0]
    assert rows_of(tmp_path / "energy.csv")[-1]["joules_per_sample"] == ""


@pytest.mark.parametrize(("device", "covers"), [("cuda:0", "cpu"), ("npu:0", "cpu"), ("cpu", "npu")])
def test_what_counters_leave_out_is_estimated_and_added_or_makes_the_sum_unknown(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, device: str, covers: str,
) -> None:  # fmt: skip
    now = [0.0]

    def clock() -> float:
        now[0] += 10.0
        return now[0]

    def counters() -> HostMeter:
        return HostMeter(meters=(Steps(6.0),), source="counters", covers=frozenset({covers}))

    monkeypatch.setattr(energy, "host_meter", counters)
    monkeypatch.setattr(energy, "time", SimpleNamespace(perf_counter=clock))
    profile = tmp_path / "card.yaml"
    profile.write_text(json.dumps({"name": "card", "busy_w": 20, "idle_w": 5}), encoding="utf-8")

    def report(profiles: dict[str, str]) -> energy.EnergyReport:
        strategy = pipeline([timeline(4)])
        strategy.compute_device, strategy.pipelined = Device(device), True
        strategy.plan = replace(
            strategy.plan,
            stages=tuple(
                replace(stage, name=f"board-{index}", device=device)
                for index, stage in enumerate(strategy.plan.stages)
            ),
        )
        strategy.stage_index = 0
        strategy.last_result = SimpleNamespace(timeline=timeline(4)[:1])  # busy for 4 s of 10
        callback = Energy(profiles=profiles, folder=tmp_path)
        trainer(strategy=strategy, callbacks=[callback]).fit(line, loader(8, 4))
        assert callback.report is not None
        return callback.report

    known = report({"board-0": str(profile)})
    assert [(share.joules, share.source) for share in known.shares] == [
        (12.0, "counters"),
        (2 * (4 * 20 + 6 * 5), "estimated from the profile card"),
    ]
    assert known.joules == 12 + 220
    assert str(known) == "29 J per sample (counters; estimated from the profile card)."
    assert [row["ranks"] for row in rows_of(tmp_path / "energy.csv")] == ["0", "0", "all"]

    unknown = report({})
    assert unknown.joules is None
    assert str(unknown) == (
        f"Energy per sample is unknown: This host's energy counters (counters) leave out {device}. "
        f"No profile is given for board-0 or {device} (rank 0)."
    )


def test_a_single_process_without_counters_is_estimated_by_its_device(
    trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "host_meter", lambda: NO_COUNTERS)
    profile = tmp_path / "board.yaml"
    profile.write_text(json.dumps({"name": "board", "busy_w": 20, "idle_w": 5}), encoding="utf-8")
    callback = Energy(profiles={"cpu": str(profile)})
    trainer(strategy=HybridOPStrategy(stages=1), callbacks=[callback]).fit(
        SgdModule(), token_loader(16), token_loader(8)
    )
    assert str(callback.report).endswith("J per sample (estimated from the profile board).")


def test_an_unknown_profile_is_refused_before_the_run() -> None:
    with pytest.raises(ClusterError, match="there is no profile jetson-9000; choose one of"):
        Energy(profiles={"cpu": "jetson-9000"})


def _report_of_rank(hosts: list[str]) -> tuple[Any, int]:
    import os

    rank = int(os.environ["RANK"])
    meter = Steps(6.0)
    energy.machine_identity = lambda: hosts[rank]  # type: ignore[assignment]
    energy.host_meter = lambda: HostMeter(meters=(meter,), source=f"meter of {hosts[rank]}", covers=CPU)  # type: ignore[assignment]
    callback = Energy()
    strategy = HybridOPStrategy(stages=2, zo_stages=1, micro_batches=1)
    trainer_for(strategy, callbacks=[callback], max_steps=2, log_every_n_steps=1).fit(
        SgdModule(), token_loader(16)
    )
    return callback.report, meter.read


def _on_one_and_on_two_hosts() -> list[tuple[Any, int]]:
    lightning.seed_everything(0, verbose=False)
    return [_report_of_rank(["a", "a"]), _report_of_rank(["a", "b"])]


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_a_host_is_counted_once_however_many_processes_it_runs() -> None:
    first, second = run_ranks(_on_one_and_on_two_hosts, 2)
    (one_host, reads), (two_hosts, _) = first
    assert (one_host.joules, one_host.joules_per_sample) == (12.0, 0.75)
    assert [(share.ranks, share.source) for share in one_host.shares] == [((0, 1), "meter of a")]
    assert reads > 0
    assert second[0][1] == 0
    assert (two_hosts.joules, len(two_hosts.shares)) == (24.0, 2)
    assert second[1][0] == two_hosts
