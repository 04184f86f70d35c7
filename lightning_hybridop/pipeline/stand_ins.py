"""Parameterless modules that stand where a stage's model has been cut away."""

from typing import Any

import torch
from torch import Tensor, nn


class StageBoundary(BaseException):
    """Unwinds the user's step at the end of a stage, carrying the hidden state.

    A BaseException, so that `except Exception` in a user's step does not swallow it.
    """

    def __init__(self, hidden_BTD: Tensor) -> None:
        super().__init__()
        self.hidden_BTD = hidden_BTD


class StageInputError(RuntimeError):
    """The user's step called the model in a way that a pipeline stage cannot follow."""


class StandIn(nn.Module):
    """A module in the place of `replaced`, answering reads of plain attributes as `replaced` would."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that the replaced module is not registered as a child and owns no name here.
        self._replaced = (replaced,)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_replaced"][0], name)


def first_tensor(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    """Return the hidden state among a block's arguments: the first tensor, positional ones first."""
    for value in (*arguments, *keywords.values()):
        if isinstance(value, Tensor):
            return value
    raise StageInputError(
        "A transformer block was called without a tensor, where its hidden state was expected; "
        "name the right list of blocks with HybridOPStrategy(blocks=...)."
    )


def count_tokens_in(cache: Any) -> None:
    """Ask the stand-ins of blocks to count the tokens in a key-value cache as their blocks would."""
    cache.counts_tokens_of_stand_ins = True


class BlockStandIn(StandIn):
    """A stand-in for the block `index`, returning its hidden state the way the block does (tensor or tuple)."""

    def __init__(self, replaced: nn.Module, *, index: int, returns_tuple: bool) -> None:
        super().__init__(replaced)
        self._index = index
        self._returns_tuple = returns_tuple

    def hidden_among(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        """Return the hidden state among the arguments, having counted its tokens in the cache among them.

        A model reads positions and mask sizes off the cache's first layers, whichever stage holds them. One number
        for a token is enough for that.
        """
        hidden_BTD = first_tensor(arguments, keywords)
        for value in (*arguments, *keywords.values()):
            if getattr(value, "counts_tokens_of_stand_ins", False):
                keys = hidden_BTD.new_zeros(hidden_BTD.shape[0], 1, hidden_BTD.shape[1], 1)
                value.update(keys, keys, self._index)
                break
        return hidden_BTD

    def returned(self, hidden_BTD: Tensor) -> Tensor | tuple[Tensor]:
        """Wrap a hidden state in the block's return convention."""
        return (hidden_BTD,) if self._returns_tuple else hidden_BTD


class Skip(BlockStandIn):
    """A block of another stage: returns its input."""

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor | tuple[Tensor]:
        """Return the hidden state unchanged."""
        return self.returned(self.hidden_among(arguments, keywords))


class FromPrevious(BlockStandIn):
    """The block before a stage's first: ignores its input and returns the hidden state put into `received`."""

    def __init__(self, replaced: nn.Module, *, index: int, returns_tuple: bool) -> None:
        super().__init__(replaced, index=index, returns_tuple=returns_tuple)
        self.received: Tensor | None = None

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor | tuple[Tensor]:
        """Return the received hidden state, cast to the dtype that the model computes in."""
        own_BTD = self.hidden_among(arguments, keywords)
        if self.received is None:
            raise StageInputError(
                "The model was called twice in one step, but a pipeline stage receives one hidden state per step; "
                "call the model once in training_step, or train with a single stage."
            )
        hidden_BTD, self.received = self.received, None
        if hidden_BTD.shape != own_BTD.shape:
            raise StageInputError(
                f"The previous stage sent a hidden state of shape {tuple(hidden_BTD.shape)}, but this stage's batch "
                f"makes {tuple(own_BTD.shape)}; every rank must read the same batch."
            )
        return self.returned(hidden_BTD.to(own_BTD.dtype))


class ToNext(BlockStandIn):
    """The block after a stage's last: ends the step, handing the hidden state out.

    While `passing` is true it behaves as `Skip`, which makes the model of an early exit.
    """

    def __init__(self, replaced: nn.Module, *, index: int, returns_tuple: bool) -> None:
        super().__init__(replaced, index=index, returns_tuple=returns_tuple)
        self.passing = False

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor | tuple[Tensor]:
        """Raise `StageBoundary` with the hidden state, or return it while passing."""
        hidden_BTD = self.hidden_among(arguments, keywords)
        if self.passing:
            return self.returned(hidden_BTD)
        raise StageBoundary(hidden_BTD)


class EmbeddingStandIn(StandIn):
    """The token embedding of a later stage: zeros of the shape that the embedding would give."""

    _rowless: Tensor

    def __init__(self, replaced: nn.Module, *, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(replaced)
        rowless = torch.empty(0, width, dtype=dtype, device=device)
        self.register_buffer("_rowless", rowless, persistent=False)

    @property
    def weight(self) -> Tensor:
        """A weight of no rows: models ask their embedding's for a device or a dtype (Llama 4 moves its tokens there)."""
        return self._rowless

    def forward(self, tokens_BT: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return zeros of shape [B, T, width] on the tokens' device."""
        width = self._rowless.shape[1]
        return self._rowless.new_zeros((*tokens_BT.shape, width), device=tokens_BT.device)


class Dropped(StandIn):
    """The norm or head of an earlier stage, which the step never reaches."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Refuse: nothing behind the stage's last block may run here."""
        raise StageInputError(
            f"{type(self._replaced[0]).__name__} belongs to the last stage but was called on an earlier one; "
            "the model runs it before its blocks, so it cannot be cut here."
        )
