"""What an inference runtime cannot do with a stage's blocks, refused before training starts."""

from collections.abc import Mapping

from torch import nn

from lightning_hybridop.pipeline.executors.executor import ExecutorError
from lightning_hybridop.pipeline.grouping import dropout_in


def refuse_dropout(blocks: Mapping[int, nn.Module]) -> None:
    """Raise ExecutorError for blocks that would drop anything: the runtime computes one and the same graph each time."""
    for index, block in blocks.items():
        dropping = dropout_in(block)
        if dropping is not None:
            raise ExecutorError(
                f"{dropping} of block {index} drops values at random, which an inference runtime cannot do; set that "
                "dropout to 0 in the model's or the adapter's configuration, or use executor=torch for this stage."
            )


def refuse_hooks(blocks: Mapping[int, nn.Module]) -> None:
    """Raise ExecutorError for blocks with hooks, as some adapters register: a runtime would never call them."""
    for index, block in blocks.items():
        for name, module in block.named_modules():
            if module._forward_hooks or module._forward_pre_hooks:
                raise ExecutorError(
                    f"{name or 'The whole'} of block {index} has a forward hook, which an inference runtime cannot call; use an "
                    "adapter without hooks, such as LoRA, or executor=torch for this stage."
                )
