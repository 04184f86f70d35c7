"""What a pipeline cannot train, refused before anything is cut: what was found and what to do."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_hybridop.devices.host import device_name, has_bfloat16, is_forward_only
from lightning_hybridop.estimation.estimators import Directions
from lightning_hybridop.planning.plan import Estimator, Plan, Stage
from lightning_hybridop.trainers import callbacks_of


def refuse_scaled_losses(precision: Precision) -> None:
    """Raise ValueError for a precision that scales losses."""
    if isinstance(precision, MixedPrecision) and precision.precision == "16-mixed":
        raise ValueError(
            "precision='16-mixed' needs a loss scaler, which a pipeline with estimated gradients cannot share; "
            "pass precision='bf16-mixed' or '32-true'."
        )


def refuse_backward_on_npus(stage: Stage | None, estimator: Estimator, device: torch.device) -> None:
    """Raise ValueError for a stage that would back-propagate on a device that only runs forward.

    Without a stage, it is the whole model in one.
    """
    if not is_forward_only(device):
        return
    if stage is None or stage.role == "bp":
        which = "The only stage" if stage is None else f"The stage of blocks {stage.block_range}"
        raise ValueError(
            f"{which} has the role bp on {device}, but an NPU only runs forward; give it the role zo, or another device."
        )
    if stage.role == "zo" and estimator == "adjoint" and stage.executor == "torch":
        raise ValueError(
            f"The stage of blocks {stage.block_range} is to take exact adjoints by torch's backward on {device}, but an NPU "
            "only runs forward; use the estimator boundary or loss, or a runtime as the stage's executor."
        )


def refuse_bfloat16_on_npus(
    blocks: nn.Module, stage: Stage | None, *, device: torch.device, precision: Precision
) -> None:
    """Raise ValueError for a stage that would compute in bfloat16 on a device that does not have it.

    `blocks` holds the stage's own. Without a stage, which is then still to be found, they are those of the model.
    """
    if has_bfloat16(device):
        return
    which = "The stage" if stage is None else f"The stage of blocks {stage.block_range}"
    dtype = None if stage is None else stage.dtype
    found = None
    if dtype == "bfloat16":
        found = "has the dtype bfloat16"
    elif str(precision.precision).startswith("bf16"):
        found = f"would run with precision={precision.precision!r}"
    else:
        # What is trained keeps its dtype, whatever the stage's.
        held = [
            name
            for name, parameter in blocks.named_parameters()
            if parameter.dtype == torch.bfloat16 and (dtype is None or parameter.requires_grad)
        ]
        if held:
            found = f"holds {held[0]} in bfloat16"
    if found is not None:
        raise ValueError(
            f"{which} {found}, but {device_name(device)} ({device}) has no bfloat16; use float16 or float32 there, as the "
            "stage's dtype in the plan or when the model is loaded."
        )


def refuse_manual_optimization(trainer: Trainer, module: LightningModule) -> None:
    """Raise ValueError for a module that is to be fitted and steps its optimizer itself."""
    if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
        raise ValueError(
            "The module optimizes manually (automatic_optimization=False), but a pipelined step installs its own "
            "gradients; use automatic optimization, or a single stage."
        )


def refuse_compiled_modules(module: nn.Module) -> None:
    """Raise ValueError for a module that torch.compile made."""
    compiled = [name for name, child in module.named_modules() if hasattr(child, "_orig_mod")]
    if compiled:
        raise ValueError(
            f"{compiled[0] or type(module).__name__} is compiled, and a compiled model cannot be cut into stages; "
            "pass the module without torch.compile."
        )


def refuse_adapters_across_stages(module: nn.Module) -> None:
    """Raise ValueError for a peft adapter that changes what crosses a stage's boundary, or the loss."""
    for adapter, configuration in _adapters(module):
        kind = _kind(configuration)
        if getattr(configuration, "is_prompt_learning", False):
            raise ValueError(
                f"The adapter {adapter!r} is a {kind}, which gives the model virtual tokens that no stage's batch "
                "holds, so hidden states have other shapes than tokens; use an adapter inside the blocks, such as "
                "LoRA, or train with a single stage."
            )
        if kind == "ADALORA":
            raise ValueError(
                f"The adapter {adapter!r} is an ADALORA, which adds a term over the adapters of all blocks to the loss "
                "and ranks them against each other, while a stage holds only its own; use LoRA with a rank_pattern, "
                "or train with a single stage."
            )


