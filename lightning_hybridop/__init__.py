"""Fine-tune language models over devices that back-propagate and devices that can only run forward, together.

Importing the package registers the strategy `"hybridop"` and the accelerators `"npu"` and `"hybridop"` with Lightning.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hybridop.accelerators import HybridOPAccelerator, NPUAccelerator, register
from lightning_hybridop.callbacks import AdapterCheckpoint, ComuTi, PipelineTrace
from lightning_hybridop.module import HybridOPMixin
from lightning_hybridop.planning.plan import Plan, PlanError, Stage, even_plan, load_plan, save_plan
from lightning_hybridop.strategy import HybridOPStrategy

__version__ = "0.1.0"

__all__ = [
    "AdapterCheckpoint",
    "ComuTi",
    "HybridOPAccelerator",
    "HybridOPMixin",
    "HybridOPStrategy",
    "NPUAccelerator",
    "PipelineTrace",
    "Plan",
    "PlanError",
    "Stage",
    "even_plan",
    "load_plan",
    "save_plan",
]

register()
if "hybridop" not in StrategyRegistry:
    StrategyRegistry.register(
        "hybridop", HybridOPStrategy, description="one pipeline of forward-only and back-propagating stages"
    )
