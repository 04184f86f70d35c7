"""What a module author may want to decide: hooks of a LightningModule that HybridOPStrategy asks."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_hybridop.planning.plan import Role


class HybridOPMixin:
    """Mix into a LightningModule to override what the strategy otherwise decides for it.

    Every method has a working default, so override only what differs:
    `class MyModule(HybridOPMixin, LightningModule)`.
    """

    def micro_batch_weight(self, batch: Any) -> float | None:
        """Return how much a micro-batch counts in the mini-batch's loss, in any unit; None for the default.

        It must be what `training_step` averages its loss over. The default is the number of label tokens, else rows.
        """
        return None

    def early_exit_loss(self, batch: Any, *arguments: Any) -> Tensor | dict[str, Any]:
        """Return the loss of an early exit, given the arguments of `training_step`.

        The model skips every block behind the last zo stage meanwhile.
        """
        return self.training_step(batch, *arguments)  # type: ignore[attr-defined, no-any-return]

    def zo_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Yield the parameters, by name, that zo stages may perturb; by default every trainable one."""
        for name, parameter in self.named_parameters():  # type: ignore[attr-defined]
            if parameter.requires_grad:
                yield name, parameter

    def learning_rate_scale(self, role: Role) -> float | None:
        """Return the factor on the optimizer's learning rates for stages of `role`; None for the strategy's."""
        return None

    def gradient_clip_val(self, role: Role) -> float | None:
        """Return the clipping value for stages of `role`; None for the Trainer's `gradient_clip_val`."""
        return None
