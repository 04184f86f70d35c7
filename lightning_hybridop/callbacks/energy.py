"""Measures what a sample costs in joules over all hosts of a run."""

import csv
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hybridop.devices.library import load_profiles, read_profile
from lightning_hybridop.devices.power import HostMeter, host_meter, machine_identity
from lightning_hybridop.pipeline.batches import row_count
from lightning_hybridop.pipeline.exchange import gather_json
from lightning_hybridop.planning.cluster import ClusterError, DeviceProfile
from lightning_hybridop.planning.plan import Plan

ESTIMATED = "estimated"
"""How what was not measured is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The joules of one host, by its counters, or of one stage whose device its host's counters leave out.

    `source` names the counters, or says that the figure is estimated and from what; None where there is no figure, of
    which `problem` then says why.
    """

    ranks: tuple[int, ...]
    joules: float | None
    source: str | None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyReport:
    """What the training steps of a run took, in joules, and of whom; None where a part is unknown."""

    samples: int
    joules: float | None
    joules_per_sample: float | None
    shares: tuple[Share, ...]

    def __str__(self) -> str:
        if self.joules_per_sample is None:
            problems = [share.problem for share in self.shares if share.problem is not None]
            return f"Energy per sample is unknown: {problems[0] if problems else 'nothing was trained.'}"
        sources = sorted({share.source for share in self.shares if share.source is not None})
        return f"{self.joules_per_sample:.3g} J per sample ({'; '.join(sources)})."


