import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_hybridop.callbacks import PeakMemory, peak_memory_mib

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
]

Make = Callable[..., Any]


def run_fresh(code: str) -> list[float]:
    """Run `code`, which may call `peak()`, in a new small process and return the numbers that it prints."""
    source = (
        f"import resource, sys\nfrom pathlib import Path\nMIB = 2.0**20\n{inspect.getsource(peak_memory_mib)}"
    )
    program = f"{source}\npeak = peak_memory_mib\n{code}"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return [float(number) for number in output.stdout.split()]


def test_the_peak_stays_after_the_memory_is_given_back() -> None:
    before, after = run_fresh(
        "first = peak(); block = bytearray(b'x') * (200 * 2**20); del block; print(first, peak())"
    )
    assert after - before == pytest.approx(200, abs=2)


def test_a_process_does_not_inherit_the_peak_of_the_one_that_started_it() -> None:
    block = torch.ones(150 * 2**18)  # 150 MiB of float32, resident while the other process starts
    assert run_fresh("print(peak())")[0] < 100
    assert block.sum() > 0


def test_it_agrees_with_the_resident_set() -> None:
    resident = psutil.Process().memory_info().rss / 2**20
    assert peak_memory_mib() > 0.9 * resident


def test_a_plain_strategy_has_one_peak(trainer: Make, loader: Make, line: LightningModule) -> None:
    callback = PeakMemory()
    trainer(callbacks=[callback]).fit(line, loader(2, 2))
    assert callback.per_stage_mib is not None
    assert len(callback.per_stage_mib) == 1


def test_without_proc_the_operating_system_s_own_figure_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert peak_memory_mib() > 0.9 * psutil.Process().memory_info().rss / 2**20


def test_every_rank_gets_the_peaks_in_the_order_of_the_stages(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule
) -> None:
    strategy = pipeline([timeline(4)])
    strategy.stage_index = 1
    gathered: list[torch.Tensor] = []

    def all_gather(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        gathered.append(tensor)
        return torch.stack([tensor, torch.tensor([0, 7], dtype=tensor.dtype)])  # stage 0 runs on rank 1

    strategy.all_gather = all_gather
    callback = PeakMemory()
    assert callback.per_stage_mib is None
    trainer(strategy=strategy, callbacks=[callback]).fit(line, loader(2, 2))
    own = gathered[0][1].item()
    assert callback.per_stage_mib == (7, own)
    assert 0.8 * peak_memory_mib() < own <= peak_memory_mib()
