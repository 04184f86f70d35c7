"""Replicas: who is who, and what share of the micro-batches each runs."""

import pytest

from lightning_hybridop.pipeline.replicas import renumbered, share_of, side_by_side
from lightning_hybridop.schedules.actions import Action, Kind


def test_a_replica_follows_the_other_with_its_stages_in_the_same_order() -> None:
    replicas = side_by_side([2, 0, 1], replicas=2, rank=4)

    assert replicas.ranks == ((2, 0, 1), (5, 3, 4))
    assert (replicas.index, replicas.own, replicas.first) == (1, [5, 3, 4], [2, 0, 1])
    assert (replicas.last_stages, replicas.of_stage(0)) == ([1, 4], [2, 5])
    assert [replicas.stage_of(rank) for rank in range(6)] == [1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_shares_are_even_and_cover_every_micro_batch_once(replicas: int) -> None:
    for micro_batches in range(1, 20):
        shares = [share_of(micro_batches, replicas=replicas, index=index) for index in range(replicas)]
        assert [number for share in shares for number in share] == list(range(micro_batches))
        sizes = [len(share) for share in shares]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


def test_actions_get_the_numbers_of_the_whole_mini_batch() -> None:
    actions = (
        Action(kind=Kind.FORWARD, micro_batch=1),
        Action(kind=Kind.PERTURBED, micro_batch=0, query=3, sign=-1),
    )

    assert renumbered(actions, range(4, 6)) == (
        Action(kind=Kind.FORWARD, micro_batch=5),
        Action(kind=Kind.PERTURBED, micro_batch=4, query=3, sign=-1),
    )
