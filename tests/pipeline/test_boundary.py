"""Inner products at the boundary: the same whenever the gradient comes, and nothing held longer than needed."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from lightning_hybridop.pipeline.boundary import InnerProducts
from lightning_hybridop.schedules.actions import Action, Kind

ROWS, LENGTH, WIDTH = 2, 3, 4


def drawn(seed: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def perturbed(query: int, *, micro_batch: int = 0, sign: int = 1, count: int = 1) -> Action:
    return Action(kind=Kind.PERTURBED, micro_batch=micro_batch, query=query, sign=sign, count=count)


@pytest.mark.parametrize("place", range(4))
def test_products_are_the_same_whenever_the_gradient_comes(place: int) -> None:
    products = InnerProducts({0: 3})
    products.put_base(0, drawn(0))
    actions = [perturbed(0), perturbed(0, sign=-1), perturbed(1)]

    for position, action in enumerate(actions):
        if position == place:
            products.put_gradient(0, drawn(9))
        products.put_perturbed(action, drawn(position + 1))
    if place == 3:
        products.put_gradient(0, drawn(9))

    for position, action in enumerate(actions):
        expected = ((drawn(position + 1) - drawn(0)) * drawn(9)).double().sum(dim=(1, 2))
        assert products.changes[0, action.query, action.sign] == pytest.approx(expected.tolist(), abs=1e-5)
    movement = max(float((drawn(n) - drawn(0)).norm() / drawn(0).norm()) for n in (1, 2, 3))
    assert products.largest_movement == pytest.approx(movement)


def test_queries_that_ride_together_are_told_apart() -> None:
    products = InnerProducts({0: 1})
    products.put_base(0, drawn(0))
    products.put_gradient(0, drawn(9))
    products.put_perturbed(perturbed(4, count=3), drawn(1, rows=3 * ROWS))

    for copy, moved in enumerate(drawn(1, rows=3 * ROWS).chunk(3)):
        expected = ((moved - drawn(0)) * drawn(9)).double().sum(dim=(1, 2))
        assert products.changes[0, 4 + copy, 1] == pytest.approx(expected.tolist(), abs=1e-5)


def test_bfloat16_states_are_multiplied_in_float32() -> None:
    products = InnerProducts({0: 1})
    base, moved, gradient = (drawn(seed).bfloat16() for seed in (0, 1, 9))
    products.put_base(0, base)
    products.put_gradient(0, gradient)
    products.put_perturbed(perturbed(0), moved)

    expected = ((moved.double() - base.double()) * gradient.double()).sum(dim=(1, 2))
    assert products.changes[0, 0, 1] == pytest.approx(expected.tolist(), abs=1e-6)


def test_micro_batches_without_perturbed_forwards_are_not_held() -> None:
    products = InnerProducts({0: 1})
    for micro_batch in range(3):
        products.put_base(micro_batch, drawn(0))
        products.put_gradient(micro_batch, drawn(1))

    assert products.held == 2


def test_at_most_three_hidden_states_of_a_micro_batch_are_held() -> None:
    micro_batches, queries = 4, 5
    order = random.Random(0)
    for _ in range(20):
        products = InnerProducts(dict.fromkeys(range(micro_batches), queries))
        for m in range(micro_batches):
            products.put_base(m, drawn(m))
        # As the schedule has it: the first query of a micro-batch may run ahead of its gradient, the others wait.
        with_gradient: set[int] = set()
        pending = list(itertools.product(range(queries), range(micro_batches)))
        while pending or len(with_gradient) < micro_batches:
            ready = next((p for p in pending if p[0] == 0 or p[1] in with_gradient), None)
            if len(with_gradient) < micro_batches and (ready is None or order.random() < 0.3):
                m = len(with_gradient)
                with_gradient.add(m)
                products.put_gradient(m, drawn(9))
            elif ready is not None:
                pending.remove(ready)
                products.put_perturbed(perturbed(ready[0], micro_batch=ready[1]), drawn(ready[0]))
            assert products.held <= 3 * micro_batches
        assert products.held == 0
        assert len(products.changes) == micro_batches * queries
