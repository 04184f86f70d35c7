"""What does it cost to send hidden states in fewer bytes? The same run with each wire format, on AG News.

    python benchmarks/wire.py [--wires float32 bfloat16 float16 int8] [--methods exact boundary] [--output outputs/benchmarks]

Fine-tunes SmolLM2-135M (float32, LoRA of rank 8 on q and v) in a pipeline of three processes of ten blocks each: all of
them back-propagating (exact), or the first two with the boundary estimator and directions of single rows (boundary).
Appends a row per run to wire.csv, leaves out runs that stand there already, and prints a table. HYBRIDOP_DATA names the
folder of the data (default: ../shared/data).
"""

import argparse
import csv
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

LIMIT = 3600.0
STAGES, BLOCKS = 3, 30
ROWS, LENGTH, STEPS, HELD_OUT = 8, 48, 40, 100
LEARNING_RATE = 1e-3
AVERAGED = 20

WIRES = ("float32", "bfloat16", "float16", "int8")
METHODS: dict[str, dict[str, Any]] = {
    "exact": {"zo_stages": 0},
    "boundary": {"zo_stages": 2, "estimator": "boundary", "queries": 3, "directions": "row"},
}
IDENTITY = ("method", "wire", "seed", "steps", "rows", "length")
"""The columns that tell one run from another."""


def main() -> int:
    """Run what is missing and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wires", nargs="+", default=list(WIRES), choices=list(WIRES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "wire.csv"
    console = Console()
    done = {tuple(row[name] for name in IDENTITY) for row in read(path)}
    for seed in options.seeds:
        for method in options.methods:
            for wire in options.wires:
                identity = (method, wire, seed, STEPS, ROWS, LENGTH)
                if tuple(map(str, identity)) in done:
                    continue
                figures = run_ranks(train, STAGES, method, wire, seed, limit=LIMIT)
                row = {**dict(zip(IDENTITY, identity, strict=True)), **figures}
                append(path, row)
                console.print(", ".join(f"{name} {value}" for name, value in row.items()))
    report(console, read(path))
    return 0


def train(method: str, wire: str, seed: int) -> dict[str, float]:
    """Train and validate as one of the processes; return the figures of the run."""
    import logging
    import time
    import warnings

    import lightning
    import torch

    from lightning_hybridop import HybridOPStrategy
    from lightning_hybridop.data.agnews import AGNewsData
    from lightning_hybridop.modules.label_words import LabelWordClassifier

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    lightning.seed_everything(seed)
    losses: list[float] = []

    class Losses(lightning.Callback):
        """Keeps the loss of every step."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            losses.append(float(trainer.callback_metrics["train_loss"]))

    news = Path(os.environ.get("HYBRIDOP_DATA", "../shared/data")) / "ag_news"
    data = AGNewsData(
        train=news / "train_subset.csv",
        test=news / "test.csv",
        train_rows=ROWS * STEPS,
        held_out_rows=HELD_OUT,
        batch_size=ROWS,
        max_length=LENGTH,
        seed=seed,
    )
    strategy = HybridOPStrategy(
        stages=STAGES,
        micro_batches=2,
        wire=None if wire == "float32" else wire,
        # The same perturbations for all, whatever size would suit each.
        epsilon=1e-2,
        seed=seed,
        timeout=900,
        **METHODS[method],
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    module = LabelWordClassifier(learning_rate=LEARNING_RATE)
    started = time.perf_counter()
    trainer.fit(module, data)
    seconds = time.perf_counter() - started
    trainer.limit_val_batches = 1.0
    (scores,) = trainer.validate(module, data, verbose=False)
    return {
        "sent_mib": round(sum(strategy.sent_mib), 4),
        "first_loss": round(losses[0], 5),
        "train_loss": round(statistics.fmean(losses[-AVERAGED:]), 4),
        "val_loss": round(scores["val_loss"], 4),
        "accuracy": round(scores["val_accuracy"], 4),
        "seconds_per_step": round(seconds / STEPS, 2),
    }


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
    """Print a table for each method, in order of wires; several seeds are averaged."""
    for method in METHODS:
        table = Table(
            title=f"{method}: {STEPS} steps of {ROWS} rows", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        table.add_column("wire")
        names = {
            "sent_mib": "MiB per mini-batch",
            "first_loss": "loss of step 1",
            "train_loss": f"mean of the last {AVERAGED}",
            "val_loss": "validation loss",
            "accuracy": "accuracy",
        }
        for name in names.values():
            table.add_column(name, justify="right", no_wrap=True)
        for wire in WIRES:
            runs = [row for row in rows if row["method"] == method and row["wire"] == wire]
            if runs:
                means = [statistics.fmean(float(run[name]) for run in runs) for name in names]
                table.add_row(wire, *(f"{mean:.4f}" for mean in means))
        if table.row_count:
            console.print(table)


if __name__ == "__main__":
    sys.exit(main())
