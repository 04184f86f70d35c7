"""Says what an interruption cost a run: noticing it, starting again, and the steps that were taken twice."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hybridop.pipeline.world import told_of_lost
from lightning_hybridop.strategy import HybridOPStrategy

FOLDER = "interruptions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """One process's note of a failure: the optimizer steps taken, when the last one ended, and when it failed.

    Times are seconds of the host's clock (`time.time()`).
    """

    step: int
    last_step_ended: float
    noticed: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTime:
    """Where the time of an interruption went, in seconds, and how many steps were taken again.

    `detection`: from the end of the last step until the failure was noticed. `restart`: until this process was started.
    `start_up`: until the run was begun. `planning`: the plan. `reload`: until the first step. `replay`: the steps.
    """

    reason: str
    detection: float
    restart: float
    start_up: float
    planning: float
    reload: float
    replay: float
    replayed_steps: int


class Recovery(Callback):
    """Notes a failure in `folder`, and after a restart measures what it cost until the run is where it was.

    Args:
        folder: the run's folder; the notes lie in `interruptions/` there, on each host those of its processes.
        planning: seconds that this start of the run spent on its plan.
    """

    def __init__(self, folder: str | Path, *, planning: float = 0.0) -> None:
        self.lost: LostTime | None = None
        """What the interruption before this start cost; None until the run has caught up."""
        self._folder = Path(folder) / FOLDER
        self._planning = planning
        self._begun = time.time()
        self._last_step_ended = self._begun
        self._first_step_began = self._begun
        self._steps_before = 0
        self._interruption: Interruption | None = None
        self._has_notes = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look up what was interrupted, if this run goes on from a checkpoint."""
        self._first_step_began = self._last_step_ended = time.time()
        self._steps_before = trainer.global_step
        if trainer.ckpt_path is not None:
            self._interruption = self._latest()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note when the step ended, and see whether the run has caught up."""
        self._last_step_ended = time.time()
        if self._has_notes:
            # All processes have read them by now; the next interruption is to be told from this one.
            self._has_notes = False
            for path in self._folder.glob("rank_*.json"):
                path.unlink(missing_ok=True)
        if self._interruption is not None and trainer.global_step >= self._interruption.step:
            self.lost = self._measured(self._interruption)
            self._interruption = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave a note of where the run was."""
        strategy = trainer.strategy
        first = strategy.first_failure(exception) if isinstance(strategy, HybridOPStrategy) else None
        note = Interruption(
            step=trainer.global_step,
            last_step_ended=self._last_step_ended,
            noticed=time.time(),
            reason=" ".join(told_of_lost(exception)) or str(first or type(exception).__name__),
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"rank_{trainer.global_rank}.json"
            self._has_notes = True
            path.write_text(json.dumps(asdict(note)), encoding="utf-8")
        except OSError:  # such as a full disk, which may be why the run fails
            return

    def _latest(self) -> Interruption | None:
        """Return the note of the latest interruption, of the process that had come furthest and noticed first."""
        notes: list[Interruption] = []
        for path in self._folder.glob("rank_*.json"):
            try:
                notes.append(Interruption(**json.loads(path.read_text(encoding="utf-8"))))
            except (ValueError, TypeError, OSError):  # written while the host went down
                continue
        return min(notes, key=lambda note: (-note.step, note.noticed), default=None)

    def _measured(self, interruption: Interruption) -> LostTime:
        started = psutil.Process(os.getpid()).create_time()
        replayed = interruption.step - self._steps_before
        return LostTime(
            reason=interruption.reason,
            detection=interruption.noticed - interruption.last_step_ended,
            restart=started - interruption.noticed,
            start_up=self._begun - started - self._planning,
            planning=self._planning,
            reload=self._first_step_began - self._begun,
            replay=self._last_step_ended - self._first_step_began if replayed > 0 else 0.0,
            replayed_steps=max(0, replayed),
        )
