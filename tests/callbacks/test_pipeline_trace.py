import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from lightning_hybridop.callbacks import PipelineTrace

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
]

Make = Callable[..., Any]


def comu_ti(folder: Path) -> float:
    """Return which mini-batch the trace in `folder` shows: its Comu_ti."""
    content = json.loads((folder / "timeline.json").read_text(encoding="utf-8"))
    return round(content["otherData"]["comu_ti"], 6)


def test_the_chosen_mini_batch_is_written_over_epochs(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule, tmp_path: Path
) -> None:
    gathers = [timeline(4), timeline(8)]
    strategy = pipeline(gathers)
    folder = tmp_path / "run"
    running = trainer(strategy=strategy, callbacks=[PipelineTrace(folder, step=3)], max_epochs=3)

    seen: list[tuple[int, bool]] = []
    gather = strategy.gather_timeline

    def spy() -> Any:
        seen.append((running.fit_loop.total_batch_idx, folder.exists()))
        return gather()

    strategy.gather_timeline = spy
    running.fit(line, loader(4, 2))  # two mini-batches an epoch
    assert seen == [(3, False)]
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert comu_ti(folder) == 0.3


def test_a_run_that_is_too_short_writes_its_last_mini_batch(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule, tmp_path: Path
) -> None:
    strategy = pipeline([timeline(8)])
    trainer(strategy=strategy, callbacks=[PipelineTrace(tmp_path, step=100)]).fit(line, loader(4, 2))
    assert strategy.gathered == 1
    assert comu_ti(tmp_path) == 0.5


def test_other_ranks_gather_and_write_nothing(
    trainer: Make, pipeline: Make, timeline: Make, loader: Make, line: LightningModule, tmp_path: Path
) -> None:
    strategy = pipeline([timeline(8)])
    strategy.rank_zero = False
    trainer(strategy=strategy, callbacks=[PipelineTrace(tmp_path / "run", step=0)]).fit(line, loader(4, 2))
    assert strategy.gathered == 1
    assert not (tmp_path / "run").exists()


def test_one_stage_without_peers_writes_nothing(
    trainer: Make, pipeline: Make, loader: Make, line: LightningModule, tmp_path: Path
) -> None:
    trainer(strategy=pipeline([()]), callbacks=[PipelineTrace(tmp_path / "run", step=0)]).fit(
        line, loader(4, 2)
    )
    assert not (tmp_path / "run").exists()


def test_what_would_fail_later_is_refused_before_training(
    trainer: Make,
    pipeline: Make,
    timeline: Make,
    loader: Make,
    line: LightningModule,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="step=-1"):
        PipelineTrace(tmp_path, step=-1)
    with pytest.raises(TypeError, match="PipelineTrace found the strategy SingleDeviceStrategy"):
        trainer(callbacks=[PipelineTrace(tmp_path)]).fit(line, loader(4, 2))

    def missing() -> None:
        raise ModuleNotFoundError("no matplotlib")

    monkeypatch.setattr("lightning_hybridop.callbacks.pipeline_trace.require_matplotlib", missing)
    strategy = pipeline([timeline(8)])
    with pytest.raises(ModuleNotFoundError, match="no matplotlib"):
        trainer(strategy=strategy, callbacks=[PipelineTrace(tmp_path)]).fit(line, loader(4, 2))
    assert strategy.gathered == 0
