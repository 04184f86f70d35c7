import re

import pytest
import torch
from torch import nn

from lightning_hybridop.pipeline.stand_ins import (
    Dropped,
    EmbeddingStandIn,
    FromPrevious,
    Skip,
    StageBoundary,
    StageInputError,
    ToNext,
    first_tensor,
)


class Block(nn.Module):
    """A block with what models have been seen to ask their blocks for."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_type = "sliding_attention"
        self.linear = nn.Linear(2, 2)

    @property
    def is_sparse(self) -> bool:
        return True


HIDDEN_BTD = torch.arange(12.0).reshape(1, 3, 4)


@pytest.mark.parametrize(
    "stand_in",
    [
        Skip(Block(), index=0, returns_tuple=False),
        FromPrevious(Block(), index=0, returns_tuple=False),
        ToNext(Block(), index=0, returns_tuple=True),
        Dropped(Block()),
    ],
    ids=["Skip", "FromPrevious", "ToNext", "Dropped"],
)
class TestEveryStandIn:
    def test_answers_attributes_as_the_replaced_module(self, stand_in: Skip) -> None:
        assert stand_in.attention_type == "sliding_attention"
        assert stand_in.is_sparse is True
        assert stand_in.linear.in_features == 2

    def test_lacks_what_the_replaced_module_lacks(self, stand_in: Skip) -> None:
        assert not hasattr(stand_in, "no_such_attribute")

    def test_owns_no_parameter_and_no_name(self, stand_in: Skip) -> None:
        assert list(stand_in.parameters()) == []
        assert list(stand_in.children()) == []
        assert stand_in.state_dict() == {}


@pytest.mark.parametrize("returns_tuple", [False, True], ids=["tensor", "tuple"])
def test_skip_returns_its_input_in_the_blocks_convention(returns_tuple: bool) -> None:
    returned = Skip(Block(), index=0, returns_tuple=returns_tuple)(HIDDEN_BTD, attention_mask=torch.ones(2))

    assert isinstance(returned, tuple) is returns_tuple
    assert (returned[0] if isinstance(returned, tuple) else returned) is HIDDEN_BTD


@pytest.mark.parametrize("returns_tuple", [False, True], ids=["tensor", "tuple"])
def test_from_previous_returns_what_was_received_once(returns_tuple: bool) -> None:
    stand_in = FromPrevious(Block(), index=0, returns_tuple=returns_tuple)
    stand_in.received = HIDDEN_BTD

    returned = stand_in(torch.zeros_like(HIDDEN_BTD))

    assert torch.equal(returned[0] if isinstance(returned, tuple) else returned, HIDDEN_BTD)
    assert isinstance(returned, tuple) is returns_tuple
    with pytest.raises(StageInputError, match="called twice in one step"):
        stand_in(torch.zeros_like(HIDDEN_BTD))


def test_from_previous_casts_to_the_dtype_that_the_model_computes_in() -> None:
    stand_in = FromPrevious(Block(), index=0, returns_tuple=False)
    stand_in.received = HIDDEN_BTD

    assert stand_in(torch.zeros_like(HIDDEN_BTD, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_from_previous_refuses_another_shape() -> None:
    stand_in = FromPrevious(Block(), index=0, returns_tuple=False)
    stand_in.received = HIDDEN_BTD

    with pytest.raises(
        StageInputError, match=re.escape("shape (1, 3, 4), but this stage's batch makes (2, 3, 4)")
    ):
        stand_in(torch.zeros(2, 3, 4))


def test_to_next_ends_the_step_with_the_hidden_state() -> None:
    with pytest.raises(StageBoundary) as boundary:
        ToNext(Block(), index=0, returns_tuple=False)(HIDDEN_BTD)

    assert boundary.value.hidden_BTD is HIDDEN_BTD


def test_stage_boundary_is_not_an_ordinary_exception() -> None:
    assert not issubclass(StageBoundary, Exception)


@pytest.mark.parametrize("returns_tuple", [False, True], ids=["tensor", "tuple"])
def test_passing_to_next_is_a_skip(returns_tuple: bool) -> None:
    stand_in = ToNext(Block(), index=0, returns_tuple=returns_tuple)
    stand_in.passing = True

    returned = stand_in(hidden_states=HIDDEN_BTD)

    assert isinstance(returned, tuple) is returns_tuple
    assert (returned[0] if isinstance(returned, tuple) else returned) is HIDDEN_BTD


def test_embedding_gives_zeros_of_the_embeddings_shape_and_dtype() -> None:
    stand_in = EmbeddingStandIn(nn.Embedding(7, 4), width=4, dtype=torch.bfloat16, device=torch.device("cpu"))

    embedded = stand_in(torch.ones(2, 3, dtype=torch.long))

    assert embedded.shape == (2, 3, 4)
    assert embedded.dtype == torch.bfloat16
    assert embedded.count_nonzero() == 0


def test_embedding_keeps_device_and_dtype_of_its_weight_after_the_weight_is_released() -> None:
    embedding = nn.Embedding(7, 4)
    stand_in = EmbeddingStandIn(embedding, width=4, dtype=torch.float32, device=torch.device("cpu"))
    embedding.to("meta")

    assert stand_in.weight.device == torch.device("cpu")
    assert stand_in.weight.dtype == torch.float32
    assert stand_in.num_embeddings == 7
    assert list(stand_in.parameters()) == []
    assert stand_in.state_dict() == {}


def test_dropped_module_refuses_to_run() -> None:
    with pytest.raises(
        StageInputError, match="Block belongs to the last stage but was called on an earlier one"
    ):
        Dropped(Block())(HIDDEN_BTD)


def test_first_tensor_prefers_positional_arguments() -> None:
    other = torch.zeros(1)

    assert first_tensor((None, HIDDEN_BTD), {"mask": other}) is HIDDEN_BTD
    assert first_tensor((), {"flag": True, "hidden_states": HIDDEN_BTD}) is HIDDEN_BTD


def test_block_called_without_a_tensor_is_refused() -> None:
    with pytest.raises(StageInputError, match=re.escape("HybridOPStrategy(blocks=...)")):
        Skip(Block(), index=0, returns_tuple=False)(None)
