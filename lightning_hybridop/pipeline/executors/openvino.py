"""OpenVINO: Intel's inference runtime, here on the CPU or on another of its devices."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_hybridop.pipeline.executors.executor import ExecutorError

# A compiled model is kept with its weights: up to so many bytes of them, above which compiling anew in each process, a
# matter of seconds on a CPU, is the lesser evil.
_MOST_KEPT = 512 * 2**20

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class OpenVINO:
    """Compiles with OpenVINO.

    `device` is one of OpenVINO's (CPU, NPU, GPU). `dtype` is the precision that is asked for; `precision` the one that the
    device really computes in, which is f32 on a CPU without instructions for the other.
    """

    has_vjp = True

    def __init__(self, *, dtype: str = "float32", device: str = "CPU") -> None:
        self._openvino = _imported()
        self._core: Any = self._openvino.Core()
        self._dtype = dtype
        self._device = device
        if device not in self._core.available_devices:
            raise ExecutorError(
                f"OpenVINO finds no device {device} here, only {', '.join(self._core.available_devices)}; use one of them."
            )
        self.precision = _PRECISIONS[dtype]

    @property
    def description(self) -> str:
        """Runtime, version, device and precision."""
        return f"OpenVINO {self._openvino.get_version()} {self._device} {_PRECISIONS[self._dtype]}"

    def compile(self, path: Path, *, weights: Path, cache: Path) -> "_Compiled":
        """Compile the model in a file; what was compiled is kept in the folder `cache`, unless its weights are large."""
        kept = self._device != "CPU" or weights.stat().st_size <= _MOST_KEPT
        options: dict[str, Any] = {
            "CACHE_DIR": str(cache) if kept else "",
            "CACHE_MODE": "OPTIMIZE_SPEED",
            "INFERENCE_PRECISION_HINT": _PRECISIONS[self._dtype],
            "PERFORMANCE_HINT": "LATENCY",
        }
        if self._device == "CPU":
            options["INFERENCE_NUM_THREADS"] = torch.get_num_threads()
            # Stages in several processes of a host would all be tied to its first core.
            options["ENABLE_CPU_PINNING"] = False
        try:
            compiled = self._core.compile_model(path, self._device, options)
        except RuntimeError as error:
            compiled = self._without_fusion(path, options, error)
        self.precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        return _Compiled(compiled)

    def _without_fusion(self, path: Path, options: dict[str, Any], error: RuntimeError) -> Any:
        """Compile a model that failed once more without fusing elementwise operators, where 2026.4 fails on some graphs."""
        if self._device == "CPU":
            try:
                return self._core.compile_model(path, self._device, {**options, "SNIPPETS_MODE": "DISABLE"})
            except RuntimeError:
                pass
        raise ExecutorError(_reason(error)) from error


class _Compiled:
    def __init__(self, compiled: Any) -> None:
        self._request = compiled.create_infer_request()
        self.from_cache = bool(compiled.get_property("LOADED_FROM_CACHE"))

    def __call__(self, inputs: Mapping[str, Tensor]) -> Sequence[Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        # The outputs are copied: the next call writes over the request's own.
        outputs = self._request.infer(arrays, share_inputs=True, share_outputs=False)
        return [torch.from_numpy(array) for array in outputs.values()]


def _imported() -> Any:
    try:
        importlib.import_module("onnx")
        return importlib.import_module("openvino")
    except ImportError as error:
        raise ExecutorError(
            f"executor=openvino needs the package {error.name}, which is not installed; install lightning-hybridop[openvino]."
        ) from error


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if not line.startswith("Exception from")), "no reason given"
    )
