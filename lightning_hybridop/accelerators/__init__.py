"""Accelerators for Lightning's Trainer: `"npu"` and `"hybridop"` (whatever this rank has)."""

from lightning.pytorch.accelerators import AcceleratorRegistry

from lightning_hybridop.accelerators.hybridop import HybridOPAccelerator, default_role
from lightning_hybridop.accelerators.npu import NPUAccelerator, npu_problem

__all__ = ["HybridOPAccelerator", "NPUAccelerator", "default_role", "npu_problem", "register"]


def register() -> None:
    """Make `Trainer(accelerator="npu")` and `Trainer(accelerator="hybridop")` work; calling it again does nothing."""
    for accelerator in (NPUAccelerator, HybridOPAccelerator):
        if accelerator.name() not in AcceleratorRegistry:
            accelerator.register_accelerators(AcceleratorRegistry)
