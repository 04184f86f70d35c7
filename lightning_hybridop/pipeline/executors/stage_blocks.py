"""The blocks of a stage as an inference runtime takes them: their graphs' parts and their weights in a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from lightning_hybridop.pipeline.executors.arguments import BatchTensors
from lightning_hybridop.pipeline.executors.cache import key_of
from lightning_hybridop.pipeline.executors.configuration import configuration, switchable, switches
from lightning_hybridop.pipeline.executors.weights_file import WeightsFile


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """Blocks, the first of which is number `first` of the model, whose frozen weights lie in a file.

    `names` are as in BlockParameters. Of the `frozen` tensors only shapes and dtypes count; the values are the file's.
    """

    first: int
    blocks: Sequence[nn.Module]
    names: Sequence[Mapping[str, str]]
    frozen: Mapping[str, Tensor]
    weights: WeightsFile
    _configurations: tuple[str, ...] = field(init=False)
    _switchable: Sequence[nn.Module] = field(init=False)
    _unchanging: str = field(init=False)

    def __post_init__(self) -> None:
        configurations = tuple(configuration(block) for block in self.blocks)
        object.__setattr__(self, "_configurations", configurations)
        object.__setattr__(self, "_switchable", switchable(self.blocks))
        object.__setattr__(self, "_unchanging", key_of(self.first, self.names, configurations))

    @property
    def key(self) -> tuple[str, str]:
        """What of the blocks is compiled in."""
        return self._unchanging, switches(self._switchable)

    def alone(self, index: int) -> "StageBlocks":
        """Return one of the blocks by itself."""
        own = self.names[index]
        return replace(
            self,
            first=self.first + index,
            blocks=[self.blocks[index]],
            names=[own],
            frozen={name: tensor for name, tensor in self.frozen.items() if name in set(own.values())},
        )

    def kinds(self, batch: BatchTensors) -> list[int]:
        """Return the first block of each kind: those of one configuration that are called alike."""
        first: dict[tuple[str, str], int] = {}
        for index, (own, call) in enumerate(zip(self._configurations, batch.calls, strict=True)):
            first.setdefault((own, repr(call)), index)
        return list(first.values())

    def describe(self) -> str:
        """Return "block 3" or "blocks 3-5"."""
        last = self.first + len(self.blocks) - 1
        return f"block {last}" if len(self.blocks) == 1 else f"blocks {self.first}-{last}"
