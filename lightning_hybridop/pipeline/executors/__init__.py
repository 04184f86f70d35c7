"""Executors: what does the arithmetic of a stage's blocks. Without one of these it is torch itself."""

from lightning_hybridop.pipeline.executors.executor import Executor, ExecutorError
from lightning_hybridop.pipeline.executors.installation import install, install_for

__all__ = ["Executor", "ExecutorError", "install", "install_for"]
