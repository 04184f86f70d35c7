"""`plan="auto"`: the ranks measure themselves, one plans, all run its plan."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_hybridop import HybridOPStrategy, Plan
from lightning_hybridop.planning.plan import load_plan
from tests.distributed.harness import run_ranks
from tests.distributed.runs import quiet_trainer
from tests.tiny import TinyModule, TokenRows

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


def train(folder: Path, **strategy: Any) -> tuple[list[float], Plan, int]:
    """Return the losses of two mini-batches, the plan that ran, and this rank's stage."""
    os.environ["HYBRIDOP_CACHE"] = str(folder / "cache")
    # As under a launcher of Lightning's, which does not set it.
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    losses: list[float] = []

    class Module(TinyModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))

    own = HybridOPStrategy(**strategy)
    trainer = quiet_trainer(own, max_steps=2, default_root_dir=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Module(), DataLoader(TokenRows(16), batch_size=8))
    return losses, own.plan, own.stage_index


def measured_twice(folder: Path) -> Any:
    asked: dict[str, Any] = {"plan": "auto", "stages": 3, "zo_stages": 1, "mini_batch": (8, 7)}
    first = train(folder, **asked)
    files = {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*.yaml")}
    second = train(folder, **asked, micro_batches=None)
    kept = {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*.yaml")}
    return first, second, files.items() <= kept.items(), len(files), train(folder, plan=first[1])


def test_all_ranks_run_one_plan_that_is_saved_with_what_it_took(tmp_path: Path) -> None:
    results = run_ranks(measured_twice, 3, tmp_path)

    (losses, plan, _), (_, again, _), kept, files, (given_losses, _, _) = results[0]
    assert plan.blocks == 6
    assert [stage.role for stage in plan.stages] == ["zo", "bp", "bp"]
    assert plan.predicted is not None
    assert plan.measured is not None
    assert plan.predicted.iteration_seconds > 0
    assert len(plan.measured.memory_mib) == 3
    for first, _, _, _, (other_losses, _, _) in results:
        assert first[:2] == (losses, plan)
        # The plan itself, in the order of ranks, gives the same losses: which rank runs which stage changes nothing.
        assert other_losses == given_losses == losses
    assert sorted(first[2] for first, *_ in results) == [0, 1, 2]
    # All ranks are of one host, which kept one measurement, and read it the second time.
    assert files >= 1
    assert kept
    # No more at a time than there are cores: each process computes with one thread.
    beside = min(3, os.cpu_count() or 1)
    assert all(f"{beside}-beside" in path.name for path in (tmp_path / "cache" / "profiles").iterdir())
    assert again.micro_batches in (1, 2, 4, 8)
    saved = load_plan(tmp_path / "plan.yaml")
    assert saved == again
    assert saved.measured == again.measured
