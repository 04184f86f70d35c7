"""`hybridop rebuild`: what the forward-only stages of a run had learnt since a checkpoint, from the run's log of scalars."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybridop.checkpoints import check_whole, code_refused
from lightning_hybridop.commands.configuration import ConfigurationError, compose_runs
from lightning_hybridop.commands.resuming import whole_checkpoints, whole_file
from lightning_hybridop.estimation.scalar_log import ScalarLog, read_scalar_log
from lightning_hybridop.pipeline.rebuilding import RebuildError, estimated_between, rebuild
from lightning_hybridop.planning.fields import check_whole as check_whole_number
from lightning_hybridop.reporting.tables import rebuilt_table

LOG = "scalars.log"
REBUILT = "rebuilt.safetensors"


def rebuild_run(overrides: Sequence[str]) -> None:
    """Write the parameters of a run's zo stages as of a logged step to a safetensors file, and print what was checked."""
    run = compose_runs("rebuild", overrides)[0]
    config, folder = run.config, run.folder
    if config.step is not None:
        check_whole_number("step", config.step, 0, error=ConfigurationError)
    if not folder.is_dir():
        raise ConfigurationError(f"folder: there is no folder {folder}; pass that of a run.")
    log = read_scalar_log(folder / LOG)
    if not log.starts:
        raise RebuildError(f"{folder / LOG} holds no step.")
    target: int = log.last_step if config.step is None else config.step
    path = _checkpoint(config, folder, target)
    checkpoint = _load(path)
    parameters, optimizer = _restored(checkpoint, log, path)
    step = checkpoint["global_step"]
    names = estimated_between(log, from_step=step, to_step=target)
    rebuilt = rebuild(parameters, optimizer, log, from_step=step, to_step=target)
    _save(
        {name: parameters[name].detach().contiguous() for own in names.values() for name in own},
        folder / REBUILT,
        step=target,
    )
    console = Console()
    console.print(
        rebuilt_table(
            checkpoint_step=step,
            step=target,
            mini_batches=rebuilt.mini_batches,
            directions=rebuilt.directions,
            log_bytes=sum(log.bytes_of_steps[taken] for taken in range(step + 1, target + 1)),
            checked=rebuilt.checked,
        )
    )
    if log.torn:
        console.print(f"{LOG} ends in an incomplete record, which was left out.", highlight=False)
    console.print(f"{folder / REBUILT}", soft_wrap=True, highlight=False)


def _checkpoint(config: DictConfig, folder: Path, target: int) -> Path:
    if config.checkpoint is not None:
        return Path(str(config.checkpoint))
    earlier = [found for found in whole_checkpoints(folder) if found.step <= target]
    if not earlier:
        raise ConfigurationError(
            f"folder: {folder} has no checkpoint of step {target} or an earlier one; pass checkpoint=<file>."
        )
    return max(earlier, key=lambda found: found.step).path


def _load(path: Path) -> dict[str, Any]:
    check_whole(path)
    with code_refused(path):
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    needed = ("global_step", "state_dict", "optimizer_states")
    if not isinstance(loaded, dict) or not all(loaded.get(key) is not None for key in needed):
        raise ConfigurationError(
            f"checkpoint: {path} has no optimizer state; pass one that was saved without save_weights_only."
        )
    return loaded


def _restored(
    checkpoint: Mapping[str, Any], log: ScalarLog, path: Path
) -> tuple[dict[str, nn.Parameter], Optimizer]:
    """Return the trained parameters of a checkpoint by name, and their optimizer as it was."""
    start = next(
        (start for start in reversed(log.starts) if start.step <= checkpoint["global_step"]), log.starts[0]
    )
    # Where a callback averages weights, the average is in the other's place.
    state = checkpoint.get("current_model_state", checkpoint["state_dict"])
    names = [name for group in start.groups for name in group]
    absent = [name for name in names if name not in state]
    if absent:
        raise RebuildError(f"{path} lacks {absent[0]}, which the run trained; pass a checkpoint of that run.")
    parameters = {name: nn.Parameter(state[name].clone()) for name in names}
    groups = [{"params": [parameters[name] for name in group]} for group in start.groups]
    optimizer = _optimizer_class(start.optimizer)(groups)
    try:
        optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    except (ValueError, KeyError, IndexError) as error:
        raise RebuildError(
            f"The optimizer state in {path} is another optimizer's than the log's; pass a checkpoint of that run."
        ) from error
    return parameters, optimizer


def _optimizer_class(name: str) -> Any:
    """Return an optimizer of torch's own by its name, and nothing else that a log could name."""
    kind = getattr(torch.optim, name.rpartition(".")[2], None)
    if (
        not isinstance(kind, type)
        or not issubclass(kind, Optimizer)
        or kind in (Optimizer, torch.optim.LBFGS)
        or name != f"{kind.__module__}.{kind.__qualname__}"
    ):
        raise RebuildError(
            f"The run's optimizer is {name[:120]!r}, but this command knows those of torch alone; call "
            "lightning_hybridop.pipeline.rebuilding.rebuild with one of yours."
        )
    return kind


def _save(parameters: dict[str, Tensor], path: Path, *, step: int) -> None:
    """Write a file that appears whole or not at all."""
    with whole_file(path) as beside:
        save_file(parameters, beside, metadata={"step": str(step)})
