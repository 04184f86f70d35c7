import pytest
import torch
from torch import nn

from lightning_hybridop.pipeline.gradients import (
    clip_to_norm,
    clip_to_value,
    scaled_learning_rates,
    square_of_norm,
)


def optimizer() -> torch.optim.Optimizer:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}])


def rates(of: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in of.param_groups]


def test_learning_rates_are_scaled_inside_the_block_only() -> None:
    sgd = optimizer()
    with scaled_learning_rates(sgd, 0.5):
        assert rates(sgd) == [0.25, 0.125]
    assert rates(sgd) == [0.5, 0.25]


def test_learning_rates_come_back_when_the_step_fails() -> None:
    def failing_step(of: torch.optim.Optimizer) -> None:
        with scaled_learning_rates(of, 0.5):
            raise ArithmeticError

    sgd = optimizer()
    with pytest.raises(ArithmeticError):
        failing_step(sgd)
    assert rates(sgd) == [0.5, 0.25]


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_rate_that_a_hook_sets_inside_the_block_stays(scale: float) -> None:
    sgd = optimizer()
    with scaled_learning_rates(sgd, scale):
        sgd.param_groups[0]["lr"] = 0.125
    assert rates(sgd) == [0.125, 0.25]


def test_gradients_are_clipped_by_a_norm_that_they_are_a_part_of() -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert square_of_norm(gradients) == 25.0
    assert square_of_norm([]) == 0.0
    clip_to_norm(gradients, limit=1.0, norm=10.0)
    torch.testing.assert_close(torch.cat(gradients), torch.tensor([0.3, 0.4]))
    clip_to_norm(gradients, limit=1.0, norm=0.5)
    torch.testing.assert_close(torch.cat(gradients), torch.tensor([0.3, 0.4]))


def test_a_norm_of_double_precision_is_not_rounded_to_single() -> None:
    assert square_of_norm([torch.tensor([1.0 + 1e-12], dtype=torch.float64)]) == (1.0 + 1e-12) ** 2


def test_every_element_is_clipped_by_value() -> None:
    gradients = [torch.tensor([3.0, -0.25]), torch.tensor([[-4.0]])]
    clip_to_value(gradients, limit=0.5)
    assert gradients[0].tolist() == [0.5, -0.25]
    assert gradients[1].tolist() == [[-0.5]]


def test_groups_without_a_learning_rate_are_left_alone() -> None:
    sgd = optimizer()
    del sgd.param_groups[0]["lr"]
    with scaled_learning_rates(sgd, 0.5):
        assert sgd.param_groups[1]["lr"] == 0.125
    assert "lr" not in sgd.param_groups[0]
