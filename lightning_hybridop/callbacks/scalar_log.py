"""Logs the scalars from which zo stages learn, so that their parameters can be rebuilt from a checkpoint."""

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybridop.callbacks.pipeline import pipeline_strategy
from lightning_hybridop.estimation.scalar_log import (
    Mark,
    ScalarLogError,
    ScalarLogWriter,
    Start,
    StepSettings,
    Update,
)
from lightning_hybridop.pipeline.rebuilding import checksum, class_name
from lightning_hybridop.strategy import HybridOPStrategy

log = logging.getLogger(__name__)


class ScalarLog(Callback):
    """Write every direction's coefficient and every optimizer step of the zo stages to `path`, on rank 0.

    `hybridop rebuild` replays them from a checkpoint. Each checkpoint that is saved leaves checksums of the zo stages'
    parameters, by which it checks itself. A new run begins the file anew; one that goes on appends to it. Without zo
    stages, and with the adjoint estimator, there are no scalars, and nothing is written. A log that cannot be written
    does not end the run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stages: dict[int, tuple[str, ...]] = {}
        self._writer: ScalarLogWriter | None = None
        self._taken: list[int] = []
        self._marked: int | None = None
        self._written: StepSettings | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the log, or go on with it."""
        self._close()
        self._taken = []
        self._marked = None
        pipeline_strategy(trainer, self)
        strategy = trainer.strategy
        assert isinstance(strategy, HybridOPStrategy)
        self._written = strategy.zo_settings
        self._stages = strategy.gather_estimated_names()
        if not self._stages:
            log.info("ScalarLog writes nothing: no stage estimates its gradient.")
            return
        if not trainer.is_global_zero:
            return
        with strategy.whole_model():
            names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        optimizer = trainer.optimizers[0]
        start = Start(
            step=trainer.global_step,
            mini_batch=_mini_batches(trainer),
            optimizer=class_name(optimizer),
            groups=_names_by_group(optimizer, names),
            stages=self._stages,
        )
        seed, distribution = strategy.seed, strategy.distribution
        goes_on = trainer.global_step > 0
        try:
            try:
                writer = ScalarLogWriter(self.path, seed=seed, distribution=distribution, goes_on=goes_on)
            except ScalarLogError as error:
                self.path.replace(self.path.with_name(f"{self.path.name}.unusable"))
                rank_zero_warn(f"{error} It was put aside, and a new log begins here.")
                writer = ScalarLogWriter(self.path, seed=seed, distribution=distribution, goes_on=False)
            self._writer = writer
            writer.start(start)
        except OSError as error:
            self._stop(error)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Log the mini-batch: its number is still the one that its directions were drawn for."""
        strategy = trainer.strategy
        if self._writer is None or not isinstance(strategy, HybridOPStrategy):
            return
        result = strategy.last_result
        assert result is not None and result.estimate is not None
        number = _mini_batches(trainer)
        self._taken.append(number)
        self._try(self._writer.mini_batch, number, result.estimate.coefficients)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the optimizer step, if one was taken."""
        self._log_update(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Log a step behind which something else failed."""
        self._log_update(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Leave a mark: checksums of what is saved."""
        self._log_update(trainer)
        step = checkpoint["global_step"]
        if self._writer is None or step == self._marked:
            return
        # A callback that averages weights may have put the average in the place of what is trained.
        state = checkpoint.get("current_model_state", checkpoint["state_dict"])
        if not state.keys() >= {name for names in self._stages.values() for name in names}:
            return  # code of the user's has left some out
        checksums = {
            stage: checksum({name: state[name] for name in names}) for stage, names in self._stages.items()
        }
        self._marked = step
        self._try(self._writer.mark, Mark(step=step, checksums=checksums, stages=self._stages))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the log."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the log of a run that failed."""
        self._close()

    def _log_update(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        if self._writer is None or not isinstance(strategy, HybridOPStrategy):
            return
        settings = strategy.zo_settings
        if settings is None or settings is self._written:
            return
        self._written = settings
        update = Update(step=trainer.global_step, mini_batches=tuple(self._taken), settings=settings)
        self._taken = []
        self._try(self._writer.update, update)

    def _try(self, write: Any, *values: Any) -> None:
        try:
            write(*values)
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        """Go on without a log; what is incomplete at its end is cut off when the run is resumed."""
        rank_zero_warn(
            f"{self.path} can no longer be written ({error.strerror}); the run goes on without it."
        )
        self._close()

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError:  # it tries once more to write what it could not
                return


def _mini_batches(trainer: Trainer) -> int:
    """Return how many mini-batches the run has seen through."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return int(total.processed)


def _names_by_group(optimizer: Optimizer, names: dict[int, str]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(names[id(parameter)] for parameter in group["params"]) for group in optimizer.param_groups
    )
