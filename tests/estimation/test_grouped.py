"""Groups of rows in one forward equal a loop over the groups."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import DirectionKey
from lightning_hybridop.estimation.grouped import (
    GroupingError,
    factor_layers,
    grouped_product,
    perturbed_in_groups,
)
from lightning_hybridop.estimation.perturbation import perturbed
from tests.tiny import VOCABULARY, bare_llama, tiny_llama

ROWS, EPSILON = 4, 0.125


def key(row: int) -> DirectionKey:
    return DirectionKey(seed=0, step=1, micro_batch=2, query=0, row=row)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adapted(**options: object) -> nn.Module:
    """Return a tiny Llama with another adapter than the usual one."""
    model = get_peft_model(bare_llama(blocks=2), LoraConfig(r=2, task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@torch.no_grad()
def logits(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    return model(input_ids=tokens_BT).logits  # type: ignore[no-any-return]


MODELS = {
    "LoRA": lambda: tiny_llama(blocks=2),
    "rsLoRA": lambda: adapted(target_modules=["q_proj", "down_proj"], use_rslora=True),
    "frozen A": lambda: with_frozen_a(tiny_llama(blocks=2)),
}


def with_frozen_a(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(requires_grad=False)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_rows_with_directions_of_their_own_equal_a_loop_over_rows(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]().to(dtype)
    parameters = trained(model)
    tokens_BT = torch.randint(3, VOCABULARY, (ROWS, 5), generator=torch.Generator().manual_seed(1))
    before = {n: p.detach().clone() for n, p in parameters.items()}
    one_by_one = []
    for row in range(ROWS):
        with perturbed(parameters, key(row), (-1) ** row * EPSILON):
            one_by_one.append(logits(model, tokens_BT[row : row + 1]))

    moves = [(key(row), (-1) ** row * EPSILON) for row in range(ROWS)]
    with perturbed_in_groups(factor_layers(model, list(parameters)), moves, rows=ROWS, length=5):
        together = logits(model, tokens_BT)

    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(together, torch.cat(one_by_one), atol=tolerance, rtol=tolerance)
    assert not torch.allclose(together[1], logits(model, tokens_BT)[1], atol=1e-3)
    assert all(p.equal(before[n]) for n, p in parameters.items())


def test_after_an_error_the_layers_are_as_they_were() -> None:
    model = tiny_llama(blocks=2)
    factors = factor_layers(model, list(trained(model)))
    tokens_BT = torch.full((2, 3), 5)
    before = logits(model, tokens_BT)

    moves = [(key(0), 1.0), (key(1), 1.0)]
    with pytest.raises(ArithmeticError), perturbed_in_groups(factors, moves, rows=2, length=3):
        raise ArithmeticError

    assert logits(model, tokens_BT).equal(before)
    assert not any("forward" in vars(layer) or hasattr(layer, "grouped_weight") for layer in factors.values())


def test_tokens_fall_into_groups_in_their_order() -> None:
    generator = torch.Generator().manual_seed(0)
    weight_GOI = torch.randn(2, 5, 3, generator=generator)
    rows = torch.randn(4, 6, 3, generator=generator)

    expected = torch.cat([rows[:2] @ weight_GOI[0].T, rows[2:] @ weight_GOI[1].T])

    torch.testing.assert_close(grouped_product(rows, weight_GOI), expected)
    # As some models call their MLP: without a dimension for rows.
    torch.testing.assert_close(grouped_product(rows.flatten(0, 1), weight_GOI), expected.flatten(0, 1))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "lora_A.default.weight"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "lora_B.default.bias"),
        ({"target_modules": ["embed_tokens"]}, "lora_embedding_A.default"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*lora_bias")
def test_adapters_that_are_more_than_two_factors_are_refused(options: dict[str, object], what: str) -> None:
    model = adapted(**options)

    with pytest.raises(GroupingError, match=f"{what} is not a factor of plain LoRA"):
        factor_layers(model, list(trained(model)))


@pytest.mark.parametrize("shape", [(3, 2), (5,)], ids=str)
def test_layers_that_see_other_tokens_are_refused(shape: tuple[int, ...]) -> None:
    model = tiny_llama(blocks=2)
    factors = factor_layers(model, list(trained(model)))
    layer = next(iter(factors.values()))

    moves = [(key(0), 1.0), (key(1), 1.0)]
    with (
        perturbed_in_groups(factors, moves, rows=2, length=3),
        pytest.raises(
            GroupingError, match=r"lora_A.default.weight is called with tokens of shape .* 2 rows of 3"
        ),
    ):
        layer(torch.zeros(*shape, layer.in_features))
    assert "forward" not in vars(layer)
