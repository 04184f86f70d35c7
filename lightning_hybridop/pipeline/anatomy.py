"""Reads a model's structure: its blocks, what runs before them and what runs behind them."""

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybridop.pipeline.random_state import random_state_kept
from lightning_hybridop.pipeline.stand_ins import StageBoundary


class CutError(ValueError):
    """The model cannot be cut into the stages asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Where a model can be cut; all names are those of the unsplit model.

    `blocks_name` is the `nn.ModuleList` of transformer blocks, `embedding_name` the token embedding (None when the
    model does not say), `behind` the modules that run behind the blocks (final norm, head, pooler), `width` the size
    D of the hidden state [B, T, D], and `returns_tuple` the blocks' return convention.
    """

    blocks_name: str
    blocks: int
    embedding_name: str | None
    behind: tuple[str, ...]
    width: int
    returns_tuple: bool

    def block_of(self, name: str) -> int | None:
        """Return the block that the parameter or module `name` lies in, None outside the blocks."""
        prefix = self.blocks_name + "."
        return int(name[len(prefix) :].split(".")[0]) if name.startswith(prefix) else None

    def is_behind(self, name: str) -> bool:
        """Tell whether the parameter or module `name` lies behind the blocks."""
        return any(name == module or name.startswith(module + ".") for module in self.behind)


def find_blocks(module: nn.Module, name: str | None) -> str:
    """Return the name of the list of blocks: the longest outermost `nn.ModuleList`, or `name` if given."""
    lists: dict[str, nn.ModuleList] = {
        path: child for path, child in module.named_modules() if isinstance(child, nn.ModuleList)
    }
    if name is not None:
        matches = [path for path in lists if path == name or path.endswith("." + name)]
        if len(matches) != 1:
            raise CutError(
                f"blocks={name!r} names {len(matches)} module lists, expected exactly one of: {', '.join(lists)}."
            )
        return matches[0]
    outermost = [path for path in lists if not any(path.startswith(other + ".") for other in lists)]
    if not outermost:
        raise CutError(
            f"{type(module).__name__} has no nn.ModuleList of transformer blocks; a pipeline needs one to cut at."
        )
    return max(outermost, key=lambda path: len(lists[path]))


def read_anatomy(module: nn.Module, *, blocks_name: str | None = None) -> Anatomy:
    """Return the anatomy of `module` (a LightningModule or a bare model).

    A model with `get_input_embeddings()` is run on two tokens up to its first block, which shows what runs before
    the blocks and how a block returns its hidden state. Any other model is judged by the order of its modules.
    """
    path = find_blocks(module, blocks_name)
    block_list = module.get_submodule(path)
    assert isinstance(block_list, nn.ModuleList)
    siblings = dict(_siblings(module, path))
    language_model = find_language_model(module, path)
    embedding_name = None
    if language_model is not None:
        embedding = getattr(language_model, "get_input_embeddings")()  # noqa: B009  # nn.Module does not declare it
        embedding_name = next((name for name, child in module.named_modules() if child is embedding), None)
    probe = _probe(language_model, block_list[0], siblings) if language_model is not None else None
    if probe is None:
        ran_before = frozenset(
            name for name, (_, registered_behind) in siblings.items() if not registered_behind
        )
        returns_tuple = "tuple" in str(inspect.signature(block_list[0].forward).return_annotation).lower()
        width = _first_embedding_width(module)
    else:
        ran_before, returned = probe
        returns_tuple = isinstance(returned, tuple)
        width = (returned[0] if isinstance(returned, tuple) else returned).shape[-1]
    # What holds no weights stays on every stage: dropping it would save nothing.
    behind = tuple(
        name
        for name, (child, _) in siblings.items()
        if name not in ran_before and any(True for _ in child.parameters())
    )
    if embedding_name is not None:
        behind = tuple(name for name in behind if not f"{embedding_name}.".startswith(name + "."))
    return Anatomy(
        blocks_name=path,
        blocks=len(block_list),
        embedding_name=embedding_name,
        behind=behind,
        width=width,
        returns_tuple=returns_tuple,
    )


def _first_embedding_width(module: nn.Module) -> int:
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            return child.embedding_dim
    raise CutError(
        f"{type(module).__name__} neither takes bare `input_ids` nor holds an nn.Embedding, so the size of its hidden "
        "state is unknown; give the model a `get_input_embeddings()` method and let it accept `input_ids`."
    )


def _siblings(module: nn.Module, path: str) -> Iterator[tuple[str, tuple[nn.Module, bool]]]:
    """Yield every module beside the way down to the blocks, with whether it is registered behind that way."""
    ancestor, prefix = module, ""
    for part in path.split("."):
        passed = False
        for name, child in ancestor.named_children():
            if name == part:
                passed = True
            else:
                yield prefix + name, (child, passed)
        ancestor, prefix = ancestor.get_submodule(part), f"{prefix}{part}."


def find_language_model(module: nn.Module, path: str) -> nn.Module | None:
    """Return the outermost Hugging Face style model on the way down to the blocks at `path`."""
    ancestor = module
    for part in ("", *path.split(".")):  # "" is the module itself
        ancestor = ancestor.get_submodule(part)
        # peft's wrappers forward attribute reads, so ask the class: only the model itself defines the method.
        if hasattr(type(ancestor), "get_input_embeddings"):
            return ancestor
    return None


def _probe(
    model: nn.Module, first_block: nn.Module, siblings: dict[str, tuple[nn.Module, bool]]
) -> tuple[frozenset[str], Tensor | tuple[Tensor, ...]] | None:
    """Run two tokens through the first block: what ran before it, and what it returned.

    None when the model does not take bare `input_ids`.
    """
    ran: set[str] = set()
    returned: list[Tensor | tuple[Tensor, ...]] = []

    def stop(_module: nn.Module, _arguments: object, output: Tensor | tuple[Tensor, ...]) -> None:
        returned.append(output)
        raise StageBoundary(torch.empty(0))

    handles = [first_block.register_forward_hook(stop)]
    for name, (child, _) in siblings.items():
        for descendant in child.modules():
            handles.append(descendant.register_forward_pre_hook(lambda *_, name=name: ran.add(name)))
    # Weights that are not read yet need not be: shapes are all that is asked for, and on `meta` all can be had.
    on_meta = _on_meta(model) if any(parameter.is_meta for parameter in model.parameters()) else {}
    device = torch.device("meta") if on_meta else next(model.parameters()).device
    tokens_BT = torch.zeros(1, 2, dtype=torch.long, device=device)
    values = _WithoutValues() if on_meta else nullcontext()  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad(), random_state_kept(device), values:
            torch.func.functional_call(model, on_meta, kwargs={"input_ids": tokens_BT})
    except StageBoundary:
        return frozenset(ran), returned[0]
    except Exception:  # any model of the user's may refuse these tokens; the order of modules decides then
        return None
    finally:
        for handle in handles:
            handle.remove()
    return None


class _WithoutValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers 0 where a model asks a tensor on `meta` for its value."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 0
        return function(*arguments, **(keywords or {}))


def _on_meta(model: nn.Module) -> dict[str, Tensor]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
