"""ONNX Runtime, here on the CPU or with another of its execution providers."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hybridop.pipeline.executors.executor import ExecutorError

_ERRORS_ONLY = 3


class ONNXRuntime:
    """Compiles with ONNX Runtime, in float32.

    `provider` is one of its execution providers; what that one cannot run stays on the CPU.
    """

    has_vjp = True

    def __init__(self, *, dtype: str = "float32", provider: str = "CPUExecutionProvider") -> None:
        if dtype != "float32":
            raise ExecutorError(
                f"executor=onnxruntime computes in float32, found dtype {dtype}; leave dtype out, or use executor=openvino."
            )
        self._onnxruntime = _imported()
        if provider not in self._onnxruntime.get_available_providers():
            raise ExecutorError(
                f"ONNX Runtime has no {provider} here, only {', '.join(self._onnxruntime.get_available_providers())}; use one "
                "of them."
            )
        self._provider = provider

    @property
    def description(self) -> str:
        """Runtime, version, device and precision."""
        return f"ONNX Runtime {self._onnxruntime.__version__} {self._provider}"

    def compile(self, path: Path, *, weights: Path, cache: Path) -> "_Compiled":
        """Compile the model in a file, anew in every process: that takes about as long as reading it."""
        options = self._onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = _ERRORS_ONLY
        # Other processes share the cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Weights of int8 are multiplied by float32: by default the hidden state would be rounded to int8 as well.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        try:
            session = self._onnxruntime.InferenceSession(str(path), options, providers=[self._provider])
        except Exception as error:  # the errors of ONNX Runtime have no common base but this
            raise ExecutorError(" ".join(str(error).split())) from error
        return _Compiled(session)


class _Compiled:
    def __init__(self, session: Any) -> None:
        self._session = session

    def __call__(self, inputs: Mapping[str, Tensor]) -> Sequence[Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        return [torch.from_numpy(array) for array in self._session.run(None, arrays)]


def _imported() -> Any:
    try:
        importlib.import_module("onnx")
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ExecutorError(
            f"executor=onnxruntime needs the package {error.name}, which is not installed; install lightning-hybridop[onnx]."
        ) from error
