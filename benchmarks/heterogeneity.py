"""A forward-only stage on an inference runtime beside a back-propagating stage on torch, for real on two cores.

    python benchmarks/heterogeneity.py [--steps 6] [--rows 8] [--length 64] [--output outputs/benchmarks]

Fine-tunes SmolLM2-135M (LoRA of rank 8 on q and v) on AG News in a pipeline of two processes of one thread each, the
first 15 blocks forward-only, beside one process with two threads that back-propagates through everything. Prints
samples/s, the ratio to one process, and the peak memory of the forward-only stage: while it trains, while it only
validates, and their ratio (Linux alone tells). The first two steps, in which graphs are compiled, do not count.
HYBRIDOP_DATA names the folder of the data (default: ../shared/data).
"""

import argparse
import csv
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from processes import run_ranks
from rich import box
from rich.console import Console
from rich.table import Table

LIMIT = 1800.0
BLOCKS, ZO_BLOCKS, MICRO_BATCHES = 30, 15, 4

# What computes on the first stage; None: there is one stage, in one process with two threads.
ARITHMETIC: dict[str, Mapping[str, Any] | None] = {
    "one process": None,
    "torch": {},
    "OpenVINO": {"executor": "openvino"},
    "OpenVINO bf16": {"executor": "openvino", "dtype": "bfloat16"},
    "OpenVINO int8": {"executor": "openvino", "weights": "int8"},
    "ONNX Runtime": {"executor": "onnxruntime"},
}
ESTIMATORS = ("boundary", "adjoint")


def main() -> int:
    """Run every combination and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--arithmetic", nargs="+", default=list(ARITHMETIC), choices=list(ARITHMETIC))
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args()
    console = Console()
    rows = []
    for name in options.arithmetic:
        for estimator in ESTIMATORS if ARITHMETIC[name] is not None else ("exact",):
            sizes = (options.rows, options.length, options.queries)
            measured = run_ranks(
                train, 1 if estimator == "exact" else 2, name, estimator, options.steps, *sizes, limit=LIMIT
            )
            # The adjoint's graph is another one, and not bounded by the forward's memory.
            idle = (
                run_ranks(train, 2, name, estimator, 0, *sizes, limit=LIMIT)["peak_mib"]
                if estimator == "boundary"
                else None
            )
            rows.append({"arithmetic": name, "estimator": estimator, **measured, "inference_mib": idle})
            console.print(rows[-1])
    report(console, rows)
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "heterogeneity.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return 0


def train(name: str, estimator: str, steps: int, rows: int, length: int, queries: int) -> dict[str, Any]:
    """Train for some steps, or only validate for 0, as one process of the pipeline; return what rank 0 measured.

    The first two steps, in which graphs are compiled, are not timed.
    """
    import logging
    import warnings

    import lightning
    import torch

    from lightning_hybridop import HybridOPStrategy, Plan, Stage
    from lightning_hybridop.data.agnews import AGNewsData
    from lightning_hybridop.modules.label_words import LabelWordClassifier

    arithmetic = ARITHMETIC[name]
    torch.set_num_threads(2 if arithmetic is None else 1)
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    lightning.seed_everything(0)
    stages = (
        (Stage(first=0, last=BLOCKS),)
        if arithmetic is None
        else (
            Stage(first=0, last=ZO_BLOCKS, role="zo", **arithmetic),
            Stage(first=ZO_BLOCKS, last=BLOCKS),
        )
    )
    plan = Plan(
        blocks=BLOCKS,
        stages=stages,
        micro_batches=MICRO_BATCHES,
        queries=queries,
        estimator="loss" if arithmetic is None else estimator,
    )
    ends: list[float] = []

    class Ends(lightning.Callback):
        """Notes when each step ends, and forgets the peak of memory behind the second one."""

        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.perf_counter())
            if len(ends) == 2:
                forget_peak()

        def on_validation_batch_end(self, *_: Any) -> None:
            self.on_train_batch_end()

    news = Path(os.environ.get("HYBRIDOP_DATA", "../shared/data")) / "ag_news"
    data = AGNewsData(
        train=news / "train_subset.csv",
        test=news / "test.csv",
        train_rows=rows * (steps + 2),
        held_out_rows=4 * rows,
        batch_size=rows,
        max_length=length,
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=HybridOPStrategy(plan, timeout=900),
        max_steps=steps + 2,
        max_epochs=-1,
        callbacks=[Ends()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0 if steps else 4,
    )
    module = LabelWordClassifier()
    if steps:
        trainer.fit(module, data)
    else:
        trainer.validate(module, data, verbose=False)
    seconds = ends[-1] - ends[1] if steps else 0.0
    return {
        "samples_per_second": round(rows * steps / seconds, 3) if steps else None,
        "peak_mib": round(peak_mib(), 1),
    }


def forget_peak() -> None:
    """Let the peak of this process's memory be what it is now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_mib() -> float:
    """Return the most memory that this process has had since, in MiB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def report(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one row per run."""
    table = Table(title="SmolLM2-135M on AG News, two cores", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("first stage", "estimator"):
        table.add_column(name, no_wrap=True)
    for name in ("samples/s", "x", "MiB", "inference", "x"):
        table.add_column(name, justify="right", no_wrap=True)
    alone = next((row for row in rows if row["estimator"] == "exact"), None)
    for row in rows:
        rate, idle = row["samples_per_second"], row["inference_mib"]
        table.add_row(
            row["arithmetic"],
            row["estimator"],
            f"{rate:.2f}",
            "" if alone is None else f"{rate / alone['samples_per_second']:.2f}",
            f"{row['peak_mib']:.0f}",
            "" if idle is None else f"{idle:.0f}",
            "" if idle is None else f"{row['peak_mib'] / idle:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
