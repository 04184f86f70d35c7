"""PipeDream-Flush, also called 1F1B (Narayanan et al., 2021): one forward and one backward in turn."""

from lightning_hybridop.planning.costs import PipelineCosts
from lightning_hybridop.simulation.baselines.common import Baseline
from lightning_hybridop.simulation.baselines.even import even_pipeline


def one_forward_one_backward(costs: PipelineCosts) -> Baseline:
    """Return 1F1B over all devices, evenly split; a device keeps one micro-batch for itself and each device behind it.

    Raises:
        BaselineError: a device cannot back-propagate, or there are fewer blocks than devices.
    """
    return even_pipeline(costs, "1f1b")
