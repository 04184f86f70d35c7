"""A model outside Hugging Face's conventions: an embedding, a list of blocks, a norm and a head."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

VOCABULARY = 17
WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a step on `PlainModel` returns."""

    logits: Tensor
    loss: Tensor


class PlainBlock(nn.Module):
    """A residual block that mixes positions, so that a wrong row or order shows."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return hidden_BTD + torch.tanh(self.mix(hidden_BTD.cumsum(dim=1)))


class PlainTupleBlock(PlainBlock):
    """The same block, returning a tuple as older Hugging Face models do."""

    def forward(self, hidden_BTD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(hidden_BTD), None


class PlainModel(nn.Module):
    """Next-token prediction over `blocks` blocks."""

    def __init__(self, *, blocks: int = 4, tuples: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tuples = tuples
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.trunk = nn.ModuleList(PlainTupleBlock() if tuples else PlainBlock() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD = self.embed(tokens_BT)
        for block in self.trunk:
            hidden_BTD = block(hidden_BTD)[0] if self.tuples else block(hidden_BTD)
        logits: Tensor = self.head(self.norm(hidden_BTD))
        return logits


def tokens(rows: int = 3, length: int = 5) -> Tensor:
    """Return random tokens [rows, length]."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def plain_step(model: nn.Module) -> Output:
    """Run the model once on `tokens()` and return its logits and loss."""
    logits = model(tokens())
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())
    return Output(logits=logits, loss=loss)
