"""GPipe (Huang et al., 2019): all forwards, then all backwards."""

from lightning_hybridop.planning.costs import PipelineCosts
from lightning_hybridop.simulation.baselines.common import Baseline
from lightning_hybridop.simulation.baselines.even import even_pipeline


def gpipe(costs: PipelineCosts) -> Baseline:
    """Return GPipe over all devices, evenly split; each keeps the activations of all M micro-batches.

    Raises:
        BaselineError: a device cannot back-propagate, or there are fewer blocks than devices.
    """
    return even_pipeline(costs, "gpipe")
