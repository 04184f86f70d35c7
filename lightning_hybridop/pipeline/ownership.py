"""Trainable parameters and their optimizer state over all stages: who owns what, and putting it together."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybridop.pipeline.anatomy import Anatomy, CutError
from lightning_hybridop.pipeline.exchange import gather_nested
from lightning_hybridop.pipeline.stage import adapter_parameters, parameter_owner


def owned_parameters(
    module: nn.Module, anatomy: Anatomy, boundaries: tuple[int, ...]
) -> tuple[dict[str, nn.Parameter], ...]:
    """Return every stage's trainable parameters by name; `boundaries` are the stages' `last` block numbers."""
    stages: tuple[dict[str, nn.Parameter], ...] = tuple({} for _ in boundaries)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            stages[parameter_owner(anatomy, name, boundaries)][name] = parameter
    return stages


def frozen_adapters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter parameters of peft layers that are not trained, by name."""
    adapters = {id(parameter) for parameter in adapter_parameters(module)}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if id(parameter) in adapters and not parameter.requires_grad and not parameter.is_meta
    }


def check_updated_once(module: nn.Module, anatomy: Anatomy, boundaries: tuple[int, ...]) -> None:
    """Check that no trainable parameter of the whole model would be updated by two stages.

    Raises:
        CutError: one is shared between stages, as a tied embedding and head are.
    """
    owners: dict[int, tuple[int, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        stage = parameter_owner(anatomy, name, boundaries)
        first_stage, first_name = owners.setdefault(id(parameter), (stage, name))
        if first_stage != stage:
            raise CutError(
                f"{first_name} (stage {first_stage}) and {name} (stage {stage}) are one trainable tensor, which two "
                "stages cannot both update; freeze it, or train with a single stage."
            )


@contextmanager
def parameters_kept() -> Iterator[None]:
    """Inside the block a module that is moved to another device keeps its parameter objects, whatever the device.

    Torch gives a module new ones for devices that are not its own, such as NPUs; who holds the old ones, as an optimizer
    or an engine does, would go on with values that nobody computes with.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def synchronise(owned: Sequence[Mapping[str, nn.Parameter]], rank_of_stage: Sequence[int]) -> None:
    """Copy every stage's trainable parameters to all ranks, in place. Collective."""
    for stage, parameters in enumerate(owned):
        for dtype in sorted({parameter.dtype for parameter in parameters.values()}, key=str):
            group = [parameter for parameter in parameters.values() if parameter.dtype == dtype]
            flat = torch.cat([parameter.detach().reshape(-1).cpu() for parameter in group])
            # As bytes: Gloo's collectives know neither bfloat16 nor int16.
            dist.broadcast(flat.view(torch.uint8), rank_of_stage[stage])
            offset = 0
            for parameter in group:
                part = flat[offset : offset + parameter.numel()].view_as(parameter)
                parameter.data.copy_(part)
                offset += parameter.numel()


def merge_optimizer_state(
    state_dict: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    owned: Sequence[Mapping[str, nn.Parameter]],
    rank_of_stage: Sequence[int],
) -> dict[str, Any]:
    """Return `state_dict` with each parameter's state taken from the rank that updates it. Collective.

    Every rank's optimizer lists all trainable parameters in the same order, so the result is what one process with
    the unsplit model would save.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    owner = {id(parameter): stage for stage, named in enumerate(owned) for parameter in named.values()}
    ranks = [rank_of_stage[owner.get(id(parameter), 0)] for parameter in parameters]
    mine = {
        i: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
        for i, state in state_dict["state"].items()
        if ranks[i] == dist.get_rank()
    }
    merged: dict[int, Any] = {}
    for states in gather_nested(mine):
        merged |= states
    return {**state_dict, "state": dict(sorted(merged.items()))}


def forget_absent_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Drop the state of parameters on `meta`: some optimizers (Adagrad) make it before there is any gradient."""
    for parameter in [parameter for parameter in optimizer.state if parameter.is_meta]:
        del optimizer.state[parameter]


def frozen_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the frozen floating-point weights of a stage; what is trained and what is an adapter's keeps its dtype.

    An adapter's frozen weights, and those of adapters that are not active, are written to folders as they were read.
    """
    adapters = {id(parameter) for parameter in adapter_parameters(module)}
    for parameter in module.parameters():
        if not (parameter.requires_grad or id(parameter) in adapters) and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def block_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype that a block computes in: that of its first floating-point weight."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
