"""An executor on an inference runtime: traces the blocks once for each shape, compiles and runs the graph."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lightning_hybridop.pipeline.executors.arguments import BatchTensors
from lightning_hybridop.pipeline.executors.buckets import bucket, padded
from lightning_hybridop.pipeline.executors.cache import key_of
from lightning_hybridop.pipeline.executors.executor import ExecutorError
from lightning_hybridop.pipeline.executors.onnx_model import onnx_model
from lightning_hybridop.pipeline.executors.padding import padding_is_harmless
from lightning_hybridop.pipeline.executors.runtime import Compiled, Runtime
from lightning_hybridop.pipeline.executors.stage_blocks import StageBlocks
from lightning_hybridop.pipeline.executors.tracing import trace
from lightning_hybridop.pipeline.executors.weights_file import write_whole

MOST_COMPILED = 16
"""Graphs that are kept in memory, each with a copy of the weights; the one that was not used for longest goes first."""

Progress = Callable[[str], AbstractContextManager[object]]
"""Shows a sentence while something takes long."""


class GraphExecutor:
    """Runs a stage's blocks on an inference runtime.

    Args:
        stage: the blocks.
        runtime: what compiles and runs their graphs.
        lengths: what sequences are padded to.
        progress: shows what is being compiled.
    """

    def __init__(
        self,
        stage: StageBlocks,
        runtime: Runtime,
        *,
        lengths: Sequence[int],
        progress: Progress = nullcontext,
    ) -> None:
        self.stage = stage
        self.runtime = runtime
        self._lengths = lengths
        self._progress = progress
        self._compiled: dict[str, tuple[Compiled, frozenset[str]]] = {}
        self._can_pad: dict[str, bool] = {}

    @property
    def has_vjp(self) -> bool:
        """Whether `vjp` can be called."""
        return self.runtime.has_vjp

    def forward(self, hidden_BTD: Tensor, batch: BatchTensors, adapters: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden state [B, T, D] behind the last block.

        Raises:
            ExecutorError: the rows are longer than what is compiled for, or the runtime cannot run a block.
        """
        (output,) = self._run(hidden_BTD, batch, adapters, None)
        return output[:, : hidden_BTD.shape[1]].to(hidden_BTD)

    def vjp(
        self, hidden_BTD: Tensor, batch: BatchTensors, adapters: Mapping[str, Tensor], gradient_BTD: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradients by the hidden state and by each adapter; errors as `forward`."""
        gradient, *own = self._run(hidden_BTD, batch, adapters, gradient_BTD)
        gradients = {
            name: each.to(adapter) for (name, adapter), each in zip(adapters.items(), own, strict=True)
        }
        return gradient[:, : hidden_BTD.shape[1]].to(hidden_BTD), gradients

    def check(
        self,
        hidden_BTD: Tensor,
        batch: BatchTensors,
        adapters: Mapping[str, Tensor],
        *,
        needs_vjp: bool,
    ) -> None:
        """Compile one block of each kind by itself, so that what cannot run is found before training starts.

        Raises:
            ExecutorError: the runtime cannot run a block; the message names it.
        """
        for index in self.stage.kinds(batch):
            self._try(index, hidden_BTD, batch, adapters, hidden_BTD if needs_vjp else None)

    def _try(
        self,
        index: int,
        hidden_BTD: Tensor,
        batch: BatchTensors,
        adapters: Mapping[str, Tensor],
        gradient_BTD: Tensor | None,
    ) -> None:
        alone = GraphExecutor(
            self.stage.alone(index), self.runtime, lengths=self._lengths, progress=self._progress
        )
        used = set(self.stage.names[index].values())
        own = {name: adapter for name, adapter in adapters.items() if name in used}
        alone._run(hidden_BTD, replace(batch, calls=(batch.calls[index],)), own, gradient_BTD)

    def _run(
        self,
        hidden_BTD: Tensor,
        batch: BatchTensors,
        adapters: Mapping[str, Tensor],
        gradient_BTD: Tensor | None,
    ) -> Sequence[Tensor]:
        length = hidden_BTD.shape[1]
        to = self._padded_length(hidden_BTD, batch, adapters)
        inputs = {
            "hidden": padded(hidden_BTD, "hidden", length=length, to=to),
            **{
                name: padded(tensor, name, length=length, to=to)
                for name, tensor in zip(batch.names, batch.tensors, strict=True)
            },
            **adapters,
        }
        if gradient_BTD is not None:
            inputs["gradient"] = padded(gradient_BTD, "gradient", length=length, to=to)
        try:
            run, used = self._graph(batch, inputs, list(adapters), adjoint=gradient_BTD is not None)
        except ExecutorError as error:
            if len(self.stage.blocks) > 1:
                for index in self.stage.kinds(batch):
                    self._try(index, hidden_BTD, batch, adapters, gradient_BTD)
            raise ExecutorError(
                f"On {self.runtime.description}, {self.stage.describe()} cannot run: {error}; use executor=torch for this stage."
            ) from error
        try:
            return run({name: _plain(tensor) for name, tensor in inputs.items() if name in used})
        except RuntimeError as error:  # of OpenVINO's and of ONNX Runtime's own kinds
            raise ExecutorError(
                f"On {self.runtime.description}, {self.stage.describe()} failed: {' '.join(str(error).split())}"
            ) from error

    def _padded_length(self, hidden_BTD: Tensor, batch: BatchTensors, adapters: Mapping[str, Tensor]) -> int:
        """Return the length to pad to: the batch's own if padding would change what the blocks compute."""
        length = hidden_BTD.shape[1]
        to = bucket(length, self._lengths)
        layout = batch.layout
        if to > length and layout not in self._can_pad:
            self._can_pad[layout] = all(
                padding_is_harmless(
                    self.stage.blocks[index],
                    self.stage.names[index],
                    self._parameters(index, adapters),
                    replace(batch, calls=(batch.calls[index],)),
                    hidden_BTD,
                    to=to,
                )
                for index in self.stage.kinds(batch)
            )
            if not self._can_pad[layout]:
                warnings.warn(
                    f"Padding would change what {self.stage.describe()} compute, so they are compiled for every length of rows "
                    "by itself; rows of few different lengths compile less.",
                    stacklevel=2,
                )
        return to if self._can_pad.get(layout, True) else length

    def _parameters(self, index: int, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = self.stage.names[index].values()
        return {
            name: adapters[name].float() if name in adapters else self.stage.weights.read(name)
            for name in names
        }

    def _graph(
        self, batch: BatchTensors, inputs: Mapping[str, Tensor], adapters: Sequence[str], *, adjoint: bool
    ) -> tuple[Compiled, frozenset[str]]:
        shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in inputs.items()]
        key = key_of(self.stage.key, batch.layout, shapes, adjoint)
        if key not in self._compiled:
            rows, length = inputs["hidden"].shape[:2]
            what = (
                f"{'adjoint' if adjoint else 'forward'} of {self.stage.describe()}, {rows} x {length} tokens"
            )
            path = self.stage.weights.path.with_name(f"{key}.onnx")
            with self._progress(f"Compiling the {what}, for {self.runtime.description}"):
                is_old = path.is_file()
                if not is_old:
                    self._write(path, batch, inputs, adapters, adjoint=adjoint)
                try:
                    compiled = self._read(path)
                except (ExecutorError, OSError, ValueError):
                    if not is_old:
                        raise
                    # Cut off or damaged, perhaps; a new one tells.
                    self._write(path, batch, inputs, adapters, adjoint=adjoint)
                    compiled = self._read(path)
            if len(self._compiled) == MOST_COMPILED:
                del self._compiled[next(iter(self._compiled))]
        else:
            compiled = self._compiled.pop(key)
        self._compiled[key] = compiled  # the last one used stands last
        return compiled

    def _read(self, path: Path) -> tuple[Compiled, frozenset[str]]:
        """Return a graph from its file, compiled, and the names of its inputs."""
        used = frozenset(json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))
        cache = path.parent / key_of(self.runtime.description)
        return self.runtime.compile(path, weights=self.stage.weights.path, cache=cache), used

    def _write(
        self,
        path: Path,
        batch: BatchTensors,
        inputs: Mapping[str, Tensor],
        adapters: Sequence[str],
        *,
        adjoint: bool,
    ) -> None:
        traced = trace(
            self.stage.blocks,
            self.stage.names,
            batch.calls,
            hidden=inputs["hidden"],
            tensors={name: inputs[name] for name in batch.names},
            adapters={name: inputs[name] for name in adapters},
            frozen=self.stage.frozen,
            adjoint=adjoint,
        )
        model = onnx_model(traced, self.stage.weights)
        # The model last: where it is, the other file is too.
        used = [each.name for each in model.graph.input]
        write_whole(path.with_suffix(".json"), json.dumps(used).encode())
        write_whole(path, model.SerializeToString())


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
