"""Averages of weights that Lightning's callbacks keep: copies of the whole module, to be cut as the module is."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from lightning_hybridop.pipeline.ownership import synchronise
from lightning_hybridop.pipeline.stand_ins import StandIn
from lightning_hybridop.trainers import callbacks_of


def cut_averages(
    trainer: Trainer,
    *,
    cut: Callable[[nn.Module], object],
    owned: Sequence[Mapping[str, nn.Parameter]],
    stage: int,
    rank_of_stage: Sequence[int],
) -> None:
    """Cut the averages of the Trainer's callbacks as the module is, so that each stage averages its own weights.

    Asked for its state, an average answers with the trainable parameters of all stages under their ordinary names,
    which is collective; given a state, it takes what its stage owns.

    Args:
        trainer: with callbacks that have been set up.
        cut: cuts a copy of the unsplit module to this rank's stage.
        owned: the module's own trainable parameters of each stage.
        stage: this rank's stage.
        rank_of_stage: the rank of each stage.
    """
    for average, copy in _averages(trainer):
        if not any(isinstance(child, StandIn) for child in copy.modules()):
            cut(copy)
        mine = dict(copy.named_parameters())
        averaged = tuple(
            {
                name: mine[name]
                if i == stage
                else nn.Parameter(parameter.detach().clone(), requires_grad=False)
                for name, parameter in parameters.items()
            }
            for i, parameters in enumerate(owned)
        )
        prefix = "" if average is copy else "module."
        counter = getattr(average, "n_averaged", None)
        average.__dict__["load_state_dict"] = _loader(averaged[stage], prefix, counter)
        copy.__dict__["state_dict"] = _collector(averaged, rank_of_stage)


def complete_averages(checkpoint: dict[str, Any], module: nn.Module, trainer: Trainer) -> None:
    """Add frozen weights to the averages in a checkpoint, in place: callbacks load nothing less than a whole module."""
    complete = module.state_dict()
    if "averaging_state" in checkpoint:
        checkpoint["current_model_state"] = _filled(complete, checkpoint["current_model_state"])
        checkpoint["state_dict"] = {**complete, **checkpoint["state_dict"]}
    for callback in callbacks_of(trainer):
        state = checkpoint.get("callbacks", {}).get(callback.state_key)
        if (
            isinstance(callback, StochasticWeightAveraging)
            and state
            and state["average_model_state"] is not None
        ):
            state["average_model_state"] = {**complete, **state["average_model_state"]}


def _filled(complete: Mapping[str, Tensor], partial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: partial.get(name, value) for name, value in complete.items()}


def _averages(trainer: Trainer) -> list[tuple[nn.Module, nn.Module]]:
    """Return what callbacks ask for the state of an average, and the copy of the LightningModule inside it."""
    found: list[tuple[nn.Module, nn.Module]] = []
    for callback in callbacks_of(trainer):
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            found.append((callback._average_model, callback._average_model.module))
        elif isinstance(callback, StochasticWeightAveraging) and callback._average_model is not None:
            found.append((callback._average_model, callback._average_model))
    return found


def _collector(
    averaged: Sequence[Mapping[str, nn.Parameter]], rank_of_stage: Sequence[int]
) -> Callable[..., dict[str, Any]]:
    def state_dict(
        *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        synchronise(averaged, rank_of_stage)
        together = OrderedDict() if destination is None else destination
        for parameters in averaged:
            together.update({prefix + name: parameter.detach() for name, parameter in parameters.items()})
        return together

    return state_dict


def _loader(
    parameters: Mapping[str, nn.Parameter], prefix: str, counter: Tensor | None
) -> Callable[[Mapping[str, Tensor]], None]:
    @torch.no_grad()
    def load_state_dict(state: Mapping[str, Tensor], strict: bool = True) -> None:
        for name, parameter in parameters.items():
            parameter.copy_(state[prefix + name])
        if counter is not None and "n_averaged" in state:
            counter.copy_(state["n_averaged"])

    return load_state_dict
