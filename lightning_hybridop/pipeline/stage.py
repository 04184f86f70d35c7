"""One stage of the pipeline: the user's own model, cut by stand-ins."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_hybridop.pipeline.anatomy import Anatomy, CutError
from lightning_hybridop.pipeline.stand_ins import (
    Dropped,
    EmbeddingStandIn,
    FromPrevious,
    Skip,
    StageBoundary,
    StageInputError,
    StandIn,
    ToNext,
)
from lightning_hybridop.pipeline.weights import ReleasedParameter

Output = TypeVar("Output")


def parameter_owner(anatomy: Anatomy, name: str, boundaries: tuple[int, ...]) -> int:
    """Return the stage that trains the parameter `name`.

    `boundaries` are the stages' `last` block numbers. Block parameters belong to the block's stage, what runs
    behind the blocks to the last stage, everything else to the first.
    """
    block = anatomy.block_of(name)
    if block is not None:
        return next(stage for stage, last in enumerate(boundaries) if block < last)
    return len(boundaries) - 1 if anatomy.is_behind(name) else 0


class StageModel:
    """The part `[first, last)` of a model.

    Owned blocks stay untouched: no wrapper, no renamed parameter. The rest is replaced by stand-ins and its frozen
    weights are released; adapters and trainable parameters of other stages stay, so that checkpoints and adapter
    folders can be assembled under their ordinary names.

    Args:
        module: what the user's step runs through, usually the LightningModule.
        anatomy: from `read_anatomy(module)`.
        first: first block of the stage.
        last: one past the last block of the stage.
        keep_behind: keep norm and head although the stage is not the last one (needed for early exit).
    """

    def __init__(
        self, module: nn.Module, anatomy: Anatomy, *, first: int, last: int, keep_behind: bool = False
    ) -> None:
        if not 0 <= first < last <= anatomy.blocks:
            raise CutError(
                f"Stage [{first}, {last}) does not lie in the model's {anatomy.blocks} blocks "
                f"({anatomy.blocks_name}); give every stage at least one of them."
            )
        self.module = module
        self.anatomy = anatomy
        self.is_first = first == 0
        self.is_last = last == anatomy.blocks
        self._from_previous: FromPrevious | None = None
        self._to_next: ToNext | None = None
        self._stand_ins: dict[str, StandIn] = {}
        self._originals: dict[str, nn.Module] = {}
        self._is_whole = False
        self._own = range(first, last)

        self._skipped: dict[str, nn.Module] = {}
        returns_tuple = anatomy.returns_tuple
        for index in range(anatomy.blocks):
            if first <= index < last:
                continue
            name = f"{anatomy.blocks_name}.{index}"
            original = module.get_submodule(name)
            if index == first - 1:
                self._from_previous = FromPrevious(original, index=index, returns_tuple=returns_tuple)
                self._stand_ins[name] = self._from_previous
            elif index == last:
                self._to_next = ToNext(original, index=index, returns_tuple=returns_tuple)
                self._stand_ins[name] = self._to_next
            else:
                self._stand_ins[name] = Skip(original, index=index, returns_tuple=returns_tuple)
            self._originals[name] = original
        if not self.is_first and anatomy.embedding_name is not None:
            embedding = module.get_submodule(anatomy.embedding_name)
            self._originals[anatomy.embedding_name] = embedding
            self._stand_ins[anatomy.embedding_name] = _embedding_stand_in(embedding)
        if not (self.is_last or keep_behind):
            for name in anatomy.behind:
                self._originals[name] = module.get_submodule(name)
                self._stand_ins[name] = Dropped(self._originals[name])
        self._install(self._stand_ins)
        _release(self._originals, kept=list(module.parameters()))

    def own_blocks(self) -> dict[int, nn.Module]:
        """Return the stage's own blocks by their number in the model."""
        return {index: self.module.get_submodule(self._block_name(index)) for index in self._own}

    def replace_own_blocks(self, blocks: dict[int, nn.Module]) -> None:
        """Put other modules in the place of the stage's own blocks."""
        self._install({self._block_name(index): block for index, block in blocks.items()})

    def release_own_blocks(self) -> None:
        """Move the frozen weights of the stage's own blocks to `meta`, except those that other modules use."""
        own = self.own_blocks()
        within = {id(module) for block in own.values() for module in block.modules()}
        kept = [
            parameter
            for module in self.module.modules()
            if id(module) not in within
            for parameter in module.parameters(recurse=False)
        ]
        _release({self._block_name(index): block for index, block in own.items()}, kept=kept)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside the block the model has all its own modules again, frozen weights of other stages on `meta`."""
        if self._is_whole:  # a hook that sees the whole model may ask for it again
            yield
            return
        self._install(self._originals)
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            self._install(self._stand_ins)

    @contextmanager
    def exiting(self) -> Iterator[None]:
        """Inside the block every block behind the stage is skipped: the model of an early exit."""
        if self._to_next is None:
            yield
            return
        self._to_next.passing = True
        try:
            yield
        finally:
            self._to_next.passing = False

    @contextmanager
    def behind_blocks(self) -> Iterator[None]:
        """Inside the block the stage's own blocks are skipped as well: what is put in goes on behind them."""
        names = [f"{self.anatomy.blocks_name}.{index}" for index in range(self.anatomy.blocks)]
        own = {name: self.module.get_submodule(name) for name in names if name not in self._stand_ins}
        skips = {
            name: Skip(block, index=names.index(name), returns_tuple=self.anatomy.returns_tuple)
            for name, block in own.items()
        }
        self._install(skips)
        self._skipped = own
        try:
            yield
        finally:
            self._install(own)
            self._skipped = {}

    @contextmanager
    def within_blocks(self) -> Iterator[None]:
        """Inside the block the stage's own blocks run, also where `behind_blocks` skips them."""
        skips = {name: self.module.get_submodule(name) for name in self._skipped}
        self._install(self._skipped)
        try:
            yield
        finally:
            self._install(skips)

    def through_blocks(self, step: Callable[[], Any], received_BTD: Tensor) -> Tensor:
        """Run the user's step on the last stage to the end of the blocks and return their hidden state [B, T, D]."""

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            raise StageBoundary(output if isinstance(output, Tensor) else output[0])

        last = self.module.get_submodule(f"{self.anatomy.blocks_name}.{self.anatomy.blocks - 1}")
        leaving = last.register_forward_hook(leave)
        try:
            return self.hidden(step, received_BTD)
        finally:
            leaving.remove()

    def hidden(self, step: Callable[[], Any], received_BTD: Tensor | None) -> Tensor:
        """Run the user's step to the end of the stage and return the hidden state [B, T, D] for the next one."""
        self._put(received_BTD)
        try:
            step()
        except StageBoundary as boundary:
            self._check_taken()
            hidden_BTD = boundary.hidden_BTD
            if received_BTD is not None and hidden_BTD.shape != received_BTD.shape:
                raise StageInputError(
                    f"The stage received a hidden state of shape {tuple(received_BTD.shape)} and made one of shape "
                    f"{tuple(hidden_BTD.shape)}; {self.anatomy.blocks_name} is not a plain chain of blocks."
                ) from None
            return hidden_BTD
        raise StageInputError(
            f"The step returned without calling the model's blocks ({self.anatomy.blocks_name}); "
            "call the model in every step, and exactly once in training_step."
        )

    def output(self, step: Callable[[], Output], received_BTD: Tensor | None) -> Output:
        """Run the user's step to its end and return what it returns; for the last stage and for early exits."""
        self._put(received_BTD)
        result = step()
        self._check_taken()
        return result

    @property
    def has_received(self) -> bool:
        """Whether a hidden state has been put in and not yet taken by the model."""
        return self._from_previous is not None and self._from_previous.received is not None

    def drop_received(self) -> None:
        """Forget the hidden state that has been put in."""
        self._put(None)

    def _put(self, received_BTD: Tensor | None) -> None:
        if self._from_previous is not None:
            self._from_previous.received = received_BTD

    def _check_taken(self) -> None:
        if self.has_received:
            self.drop_received()
            raise StageInputError(
                f"The step ended without calling the model's blocks ({self.anatomy.blocks_name}); "
                "call the model in every step, and exactly once in training_step."
            )

    def _block_name(self, index: int) -> str:
        return f"{self.anatomy.blocks_name}.{index}"

    def _install(self, modules: dict[str, Any]) -> None:
        for name, child in modules.items():
            parent, _, attribute = name.rpartition(".")
            setattr(self.module.get_submodule(parent), attribute, child)


def _embedding_stand_in(embedding: nn.Module) -> EmbeddingStandIn:
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    return EmbeddingStandIn(embedding, width=weight.shape[1], dtype=weight.dtype, device=weight.device)


def _release(modules: dict[str, nn.Module], *, kept: list[nn.Parameter]) -> None:
    """Move the frozen weights of cut-away modules to `meta`, except those that the stage still uses (tied ones)."""
    in_use = {id(parameter) for parameter in kept}
    released: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for module in modules.values():
        adapters = {id(parameter) for parameter in adapter_parameters(module)}
        for child in module.modules():
            for name, parameter in child._parameters.items():
                if parameter is None or parameter.requires_grad or id(parameter) in adapters | in_use:
                    continue
                if id(parameter) not in released:
                    released[id(parameter)] = ReleasedParameter.of(parameter)
                child._parameters[name] = released[id(parameter)]


def adapter_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the adapter parameters of peft layers, frozen ones included."""
    for layer in module.modules():
        for attribute in getattr(layer, "adapter_layer_names", ()):
            adapter = getattr(layer, attribute, None)
            if isinstance(adapter, nn.Module):
                yield from adapter.parameters()