def refuse_saved_copies_of_tied_weights(module: nn.Module) -> None:
    """Raise ValueError for peft's `modules_to_save` on a module whose weight is another module's as well.

    peft trains a copy, and the other module keeps the old weight: the two are tied no longer, and the folder of the
    adapter does not say so.
    """
    for name, wrapper in module.named_modules():
        original = getattr(wrapper, "original_module", None)
        if not isinstance(original, nn.Module) or not hasattr(wrapper, "modules_to_save"):
            continue
        weights = {id(parameter) for parameter in original.parameters()}
        for other, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in weights and not other.startswith(f"{name}."):
                raise ValueError(
                    f"modules_to_save trains a copy of {name}, whose weight is tied to {other}; leave it out of "
                    "modules_to_save, or untie the two (tie_word_embeddings=False)."
                )


def _adapters(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and configuration of every peft adapter in a module."""
    for child in module.modules():
        configurations = getattr(child, "peft_config", None)
        if isinstance(configurations, dict):
            yield from configurations.items()


def _kind(configuration: Any) -> str:
    kind = getattr(configuration, "peft_type", None)
    return str(getattr(kind, "value", kind))


def refuse_row_directions(plan: Plan, directions: Directions) -> None:
    """Refuse directions for single rows where only the loss of a whole micro-batch is known."""
    if directions != "row" or not plan.zo_stages or plan.estimator == "adjoint":
        return
    if plan.estimator == "loss":
        raise ValueError(
            "directions is 'row', but the estimator loss knows one loss per micro-batch; use estimator='boundary', or "
            "directions='microbatch'."
        )
    if plan.exit_queries:
        raise ValueError(
            f"directions is 'row' with exit_queries {plan.exit_queries}, but an early exit gives one loss per "
            "micro-batch; set exit_queries=0, or directions='microbatch'."
        )


def refuse_lone_pipelines(plan: Plan, *, measures_itself: bool, emulated: bool) -> None:
    """Refuse replicas of a pipeline that is planned by its own processes, or stands for other devices."""
    if plan.replicas == 1 or not (measures_itself or emulated):
        return
    what = "plan='auto' lays out" if measures_itself else "an emulation gives the times of"
    raise ValueError(
        f"replicas is {plan.replicas}, but {what} one pipeline; set replicas to 1, or pass a plan without it."
    )


def refuse_averages_on_runtimes(trainer: Trainer, plan: Plan) -> None:
    """Refuse weight averages where an inference runtime holds a stage's weights: there is nothing to average with."""
    on_runtime = next((i for i, stage in enumerate(plan.stages) if stage.executor != "torch"), None)
    averaging = (StochasticWeightAveraging, WeightAveraging)
    if on_runtime is not None and any(isinstance(callback, averaging) for callback in callbacks_of(trainer)):
        raise ValueError(
            f"A callback averages weights, but stage {on_runtime} runs on {plan.stages[on_runtime].executor}, which holds "
            "them itself; use executor=torch, or leave the callback out."
        )


def refuse_contradictions(plan: Plan, options: Mapping[str, Any]) -> None:
    """Refuse options beside a given plan that says otherwise; `options` are fields of a plan with their values.

    One that has its default value is taken as not given.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(Plan)} | {"wire": None}
    for name, value in options.items():
        own = getattr(plan, name)
        if value not in (own, defaults[name]):
            raise ValueError(
                f"{name} is {value!r}, but the given plan says {own!r}; change it in the plan, or leave it out."
            )
