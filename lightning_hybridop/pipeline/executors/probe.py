"""A call of a stage's blocks without any batch."""

import torch
from torch import Tensor, nn

from lightning_hybridop.pipeline.anatomy import find_language_model
from lightning_hybridop.pipeline.executors.executor import ExecutorError
from lightning_hybridop.pipeline.random_state import random_state_kept
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.pipeline.stand_ins import StageInputError


def run_on_tokens(model: StageModel, *, rows: int, length: int) -> bool:
    """Run a stage on rows of tokens that end in padding; return whether its model takes bare tokens.

    Raises whatever the stage's blocks find wrong: ExecutorError or StageInputError.
    """
    language_model = find_language_model(model.module, model.anatomy.blocks_name)
    if language_model is None:
        return False
    tokens_BT = torch.zeros(rows, length, dtype=torch.long)
    mask_BT = torch.ones_like(tokens_BT)
    mask_BT[:, -1] = 0
    received_BTD = None if model.is_first else torch.zeros(rows, length, model.anatomy.width)
    try:
        with torch.no_grad(), random_state_kept(torch.device("cpu")):
            model.hidden(lambda: _call(language_model, tokens_BT, mask_BT), received_BTD)
    except (ExecutorError, StageInputError):
        raise
    except Exception:  # any model of the user's may refuse these tokens
        return False
    finally:
        model.drop_received()
    return True


def _call(language_model: nn.Module, tokens_BT: Tensor, mask_BT: Tensor) -> None:
    language_model(input_ids=tokens_BT, attention_mask=mask_BT)
