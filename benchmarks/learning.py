"""Does it learn? Every estimator on the same data in the same order, beside exact gradients and a frozen head.

    python benchmarks/learning.py [--data agnews multirc] [--seeds 0 1 2] [--output outputs/benchmarks]

Fine-tunes SmolLM2-135M (LoRA of rank 8 on q and v) in a pipeline of two processes, its first 15 blocks on a stage that
learns by the method named, the last 15 on one that back-propagates. Appends a row per run to learning.csv, leaves out
runs that stand there already, and prints means over seeds. HYBRIDOP_DATA names the folder of the data (default:
../shared/data).
"""

import argparse
import csv
import dataclasses
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import run_ranks
from rich import box
from rich.console import Console
from rich.table import Table

LIMIT = 7200.0
BLOCKS, ZO_BLOCKS = 30, 15

IDENTITY = ("data", "method", "seed", "steps", "learning_rate")
"""The columns that tell one run from another."""

METHODS: dict[str, dict[str, Any]] = {
    "exact": {"role": "bp"},
    "frozen": {"role": "frozen"},
    "adjoint": {"estimator": "adjoint"},
    "loss Q=3": {"queries": 3},
    "loss Q=12": {"queries": 12},
    "boundary, rows Q=3": {"estimator": "boundary", "queries": 3, "directions": "row"},
    "boundary, rows Q=12": {"estimator": "boundary", "queries": 12, "directions": "row"},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A data set and how much of it: rows per mini-batch, tokens per row, steps, held-out rows or questions."""

    rows: int
    length: int
    steps: int
    held_out: int


TASKS = {
    "agnews": Task(rows=4, length=48, steps=40, held_out=100),
    "multirc": Task(rows=4, length=100, steps=16, held_out=12),
}


def main() -> int:
    """Run what is missing and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "learning.csv"
    console = Console()
    done = {tuple(row[name] for name in IDENTITY) for row in read(path)}
    for seed in options.seeds:
        for data in options.data:
            for method in options.methods:
                identity = (data, method, seed, TASKS[data].steps, options.learning_rate)
                if tuple(map(str, identity)) in done:
                    continue
                figures = run_ranks(train, 2, data, method, seed, options.learning_rate, limit=LIMIT)
                row = {**dict(zip(IDENTITY, identity, strict=True)), **figures}
                append(path, row)
                console.print(", ".join(f"{name} {value}" for name, value in row.items()))
    report(console, read(path))
    return 0


def train(data: str, method: str, seed: int, learning_rate: float) -> dict[str, float]:
    """Train and validate as one of two processes; return the figures of the run."""
    import logging
    import time
    import warnings

    import lightning
    import torch

    from lightning_hybridop import HybridOPStrategy, Plan, Stage

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    lightning.seed_everything(seed)
    task = TASKS[data]
    settings = dict(METHODS[method])
    role = settings.pop("role", "zo")
    plan = Plan(
        blocks=BLOCKS,
        stages=(Stage(first=0, last=ZO_BLOCKS, role=role), Stage(first=ZO_BLOCKS, last=BLOCKS)),
        micro_batches=2,
        queries=settings.pop("queries", 1),
        estimator=settings.pop("estimator", "loss"),
    )
    losses: list[float] = []

    class Losses(lightning.Callback):
        """Keeps the loss of every step."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            losses.append(float(trainer.callback_metrics["train_loss"]))

    module, datamodule = parts(data, task, seed, learning_rate)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=HybridOPStrategy(plan, seed=seed, timeout=900, **settings),
        max_steps=task.steps,
        max_epochs=-1,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    started = time.perf_counter()
    trainer.fit(module, datamodule)
    seconds = time.perf_counter() - started
    trainer.limit_val_batches = 1.0
    (scores,) = trainer.validate(module, datamodule, verbose=False)
    return {
        "train_loss": round(statistics.fmean(losses[len(losses) // 2 :]), 4),
        "val_loss": round(scores["val_loss"], 4),
        "accuracy": round(scores["val_accuracy"], 4),
        "f1": round(scores.get("val_f1a", scores["val_f1"]), 4),
        "seconds_per_step": round(seconds / task.steps, 2),
    }


def parts(data: str, task: Task, seed: int, learning_rate: float) -> tuple[Any, Any]:
    """Return the module and the data of a task."""
    from lightning_hybridop.data.agnews import AGNewsData
    from lightning_hybridop.data.multirc import LABEL_WORDS, MultiRCData
    from lightning_hybridop.modules.label_words import LabelWordClassifier

    folder = Path(os.environ.get("HYBRIDOP_DATA", "../shared/data"))
    if data == "agnews":
        news = folder / "ag_news"
        return LabelWordClassifier(learning_rate=learning_rate), AGNewsData(
            train=news / "train_subset.csv",
            test=news / "test.csv",
            train_rows=task.rows * task.steps,
            held_out_rows=task.held_out,
            batch_size=task.rows,
            max_length=task.length,
            seed=seed,
        )
    module = LabelWordClassifier(learning_rate=learning_rate, label_words=LABEL_WORDS, per_question=True)
    questions = folder / "multirc"
    return module, MultiRCData(
        train=questions / "train.jsonl",
        test=questions / "val.jsonl",
        train_rows=task.rows * task.steps,
        held_out_questions=task.held_out,
        batch_size=task.rows,
        max_length=task.length,
        seed=seed,
    )


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows that earlier runs have written."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, row: dict[str, Any]) -> None:
    """Write one more row."""
    is_new = not path.is_file()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def report(console: Console, rows: Sequence[dict[str, str]]) -> None:
    """Print means over seeds, with the largest distance of a seed from its mean."""
    for data in dict.fromkeys(row["data"] for row in rows):
        task = TASKS[data]
        table = Table(
            title=f"{data}: {task.steps} steps of {task.rows} rows", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        table.add_column("first 15 blocks")
        for name in ("seeds", "training loss", "validation loss", "accuracy", "F1"):
            table.add_column(name, justify="right", no_wrap=True)
        for method in METHODS:
            runs = [row for row in rows if row["data"] == data and row["method"] == method]
            if runs:
                columns = ("train_loss", "val_loss", "accuracy", "f1")
                table.add_row(
                    method, str(len(runs)), *(spread([float(run[name]) for run in runs]) for name in columns)
                )
        console.print(table)


def spread(values: Sequence[float]) -> str:
    """Return a mean and how far a value lies from it at most."""
    mean = statistics.fmean(values)
    return f"{mean:.3f} ± {max(abs(value - mean) for value in values):.3f}"


if __name__ == "__main__":
    sys.exit(main())
