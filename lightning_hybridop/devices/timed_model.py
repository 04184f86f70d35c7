"""A small copy of a language model, with random weights, whose parts can be run one by one."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PretrainedConfig

BLOCKS = 3
"""Blocks of the copy: one alone would have its weights in the processor's caches all the time."""


class MeasureError(ValueError):
    """A model that cannot be measured; the message says why."""


def random_network(config: "PretrainedConfig", lora: "LoraConfig | None", dtype: torch.dtype) -> nn.Module:
    """Return a model of `BLOCKS` blocks with random frozen weights and, if asked for, adapters."""
    # Slow to import, and not needed to read a profile.
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = min(BLOCKS, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    made = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    network: nn.Module = made.requires_grad_(False)
    if lora is not None:
        with warnings.catch_warnings():
            # peft 0.21 asks for an attribute that transformers 5.24 has renamed.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            network = get_peft_model(network, copy.deepcopy(lora))
    return network.train()


def random_batch(
    config: "PretrainedConfig", rows: int, length: int, device: torch.device
) -> Mapping[str, Tensor]:
    """Return a micro-batch of random tokens whose first row is padded from its middle on."""
    tokens_BT = torch.randint(config.get_text_config().vocab_size, (rows, length))
    mask_BT = torch.ones_like(tokens_BT)
    mask_BT[0, length // 2 + 1 :] = 0
    batch = {"input_ids": tokens_BT, "attention_mask": mask_BT, "labels": tokens_BT}
    return {name: tensor.to(device) for name, tensor in batch.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """One block and what the model passed to it: the hidden state first, or by name."""

    block: nn.Module
    hidden: Tensor
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run the block on a hidden state."""
        output = self.block(hidden, *self.arguments, **self.named)
        return cast(Tensor, output[0] if isinstance(output, tuple) else output)


def _blocks(network: nn.Module) -> nn.ModuleList:
    count = getattr(network, "config").get_text_config().num_hidden_layers  # noqa: B009  # nn.Module does not declare it
    for module in network.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise MeasureError(
        f"{type(network).__name__} has no nn.ModuleList of its {count} blocks, so none can be timed."
    )


def block_calls(network: nn.Module, batch: Mapping[str, Tensor]) -> list[BlockCall]:
    """Run the model once and return every block with its arguments."""
    calls: list[BlockCall] = []

    def note(block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        named = dict(named)
        hidden, *others = arguments if arguments else (named.pop("hidden_states"),)
        calls.append(BlockCall(block=block, hidden=hidden.detach(), arguments=tuple(others), named=named))

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in _blocks(network)]
    try:
        with torch.no_grad():
            network(**batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def chain(calls: Sequence[BlockCall], hidden: Tensor) -> Tensor:
    """Run all blocks, one after the other."""
    for call in calls:
        hidden = call(hidden)
    return hidden


def kept_elements(calls: Sequence[BlockCall], hidden: Tensor) -> float:
    """Return the elements per token that one block keeps: storages count once, parameters and shared inputs do not."""
    kept: dict[int, int] = {}
    shared = [leaf for call in calls for leaf in tree_leaves((call.arguments, call.named))]
    tensors = [leaf for leaf in shared if isinstance(leaf, Tensor)]
    tensors += [parameter for call in calls for parameter in call.block.parameters()]
    excluded = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # Until it is counted the graph keeps all storages alive, so that none takes another's place.
        output = chain(calls, hidden.clone().requires_grad_())
    total = sum(kept.values())
    del output
    tokens = hidden.shape[0] * hidden.shape[1]
    return total / hidden.element_size() / tokens / len(calls)


@contextmanager
def replaced_output(module: nn.Module, output: Tensor) -> Iterator[None]:
    """Have a module return `output` whatever it computes."""
    handle = module.register_forward_hook(lambda *_: output)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def without_blocks(network: nn.Module) -> Iterator[None]:
    """Take all blocks out of a model."""
    blocks = _blocks(network)
    taken_out = list(blocks)
    del blocks[:]
    try:
        yield
    finally:
        blocks.extend(taken_out)
