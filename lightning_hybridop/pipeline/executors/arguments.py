"""What a model calls its blocks with: the tensors, each once, and how the calls are made of them."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybridop.pipeline.stand_ins import StageInputError, first_tensor

HIDDEN = -1
"""The slot of the hidden state."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor in a call: the number of one of the batch's, or HIDDEN."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How one block is called: nested tuples, lists and dicts of slots and plain values."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def filled(self, hidden_BTD: Tensor, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments and keywords with tensors in the place of slots."""

        def fill(value: Any) -> Any:
            if isinstance(value, Slot):
                return hidden_BTD if value.number == HIDDEN else tensors[value.number]
            if isinstance(value, (tuple, list)):
                return type(value)(fill(item) for item in value)
            if isinstance(value, dict):
                return {key: fill(item) for key, item in value.items()}
            return value

        return tuple(fill(value) for value in self.arguments), fill(dict(self.keywords))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensors:
    """All tensors but the hidden state that a stage's blocks are called with on one batch.

    `names` says under which argument each was found first, `calls` how each block is called.
    """

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]
    calls: tuple[Call, ...]

    @property
    def layout(self) -> str:
        """What of the calls is compiled in: everything but the tensors' values and shapes."""
        return repr((self.names, self.calls))


class CallRecorder:
    """Collects the calls of a stage's blocks on one batch, from the first to the last."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.calls: list[Call] = []
        self.hidden_BTD: Tensor | None = None

    def record(self, block: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        """Note a block's call and return the hidden state among its arguments.

        Raises:
            StageInputError: the call cannot be followed: another hidden state than the previous block returned, a
                key-value cache with tokens in it, or an argument that is neither a tensor nor a plain value.
        """
        hidden_BTD = first_tensor(arguments, keywords)
        if self.hidden_BTD is None:
            self.hidden_BTD = hidden_BTD
        elif hidden_BTD is not self.hidden_BTD:
            raise StageInputError(
                f"The model changes its hidden state before block {len(self.calls)} of this stage, outside its blocks, "
                "which an inference runtime cannot follow; use executor=torch for this stage."
            )
        names = _argument_names(block, len(arguments))
        self.calls.append(
            Call(
                arguments=tuple(
                    self._plain(value, name) for value, name in zip(arguments, names, strict=True)
                ),
                keywords={name: self._plain(value, name) for name, value in keywords.items()},
            )
        )
        return hidden_BTD

    def taken(self) -> BatchTensors:
        """Return what was recorded and start anew."""
        batch = BatchTensors(tensors=tuple(self.tensors), names=tuple(self.names), calls=tuple(self.calls))
        self.clear()
        return batch

    def clear(self) -> None:
        """Forget what was recorded."""
        self.tensors, self.names, self.calls, self.hidden_BTD = [], [], [], None

    def _plain(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return self._slot(value, name)
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            return value
        if isinstance(value, (tuple, list)):
            items = [self._plain(item, f"{name}_{index}") for index, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, dict):
            return {key: self._plain(item, f"{name}_{key}") for key, item in value.items()}
        if hasattr(value, "get_seq_length"):
            _check_empty(value)
            return None
        raise StageInputError(
            f"The model calls its blocks with {name}, a {type(value).__name__}, where an inference runtime takes tensors "
            "and plain values only; use executor=torch for this stage."
        )

    def _slot(self, tensor: Tensor, name: str) -> Slot:
        if tensor is self.hidden_BTD:
            return Slot(HIDDEN)
        for number, known in enumerate(self.tensors):
            if known is tensor:
                return Slot(number)
        self.tensors.append(tensor)
        # Blocks may be given different tensors under one name.
        taken = sum(known == name or known.startswith(f"{name}.") for known in self.names)
        self.names.append(f"{name}.{taken}" if taken else name)
        return Slot(len(self.tensors) - 1)


def _argument_names(block: nn.Module, count: int) -> list[str]:
    names = list(inspect.signature(block.forward).parameters)
    return [names[index] if index < len(names) else f"argument_{index}" for index in range(count)]


def _check_empty(cache: Any) -> None:
    # A cache that counts tokens is generation's: the next call would find nothing of these blocks in it.
    if getattr(cache, "counts_tokens_of_stand_ins", False) or cache.get_seq_length() > 0:
        raise StageInputError(
            "The model is called with a key-value cache, which blocks on an inference runtime neither read nor fill; "
            "pass use_cache=False, or use executor=torch for this stage."
        )
