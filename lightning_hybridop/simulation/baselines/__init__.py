"""The methods that HybridOP is compared with: each a pure function from costs to a program."""

from collections.abc import Callable, Mapping

from lightning_hybridop.planning.costs import PipelineCosts
from lightning_hybridop.simulation.baselines.accpar import accpar
from lightning_hybridop.simulation.baselines.asteroid import asteroid
from lightning_hybridop.simulation.baselines.chimera import chimera
from lightning_hybridop.simulation.baselines.common import Baseline, BaselineError
from lightning_hybridop.simulation.baselines.dapple import dapple
from lightning_hybridop.simulation.baselines.gpipe import gpipe
from lightning_hybridop.simulation.baselines.hdp import hdp
from lightning_hybridop.simulation.baselines.hybridop_tail import hybridop_tail
from lightning_hybridop.simulation.baselines.one_forward_one_backward import one_forward_one_backward

BASELINES: Mapping[str, Callable[[PipelineCosts], Baseline]] = {
    "GPipe": gpipe,
    "1F1B": one_forward_one_backward,
    "Chimera": chimera,
    "AccPar": accpar,
    "HDP": hdp,
    "DAPPLE": dapple,
    "Asteroid": asteroid,
}
"""Every first-order method by the name that tables give it."""

__all__ = ["BASELINES", "Baseline", "BaselineError", "hybridop_tail"]
