"""An inference runtime: what compiles a model and runs it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

Compiled = Callable[[Mapping[str, Tensor]], Sequence[Tensor]]
"""Runs a compiled model: tensors by the names of its inputs, to its outputs in order."""


class Runtime(Protocol):
    """Compiles ONNX models for one device in one precision."""

    @property
    def description(self) -> str:
        """Runtime, version, device and precision; models compiled under another description are not mixed up."""
        ...

    @property
    def has_vjp(self) -> bool:
        """Whether it can run the graphs of vector-Jacobian products."""
        ...

    def compile(self, path: Path, *, weights: Path, cache: Path) -> Compiled:
        """Compile the model in a file, which reads its weights from another; what took long may be kept in a folder `cache`.

        Raises ExecutorError when the runtime cannot run it.
        """
        ...
