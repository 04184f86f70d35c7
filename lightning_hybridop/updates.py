"""From a mini-batch's gradients to the optimizer's step: what a pipeline does there in Lightning's place."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybridop.assembly import Assembly, gather_in_order
from lightning_hybridop.estimation.scalar_log import Clipping, StepSettings
from lightning_hybridop.module import HybridOPMixin
from lightning_hybridop.pipeline.exchange import gather_numbers
from lightning_hybridop.pipeline.gradients import (
    clip_to_norm,
    clip_to_value,
    gradients_of_all_stages,
    install_gradients,
    scaled_learning_rates,
    square_of_norm,
)
from lightning_hybridop.planning.plan import Role
from lightning_hybridop.trainers import callbacks_of


class Updates:
    """Stands in the place of some methods of the precision plugin, through which Lightning updates parameters.

    Lightning zeroes gradients between the training step and backward, so those of the mini-batch wait in `stash`.

    Args:
        trainer: whose run this is.
        assembly: this process's part of the pipeline.
        rank_of_stage: the rank of each stage.
        hooks: the module's own decisions, None if it makes none.
        zo_lr_scale: factor on the learning rate of zo stages.
        whole_model: a context in which the module has all its blocks.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        assembly: Assembly,
        rank_of_stage: list[int],
        hooks: HybridOPMixin | None,
        zo_lr_scale: float,
        whole_model: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.stash: Mapping[str, Tensor] = {}
        self.zo_settings: StepSettings | None = None
        """How zo stages took the latest optimizer step; another object for each step, known on all ranks; None if they do not estimate."""
        self._trainer = trainer
        self._engine = assembly.engine
        self._owned = assembly.owned
        self._stages = assembly.engine.plan.stages
        self._role = self._stages[assembly.engine.stage].role
        self._rank_of_stage = rank_of_stage
        self._hooks = hooks
        self._zo_lr_scale = zo_lr_scale
        self._whole_model = whole_model
        self._plugin: Precision = trainer.precision_plugin
        self._methods: dict[str, Callable[..., Any]] = {
            "backward": self._install,
            "post_backward": self._after_backward,
            "clip_gradients": self._clip_by_role,
            "_after_closure": self._after_closure,
        }
        self._until_step_ends = ExitStack()
        plan = assembly.engine.plan
        self._estimates = bool(plan.zo_stages) and plan.estimator != "adjoint"
        self._zo_clippings: list[Clipping] = []
        self._zo_settings_of_step: StepSettings | None = None
        self._gradients_are_watched = any(gather_in_order(_watches_gradients(trainer), rank_of_stage))

    def attach(self) -> None:
        """Take the plugin's methods over."""
        for name, replacement in self._methods.items():
            setattr(self._plugin, name, replacement)

    def detach(self) -> None:
        """Give the plugin its methods back."""
        for name in self._methods:
            self._plugin.__dict__.pop(name, None)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside the block the optimizer steps, by learning rates that are this role's from the closure's end on."""
        self._zo_clippings = []
        with ExitStack() as self._until_step_ends:
            yield
        self.zo_settings = self._zo_settings_of_step

    def _install(self, *_: Any, **__: Any) -> None:
        """Install the stashed gradients: the pipeline has back-propagated already."""
        install_gradients(self._engine.parameters, self.stash, share=self._share)
        self.stash = {}

    @property
    def _share(self) -> float:
        return 1.0 / self._trainer.accumulate_grad_batches

    def _after_backward(self, closure_loss: Tensor, module: LightningModule) -> Tensor:
        """Run the hooks behind backward, which may look at gradients."""
        with self._watched_gradients():
            return type(self._plugin).post_backward(self._plugin, closure_loss, module)

    def _after_closure(self, model: LightningModule, optimizer: Steppable) -> None:
        """Run the hooks between backward and step, then scale the learning rates for the step alone."""
        with self._watched_gradients():
            type(self._plugin)._after_closure(self._plugin, model, optimizer)
        assert isinstance(optimizer, Optimizer)
        if self._estimates:
            self._zo_settings_of_step = self._settings_of_zo_stages(optimizer)
        scaled = scaled_learning_rates(optimizer, self._learning_rate_scale(self._role))
        self._until_step_ends.enter_context(scaled)

    @contextmanager
    def _watched_gradients(self) -> Iterator[None]:
        if not self._gradients_are_watched:
            yield
            return
        shared = gradients_of_all_stages(self._owned, self._engine.stage, self._rank_of_stage)
        with self._whole_model(), shared:
            yield

    def _learning_rate_scale(self, role: Role) -> float:
        chosen = self._hooks.learning_rate_scale(role) if self._hooks else None
        if chosen is not None:
            return chosen
        return self._zo_lr_scale if role == "zo" else 1.0

    def _settings_of_zo_stages(self, optimizer: Optimizer) -> StepSettings:
        """Return with what zo stages, of which this one need be none, are about to step."""
        scale = self._learning_rate_scale("zo")
        options = [
            {
                name: value
                for name, value in group.items()
                if name != "lr" and isinstance(value, (bool, int, float, tuple, type(None)))
            }
            for group in optimizer.param_groups
        ]
        return StepSettings(
            share=self._share,
            learning_rates=tuple(float(group.get("lr", 0.0) * scale) for group in optimizer.param_groups),
            options=json.dumps(options, default=float),
            clippings=tuple(self._zo_clippings),
        )

    def _clip_by_role(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip by value, or by the norm over all stages of this rank's role: estimates are far longer than gradients.

        With the adjoint estimator nothing is estimated, and stages of which nobody asks for another limit share a norm.
        """
        chosen = {stage.role: self._clipping_value(stage.role) for stage in self._stages}
        limits = {role: float(clip_val if own is None else own) for role, own in chosen.items()}
        if not any(limit > 0.0 for limit in limits.values()):
            return
        limit = limits[self._role]
        owned = {id(parameter) for parameter in self._owned[self._engine.stage].values()}
        gradients = [
            parameter.grad
            for parameter in self._plugin.main_params(optimizer)
            if parameter.grad is not None and id(parameter) in owned
        ]
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            if limits.get("zo", 0.0) > 0.0:
                self._zo_clippings.append(Clipping(algorithm="value", limit=limits["zo"]))
            if limit > 0.0:
                clip_to_value(gradients, limit=limit)
            return
        squares = gather_numbers([square_of_norm(gradients)], self._rank_of_stage)
        exact = self._engine.plan.estimator == "adjoint" and len(set(limits.values())) == 1
        norms = {
            role: math.fsum(
                square
                for (square,), stage in zip(squares, self._stages, strict=True)
                if exact or stage.role == role
            )
            ** 0.5
            for role in limits
        }
        if limits.get("zo", 0.0) > 0.0:
            self._zo_clippings.append(Clipping(algorithm="norm", limit=limits["zo"], norm=norms["zo"]))
        if limit > 0.0:
            clip_to_norm(gradients, limit=limit, norm=norms[self._role])

    def _clipping_value(self, role: Role) -> float | None:
        return self._hooks.gradient_clip_val(role) if self._hooks else None


def _watches_gradients(trainer: Trainer) -> bool:
    """Tell whether code of the user's looks at gradients, so that it has to see those of the whole model."""
    module = trainer.lightning_module
    hooks = ("on_after_backward", "on_before_optimizer_step")
    return is_overridden("configure_gradient_clipping", module) or any(
        is_overridden(hook, watcher) for hook in hooks for watcher in (module, *callbacks_of(trainer))
    )