class Energy(Callback):
    """Log `energy_joules_per_sample`: joules of all hosts over the rows trained so far, every `log_every_n_steps`.

    Counted is what lies between the first and the last mini-batch of an epoch, without validation. Real counters come
    first: RAPL, the rails of a Jetson, the power in npu-smi's table; they count whole hosts, each once, however many
    processes it runs. They need not include all of its devices: RAPL leaves out GPUs and NPUs, npu-smi all but NPUs. A
    stage on a device that they leave out is estimated from the device's profile: `busy_w` while it computes, `idle_w` else,
    or `busy_w` throughout where `idle_w` is unknown, which is an upper bound. Whatever is estimated is called so, and
    added to what the counters say. If a part is unknown, so is the sum, and nothing is logged.

    Args:
        profiles: profile of each stage's device, by the stage's name or else its device: a name in the library, or the path
            of a profile's YAML file.
        folder: where rank 0 writes `energy.csv`, a line for each host or stage; None writes nothing.

    Raises:
        ClusterError: there is no such profile.
    """

    def __init__(
        self, *, profiles: Mapping[str, str] | None = None, folder: str | Path | None = None
    ) -> None:
        self._profiles = {name: _profile(given) for name, given in (profiles or {}).items()}
        self._folder = None if folder is None else Path(folder)
        self._meter: HostMeter | None = None
        self._reset()

    def _reset(self) -> None:
        self._samples = 0
        self._counted = 0.0
        self._counts: tuple[tuple[int, ...], str] | None = None  # the ranks of this host, and its counters
        self._estimated = 0.0
        self._profile: DeviceProfile | None = None
        self._source: str | None = None
        self._problem: str | None = None
        self.report: EnergyReport | None = None
        """What the latest run took so far, equal on all ranks."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find this host's counters and agree on who reads them. Collective."""
        self._reset()
        identities = _gathered(machine_identity())
        here = [
            rank for rank, identity in enumerate(identities) if identity == identities[trainer.global_rank]
        ]
        own = host_meter() if trainer.global_rank == here[0] else None
        told = None if own is None else [own.source, sorted(own.covers), own.problem]
        source, covers, problem = _gathered(told)[here[0]]
        if own is not None and own.meters:  # on one rank of the host, so that it counts once
            self._meter, self._counts = own, (tuple(here), source)
        device: torch.device = getattr(trainer.strategy, "compute_device", trainer.strategy.root_device)
        if device.type not in covers:
            self._estimate_from(
                trainer, device, problem or f"This host's energy counters ({source}) leave out {device}."
            )
        self._start()

    def _estimate_from(self, trainer: Trainer, device: torch.device, problem: str) -> None:
        """Look up the profile of this rank's device, in the place of counters."""
        names = [str(device)]
        # A process of its own has no plan to ask.
        if getattr(trainer.strategy, "pipelined", False):
            plan: Plan = trainer.strategy.plan  # type: ignore[attr-defined]
            stage = plan.stages[trainer.strategy.stage_index]  # type: ignore[attr-defined]
            names = [name for name in (stage.name, stage.device) if name is not None]
        profile = next((self._profiles[name] for name in names if name in self._profiles), None)
        if profile is None:
            self._problem = (
                f"{problem} No profile is given for {' or '.join(names)} (rank {trainer.global_rank})."
            )
        elif profile.busy_w is None:
            self._problem = f"{problem} The profile {profile.name} does not say busy_w."
        else:
            self._profile = profile
            bound = ", an upper bound" if profile.idle_w is None else ""
            self._source = f"{ESTIMATED} from the profile {profile.name}{bound}"

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting: what lies between two epochs is not training."""
        self._start()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting again behind a validation in the middle of an epoch."""
        self._start()

    def _start(self) -> None:
        self._read = 0.0 if self._meter is None else self._meter.joules()
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add what the mini-batch took; gather and log it where the Trainer logs."""
        read, since = self._read, self._since
        self._start()
        self._counted += self._read - read
        if self._profile is not None:
            self._estimated += _estimated_joules(self._profile, self._since - since, _busy_seconds(trainer))
        self._samples += row_count(batch)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a part of the Trainer
        if every and trainer.global_step % every == 0:
            self._gather(trainer)
            assert self.report is not None
            if self.report.joules_per_sample is not None:
                pl_module.log(
                    "energy_joules_per_sample", self.report.joules_per_sample, on_step=True, on_epoch=False
                )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the whole run and write it down. Collective."""
        self._gather(trainer)
        self._stop()
        if self._folder is not None and trainer.is_global_zero:
            assert self.report is not None
            write_energy(self.report, self._folder / "energy.csv")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the threads that read powers."""
        self._stop()

    def _stop(self) -> None:
        if self._meter is not None:
            self._meter.stop()
            self._meter = None

    def _gather(self, trainer: Trainer) -> None:
        own: list[tuple[tuple[int, ...], float | None, str | None, str | None]] = []
        if self._counts is not None:
            ranks, source = self._counts
            own.append((ranks, self._counted, source, None))
        if self._profile is not None or self._problem is not None:
            joules = None if self._profile is None else self._estimated
            own.append(((trainer.global_rank,), joules, self._source, self._problem))
        shares = tuple(
            Share(ranks=tuple(ranks), joules=joules, source=source, problem=problem)
            for parts in _gathered(own)
            for ranks, joules, source, problem in parts
        )
        values = [share.joules for share in shares]
        total = None if None in values else math.fsum(value for value in values if value is not None)
        self.report = EnergyReport(
            samples=self._samples,  # replicas of a pipeline share the rows of a mini-batch
            joules=total,
            joules_per_sample=None if total is None or not self._samples else total / self._samples,
            shares=shares,
        )


def write_energy(report: EnergyReport, path: Path) -> None:
    """Write a line for each host or estimated stage, and one for their sum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ranks", "joules", "joules_per_sample", "source"])
        for share in report.shares:
            each = None if share.joules is None or not report.samples else share.joules / report.samples
            writer.writerow(
                [" ".join(map(str, share.ranks)), share.joules, each, share.source or share.problem]
            )
        writer.writerow(["all", report.joules, report.joules_per_sample, str(report)])


def _estimated_joules(profile: DeviceProfile, seconds: float, busy: float | None) -> float:
    """Return what a device used in `seconds`, of which it computed for `busy`; None: all of them."""
    assert profile.busy_w is not None
    if busy is None or profile.idle_w is None:
        return profile.busy_w * seconds
    busy = min(busy, seconds)
    return profile.busy_w * busy + profile.idle_w * (seconds - busy)


def _busy_seconds(trainer: Trainer) -> float | None:
    """Return how long this rank's stage computed in the latest mini-batch; None where nobody measured."""
    result = getattr(trainer.strategy, "last_result", None)
    if result is None:
        return None
    return math.fsum(timed.end - timed.start for timed in result.timeline)


def _gathered(value: Any) -> list[Any]:
    return gather_json(value) if dist.is_initialized() else [value]


def _profile(given: str) -> DeviceProfile:
    if given.endswith((".yaml", ".yml")):
        return read_profile(Path(given))
    profiles = load_profiles()
    if given not in profiles:
        raise ClusterError(
            f"profiles: there is no profile {given}; choose one of {', '.join(profiles)}, or give a YAML file's path."
        )
    return profiles[given]
