import hashlib
import itertools
import random
from dataclasses import replace

import numpy
import pytest
import torch
from torch import Tensor

from lightning_hybridop.estimation.directions import DirectionKey, derive_seed, direction

KEY = DirectionKey(seed=1, step=2, micro_batch=3, query=4)
NAME = "blocks.0.lora_A"
SHAPE = torch.Size([3, 5])
RADEMACHER = "2846ea1a0e5e1e69790f7a5d81361c6781dbfb09576300fa6cfbb8041b81a966"


def hashed(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def test_direction_is_this_one_on_every_host_and_in_every_version() -> None:
    # A device that replays with another generator would move along other directions than it measured.
    z = direction(KEY, NAME, SHAPE)

    assert z[0].tolist() == pytest.approx([0.3738, 0.0765, 1.0157, 0.0406, 0.4903], abs=1e-4)
    assert hashed(z) == "b018136b1e3d70becf4dbd4304d9210cbf6faaea2650a0c8770f18f0e43bfdb0"


def test_seed_is_this_one_on_every_host_and_in_every_version() -> None:
    assert derive_seed("dropout", 0, 1) == 6049787817576918742


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (0, 4)])
def test_direction_is_float32_on_the_cpu_in_the_parameters_shape(shape: tuple[int, ...]) -> None:
    z = direction(KEY, NAME, torch.Size(shape))

    assert z.shape == shape
    assert z.dtype == torch.float32
    assert z.device == torch.device("cpu")


def test_directions_do_not_depend_on_the_order_of_drawing() -> None:
    names = ["a", "b", "c", "d"]
    forwards = {name: direction(KEY, name, SHAPE) for name in names}
    backwards = {name: direction(KEY, name, SHAPE) for name in reversed(names)}

    assert all(torch.equal(forwards[name], backwards[name]) for name in names)


def test_directions_neither_read_nor_move_any_global_random_state() -> None:
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)
    states = torch.get_rng_state(), numpy.random.get_state()[1].tobytes(), random.getstate()

    first = direction(KEY, NAME, SHAPE)

    assert torch.equal(torch.get_rng_state(), states[0])
    assert numpy.random.get_state()[1].tobytes() == states[1]
    assert random.getstate() == states[2]
    torch.manual_seed(1)
    numpy.random.seed(1)
    assert torch.equal(direction(KEY, NAME, SHAPE), first)


def test_every_part_of_the_key_matters() -> None:
    others = [
        (KEY, NAME),
        (replace(KEY, seed=2), NAME),
        (replace(KEY, step=3), NAME),
        (replace(KEY, micro_batch=2), NAME),
        (replace(KEY, micro_batch=0), NAME),
        (replace(KEY, micro_batch=None), NAME),
        (replace(KEY, query=5), NAME),
        (DirectionKey(seed=1, step=2, micro_batch=4, query=3), NAME),
        (DirectionKey(seed=12, step=3, micro_batch=4, query=0), NAME),
        (KEY, "blocks.0.lora_B"),
        (KEY, "blocks.1.lora_A"),
    ]

    assert len({hashed(direction(key, name, SHAPE)) for key, name in others}) == len(others)


def test_entries_are_standard_normal() -> None:
    count = 200_000
    z = direction(KEY, NAME, torch.Size([count])).double()

    # Five standard errors of each moment.
    assert abs(z.mean()) < 5 / count**0.5
    assert abs(z.var() - 1) < 5 * (2 / count) ** 0.5
    assert abs((z**3).mean()) < 5 * (15 / count) ** 0.5
    assert abs((z**4).mean() - 3) < 5 * (96 / count) ** 0.5


def test_directions_of_neighbouring_keys_are_uncorrelated() -> None:
    count = 50_000
    keys = [
        KEY,
        replace(KEY, query=5),
        replace(KEY, step=3),
        replace(KEY, seed=2),
        replace(KEY, micro_batch=None),
    ]
    drawn = [direction(key, NAME, torch.Size([count])) for key in keys]
    drawn.append(direction(KEY, "blocks.0.lora_B", torch.Size([count])))

    for left, right in itertools.combinations(drawn, 2):
        assert abs(torch.dot(left, right)) / count < 5 / count**0.5


def test_derived_seeds_are_63_bits_wide_and_differ_by_every_part() -> None:
    seeds = {derive_seed(*parts) for parts in itertools.product(("a", "b"), (0, 1, "1"), (None, 2))}

    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**59


def test_rademacher_directions_have_elements_of_one_size_and_both_signs() -> None:
    key = replace(KEY, distribution="rademacher")
    z = direction(key, NAME, torch.Size([101, 33]))

    assert set(z.unique().tolist()) == {-1.0, 1.0}
    # 3333 fair signs: six standard deviations.
    assert abs(float(z.sum())) < 6 * 3333**0.5
    assert z.equal(direction(key, NAME, torch.Size([101, 33])))
    assert direction(key, NAME, torch.Size([])).abs() == 1.0
    assert hashed(direction(key, NAME, SHAPE)) == RADEMACHER


def test_every_row_has_a_direction_of_its_own() -> None:
    rows = [direction(replace(KEY, row=row), NAME, SHAPE) for row in (None, 0, 1)]

    for first, second in itertools.combinations(rows, 2):
        assert not torch.isclose(first, second).any()
