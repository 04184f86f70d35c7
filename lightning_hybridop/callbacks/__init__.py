"""Callbacks for Lightning's Trainer that look into a pipeline and write what it learnt."""

from lightning_hybridop.callbacks.adapter_checkpoint import AdapterCheckpoint
from lightning_hybridop.callbacks.comu_ti import ComuTi, RunMeans
from lightning_hybridop.callbacks.energy import Energy, EnergyReport
from lightning_hybridop.callbacks.peak_memory import PeakMemory
from lightning_hybridop.callbacks.pipeline_trace import PipelineTrace
from lightning_hybridop.callbacks.recovery import LostTime, Recovery
from lightning_hybridop.callbacks.scalar_log import ScalarLog
from lightning_hybridop.pipeline.measured import peak_memory_mib

__all__ = [
    "AdapterCheckpoint",
    "ComuTi",
    "Energy",
    "EnergyReport",
    "LostTime",
    "PeakMemory",
    "PipelineTrace",
    "Recovery",
    "RunMeans",
    "ScalarLog",
    "peak_memory_mib",
]
