"""Fine-tunes a language model over the stages of a plan and shows what it learnt: `hybridop fit`.

Every process of the run calls `fit` with the same configuration. What comes out of it lies in one folder.
"""

import csv
import json
import logging
import math
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig
from rich.console import Console

from lightning_hybridop.callbacks import AdapterCheckpoint, ComuTi, Energy, PeakMemory, Recovery
from lightning_hybridop.commands.parts import factory, run_module, run_plan, run_strategy, trainer_options
from lightning_hybridop.commands.resuming import (
    AUTO,
    METRICS,
    SUMMARY,
    join_metrics,
    set_metrics_aside,
    whole_file,
)
from lightning_hybridop.planning.plan import save_plan
from lightning_hybridop.reporting import Change, lost_time_table, run_summary

AVERAGED_STEPS = 5

# What the modules log of held-out rows, and how the closing table calls it; other names are shown as they are.
SHOWN = {
    "val_loss": "held-out loss",
    "val_accuracy": "accuracy",
    "val_f1": "F1",
    "val_f1a": "F1a",
    "val_exact_match": "exact match",
}


def fit(config: DictConfig, folder: Path) -> None:
    """Run the configuration and write everything to `folder`; rank 0 prints the closing tables."""
    quieten()
    started = time.perf_counter()
    L.seed_everything(config.seed, workers=True, verbose=False)

    # The parts, each named by the configuration.
    plan = run_plan(config)
    planned = time.perf_counter() - started
    strategy = run_strategy(config, plan)
    data = factory(config.data)()
    module = run_module(config, plan)
    comu_ti = ComuTi()
    memory = PeakMemory()
    recovery = Recovery(folder, planning=planned)
    chosen = [factory(callback)() for callback in config.callbacks.values() if callback is not None]
    trainer = factory(config.trainer)(
        **trainer_options(config, plan),
        strategy=strategy,
        callbacks=[comu_ti, memory, recovery, TQDMProgressBar(), *chosen],
        logger=CSVLogger(folder, name="", version=""),
        default_root_dir=folder,
    )

    # The run itself, from its beginning or from where an earlier start of it has come to.
    goes_on = config.resume == AUTO and config.checkpoint is not None
    if config.resume == AUTO and trainer.is_global_zero:
        set_metrics_aside(folder, config.checkpoint.step if goes_on else 0)
    before = {} if goes_on else trainer.validate(module, data, verbose=False)[0]
    if trainer.is_global_zero:
        before = _kept(folder / "before.json", before)
    trainer.fit(module, data, ckpt_path=_checkpoint(config))
    if comu_ti.means is None:
        # All steps had been taken when the run was interrupted, and its training does not end a second time.
        for callback in chosen:
            if isinstance(callback, AdapterCheckpoint):
                callback.on_train_end(trainer, module)
    after = trainer.validate(module, data, verbose=False)[0]

    # What it came to.
    if not trainer.is_global_zero:
        return
    join_metrics(folder)
    plan = strategy.plan
    save_plan(plan, folder / "plan.yaml")
    first_loss, last_loss = training_losses(folder / METRICS)
    means = comu_ti.means
    summary = {
        "train_loss": {"first": first_loss, "last": last_loss, "averaged_steps": AVERAGED_STEPS},
        "before": before,
        "after": after,
        "steps": trainer.global_step,
        "samples_per_second": None if means is None else means.samples_per_second,
        "comu_ti": None if means is None else means.comu_ti,
        "comu_ti_per_stage": None if means is None else means.comu_ti_per_stage,
        "peak_memory_mib": memory.per_stage_mib,
        "sent_mib_per_mini_batch": strategy.sent_mib,
        "seconds": time.perf_counter() - started,
        "lost_time": None if recovery.lost is None else asdict(recovery.lost),
    }
    energy = next((callback.report for callback in chosen if isinstance(callback, Energy)), None)
    if energy is not None:
        summary["energy"] = asdict(energy)
    # Whole or not at all: by this file a run is known to have come to its end.
    with whole_file(folder / SUMMARY) as beside:
        beside.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    console = Console()
    console.print(
        run_summary(
            plan=plan,
            loss=Change(before=first_loss, after=last_loss),
            scores={
                SHOWN.get(name, name): Change(before=before.get(name), after=value)
                for name, value in after.items()
            },
            samples_per_second=None if means is None else means.samples_per_second,
            comu_ti=None if means is None else means.comu_ti_per_stage,
            peak_memory_mib=memory.per_stage_mib,
            sent_mib=strategy.sent_mib or None,
        )
    )
    if energy is not None:
        console.print(str(energy), soft_wrap=True, highlight=False)
    if recovery.lost is not None:
        console.print(lost_time_table(asdict(recovery.lost)))
    console.print(f"All files of this run: {folder}", soft_wrap=True, highlight=False)


def _checkpoint(config: DictConfig) -> str | None:
    """Return the checkpoint that the run begins with, None for a new one."""
    if config.resume != AUTO:
        path: str | None = config.resume
        return path
    return None if config.checkpoint is None else str(config.checkpoint.path)


def _kept(path: Path, measured: dict[str, float]) -> dict[str, float]:
    """Return what was measured before the first step: now, or when the run began and left it in a file."""
    if measured:
        path.write_text(json.dumps(measured) + "\n", encoding="utf-8")
    if not path.exists():  # the host that began the run is no longer part of it
        return {}
    kept: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def training_losses(metrics: Path) -> tuple[float, float]:
    """Return the training loss averaged over the first and over the last logged steps (one mini-batch is noisy)."""
    with metrics.open(encoding="utf-8", newline="") as file:
        losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row.get("train_loss")]
    if not losses:
        return math.nan, math.nan
    # Short runs: the first half against the second.
    steps = max(1, min(AVERAGED_STEPS, len(losses) // 2))
    return sum(losses[:steps]) / steps, sum(losses[-steps:]) / steps


def quieten() -> None:
    """Leave out notes on what this recipe chose on purpose and on what its user cannot change."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    # metrics.csv stands beside the run's other files.
    warnings.filterwarnings("ignore", "Experiment logs directory .* exists and is not empty")
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    # The texts are in memory, encoded.
    warnings.filterwarnings("ignore", ".*does not have many workers")
    # Lightning 2.6 calls what torch 2.13 has renamed.
    warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated")
    warnings.filterwarnings("ignore", ".*all_gather is deprecated")
