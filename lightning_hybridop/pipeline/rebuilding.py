"""The parameters of zo stages at a later step than a checkpoint's, from the scalars that were logged in between."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybridop.estimation.estimators import Estimate
from lightning_hybridop.estimation.scalar_log import Clipping, Coefficients, ScalarLog, StepSettings
from lightning_hybridop.pipeline.estimates import estimated_gradients
from lightning_hybridop.pipeline.gradients import clip_to_norm, clip_to_value, install_gradients
from lightning_hybridop.pipeline.raw_bytes import as_bytes

_CHECKSUM_BYTES = 16


class RebuildError(ValueError):
    """What was asked for cannot be rebuilt from a log, or came out as something else; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """What a replay came to; `checked` are the steps whose marks it met."""

    steps: int
    mini_batches: int
    directions: int
    checked: tuple[int, ...]


def checksum(parameters: Mapping[str, Tensor]) -> bytes:
    """Return 16 bytes that tell parameters apart by names, dtypes, shapes and bits."""
    digest = hashlib.blake2b(digest_size=_CHECKSUM_BYTES)
    for name in sorted(parameters):
        value = parameters[name]
        digest.update(repr((name, str(value.dtype), tuple(value.shape))).encode())
        digest.update(as_bytes(value).numpy().data)
    return digest.digest()


def class_name(optimizer: Optimizer) -> str:
    """Return the full name of an optimizer's class."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def estimated_between(log: ScalarLog, *, from_step: int, to_step: int) -> dict[int, tuple[str, ...]]:
    """Return by zo stage the names of the parameters that all steps behind `from_step` up to `to_step` estimated.

    Raises:
        RebuildError: the log begins later, has a gap, or the zo stages changed in between.
    """
    if to_step < from_step:
        raise RebuildError(f"Step {to_step} lies before the checkpoint's, {from_step}; take an earlier one.")
    in_force = [
        start for start in log.starts if start.step <= max(from_step, to_step - 1)
    ]  # one that begins at `to_step` has no part in it
    before = [start for start in in_force if start.step <= from_step]
    if not before:
        first = min((start.step for start in log.starts), default=None)
        raise RebuildError(
            "The log holds no step."
            if first is None
            else f"The log begins at step {first}; take a checkpoint of that step or a later one, not of step {from_step}."
        )
    missing = [step for step in range(from_step + 1, to_step + 1) if step not in log.updates]
    if missing:
        raise RebuildError(
            f"The log lacks step {missing[0]}, so step {to_step} cannot be rebuilt from step {from_step}; take a later "
            f"checkpoint or an earlier step."
        )
    names = _names(before[-1].stages)
    for later in in_force[len(before) :]:
        if _names(later.stages) != names:
            raise RebuildError(
                f"From step {later.step} on the run had other zo stages; take a checkpoint of that step or a later one."
            )
    return dict(in_force[-1].stages)


def rebuild(
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    log: ScalarLog,
    *,
    from_step: int,
    to_step: int,
) -> Rebuilt:
    """Take the optimizer steps behind `from_step` up to `to_step` again, in place, bit for bit as the zo stages did.

    Args:
        parameters: by name, as of `from_step`, at least those that the zo stages estimate.
        optimizer: over these (and others, which it leaves alone), in the groups of the run's, with the state of
            `from_step`. One that steps each parameter by itself, as those of torch but LBFGS.
        log: of the run.
        from_step: the optimizer step of the checkpoint.
        to_step: the last one to take.

    Raises:
        RebuildError: the log does not cover these steps, or a mark does not fit what came out.
    """
    stages = estimated_between(log, from_step=from_step, to_step=to_step)
    absent = sorted(name for names in stages.values() for name in names if name not in parameters)
    if absent:
        raise RebuildError(f"{absent[0]} is in the log but not in the checkpoint; take one of the same run.")
    own = {name: parameters[name] for names in stages.values() for name in names}
    checked = [from_step] if _meets_mark(parameters, log, from_step) else []
    count = directions = 0
    for step in range(from_step + 1, to_step + 1):
        update = log.updates[step]
        for parameter in own.values():
            parameter.grad = None
        for number in update.mini_batches:
            if number not in log.mini_batches:
                raise RebuildError(f"The log lacks mini-batch {number}, which step {step} took.")
            coefficients = log.mini_batches[number]
            install_gradients(own, _gradients(own, coefficients), share=update.settings.share)
            count += 1
            directions += len(coefficients)
        _clip(own, update.settings.clippings)
        _set_options(optimizer, update.settings, step=step)
        optimizer.step()
        if _meets_mark(own, log, step):
            checked.append(step)
    for parameter in own.values():
        parameter.grad = None
    return Rebuilt(
        steps=to_step - from_step, mini_batches=count, directions=directions, checked=tuple(checked)
    )


def _gradients(parameters: Mapping[str, nn.Parameter], coefficients: Coefficients) -> dict[str, Tensor]:
    estimate = Estimate(coefficients=coefficients, derivatives=(), dropped=0, largest_difference=0.0)
    return estimated_gradients(parameters, estimate)


def _clip(parameters: Mapping[str, nn.Parameter], clippings: Sequence[Clipping]) -> None:
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    for clipping in clippings:
        if clipping.algorithm == "norm":
            clip_to_norm(gradients, limit=clipping.limit, norm=clipping.norm)
        else:
            clip_to_value(gradients, limit=clipping.limit)


def _set_options(optimizer: Optimizer, settings: StepSettings, *, step: int) -> None:
    groups = optimizer.param_groups
    options: Any = json.loads(settings.options)
    if len(settings.learning_rates) != len(groups) or len(options) != len(groups):
        raise RebuildError(
            f"Step {step} was taken with {len(settings.learning_rates)} groups of parameters, the optimizer has {len(groups)}; "
            "give one as the run's."
        )
    for group, rate, others in zip(groups, settings.learning_rates, options, strict=True):
        group["lr"] = rate
        for name, value in others.items():
            if name in group and name != "params":
                group[name] = tuple(value) if isinstance(value, list) else value


def _meets_mark(parameters: Mapping[str, nn.Parameter], log: ScalarLog, step: int) -> bool:
    """Return whether there is a mark at a step, whose checksums the parameters have.

    Raises:
        RebuildError: they have others.
    """
    if step not in log.marks:
        return False
    mark = log.marks[step]
    for stage, names in mark.stages.items():
        if not parameters.keys() >= set(names):  # those of a plan that the run had before `from_step`
            return False
        if checksum({name: parameters[name] for name in names}) != mark.checksums[stage]:
            raise RebuildError(
                f"At step {step} the parameters of stage {stage} are not those that the run had; the checkpoint or the log is "
                "another run's, was changed, something else than the optimizer changed gradients or parameters, or this "
                "processor rounds in another way than the stage's."
            )
    return True


def _names(stages: Mapping[int, Sequence[str]]) -> frozenset[str]:
    return frozenset(name for names in stages.values() for name in names)
