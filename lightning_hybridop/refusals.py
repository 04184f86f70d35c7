"""What a pipeline cannot train, refused before anything is cut: what was found and what to do."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_hybridop.estimation.estimators import Directions
from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.trainers import callbacks_of


def refuse_scaled_losses(precision: Precision) -> None:
    """Raise ValueError for a precision that scales losses."""
    if isinstance(precision, MixedPrecision) and precision.precision == "16-mixed":
        raise ValueError(
            "precision='16-mixed' needs a loss scaler, which a pipeline with estimated gradients cannot share; "
            "pass precision='bf16-mixed' or '32-true'."
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
