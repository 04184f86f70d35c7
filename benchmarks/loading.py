"""How much memory a stage takes while it is loaded, with weights read on demand and with the whole model read first.

    python benchmarks/loading.py [--lasts 10 20 30] [--width 512] [--output outputs/benchmarks]

Saves a random Llama of 30 blocks in several shards, then starts one process per stage with the real strategy and Gloo,
once for each way of loading and each pair of stored and wanted dtype. A stage's peak is that of its resident memory,
files mapped into it included, from the start of `configure_model` to the end of the Trainer's setup and one touch of
every weight (transformers maps weights that need no cast, so they are read when they are used first), less what was
resident before, after all imports. Prints a table with the ratio of that peak to the stage's own weights; writes
loading.csv. Linux only: the peak is reset and read through /proc.
"""

import argparse
import csv
import dataclasses
import multiprocessing
import os
import socket
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_hybridop import HybridOPStrategy, Plan, Stage
from lightning_hybridop.modules.lean_loading import load_on_demand
from lightning_hybridop.modules.progress import without_progress_bars

MEBIBYTE = 2**20
VOCABULARY = 16_000
LOADING = ("on demand", "whole model")
DTYPES = (("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"))
"""As stored and as wanted by the plan."""
PAGE = 1024
"""Elements, of which at least one is in every page of memory."""
TARGET = 1.3
"""What a middle stage may take at most, in multiples of its own weights."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One stage: bytes of its own weights, bytes at the peak of its loading, seconds until its weights are there."""

    loading: str
    stored: str
    dtype: str
    stage: int
    blocks: str
    own_bytes: int
    peak_bytes: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Return the peak in multiples of the stage's own weights."""
        return self.peak_bytes / self.own_bytes


class Module(lightning.LightningModule):
    """A language model with LoRA that is loaded in `configure_model`."""

    def __init__(self, folder: str, loading: str) -> None:
        super().__init__()
        self.folder, self.loading = folder, loading
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        """Load, noting what is resident before."""
        if self.model is not None:
            return
        self.before = resident("VmRSS")
        forget_peak()
        self.started = time.perf_counter()
        if self.loading == LOADING[0]:
            model = load_on_demand(self.folder)
        else:
            with without_progress_bars():
                model = LlamaForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of a few tokens."""
        assert self.model is not None
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return a plain optimizer."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Measure(Callback):
    """Takes the figures when the Trainer's setup is over and the weights have been touched."""

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Read the peak; count what lies in memory."""
        assert isinstance(pl_module, Module)
        tensors = (*pl_module.parameters(), *pl_module.buffers())
        for tensor in tensors:
            tensor.detach().flatten()[::PAGE].sum()
        self.seconds = time.perf_counter() - pl_module.started
        self.peak = resident("VmHWM") - pl_module.before
        self.own = sum(tensor.nbytes for tensor in tensors)


def main() -> None:
    """Save, measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lasts", type=int, nargs="+", default=[10, 20, 30], help="last block of each stage")
    parser.add_argument("--width", type=int, default=512, help="size of the hidden state")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args()
    console = Console(width=110)
    loaded = []
    for stored, dtype in DTYPES:
        with tempfile.TemporaryDirectory() as folder:
            save(folder, blocks=options.lasts[-1], width=options.width, dtype=stored)
            shards = [file.stat().st_size for file in Path(folder).glob("*.safetensors")]
            console.print(f"{sum(shards) / MEBIBYTE:.0f} MiB of {stored} weights in {len(shards)} files")
            for loading in LOADING:
                loaded += stages(folder, plan(options.lasts, dtype), loading, stored)
    console.print(table(loaded))
    options.output.mkdir(parents=True, exist_ok=True)
    write(options.output / "loading.csv", loaded)


def save(folder: str, *, blocks: int, width: int, dtype: str) -> None:
    """Write the model and forget it."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=blocks,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
    )
    with without_progress_bars():
        LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="60MB")


def plan(lasts: list[int], dtype: str) -> Plan:
    """Return a plan of bp stages in one dtype."""
    stages = tuple(
        Stage(first=first, last=last, dtype=dtype) for first, last in zip((0, *lasts), lasts, strict=False)
    )
    return Plan(blocks=lasts[-1], stages=stages, micro_batches=1)


def stages(folder: str, strategy_plan: Plan, loading: str, stored: str) -> list[Loaded]:
    """Return what each stage of one run took, all stages running beside each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Spawned: a process must not start with what this one has in memory.
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    processes = [
        context.Process(target=stage, args=(answers, rank, port, folder, strategy_plan, loading, stored))
        for rank in range(len(strategy_plan.stages))
    ]
    for process in processes:
        process.start()
    results = [answers.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    return sorted(results, key=lambda result: result.stage)


def stage(
    answers: Any, rank: int, port: int, folder: str, strategy_plan: Plan, loading: str, stored: str
) -> None:
    """Load one stage in this process, as torchrun would start it, and answer with its figures."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(len(strategy_plan.stages)),
        LOCAL_WORLD_SIZE=str(len(strategy_plan.stages)),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="loading",
    )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    measure = Measure()
    trainer = lightning.Trainer(
        strategy=HybridOPStrategy(plan=strategy_plan),
        accelerator="cpu",
        devices=len(strategy_plan.stages),
        callbacks=[measure],
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(folder, loading), DataLoader(torch.arange(8).view(2, 4), batch_size=2))
    here = strategy_plan.stages[rank]
    answers.put(
        Loaded(
            loading=loading,
            stored=stored,
            dtype=str(here.dtype),
            stage=rank,
            blocks=f"{here.first} to {here.last - 1}",
            own_bytes=measure.own,
            peak_bytes=measure.peak,
            seconds=measure.seconds,
        )
    )


def resident(field: str) -> int:
    """Return this process's resident memory in bytes: `VmRSS` now, `VmHWM` at its peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))


def forget_peak() -> None:
    """Let the peak start from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def table(loaded: list[Loaded]) -> Table:
    """Return both ways side by side."""
    figures = [f"{figure}\n{way}" for figure in ("peak MiB", "ratio", "s") for way in LOADING]
    found = Table(title="Peak memory of a stage while it is loaded")
    for column in ("stored", "wanted", "stage", "own MiB", *figures):
        found.add_column(column, justify="right")
    by_case: dict[tuple[str, str, int], dict[str, Loaded]] = {}
    for result in loaded:
        by_case.setdefault((result.stored, result.dtype, result.stage), {})[result.loading] = result
    for ways in by_case.values():
        both = [ways[way] for way in LOADING]
        found.add_row(
            both[0].stored,
            both[0].dtype,
            f"{both[0].stage} ({both[0].blocks})",
            f"{both[0].own_bytes / MEBIBYTE:.0f}",
            *(f"{result.peak_bytes / MEBIBYTE:.0f}" for result in both),
            *(f"{result.ratio:.2f}" for result in both),
            *(f"{result.seconds:.1f}" for result in both),
        )
    middle = [
        result.ratio
        for result in loaded
        if result.loading == LOADING[0] and 0 < result.stage < max(other.stage for other in loaded)
    ]
    if middle:
        found.caption = f"middle stages on demand: at most {max(middle):.2f}; to be at most {TARGET}"
    return found


def write(path: Path, loaded: list[Loaded]) -> None:
    """Write one row per stage and way."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(field.name for field in dataclasses.fields(Loaded)), "ratio"])
        for result in loaded:
            writer.writerow([*dataclasses.astuple(result), result.ratio])


if __name__ == "__main__":
    main()
