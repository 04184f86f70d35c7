"""Which rank runs which stage is the plan's business, and ranks that do not have the same say so before the first step."""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lightning_hybridop import HybridOPStrategy, Plan, even_plan
from tests.distributed.harness import run_ranks
from tests.distributed.runs import Job, Run, fit, trainer_for
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

HOSTS = ("nano", "nx", "atlas")
TRAIN = partial(loader, 16)


def plan_on(*hosts: str | None) -> Plan:
    """Return a plan of one zo and two bp stages, each on its host."""
    plan = even_plan(blocks=6, stages=3, zo_stages=1, micro_batches=2)
    stages = [dataclasses.replace(stage, host=host) for stage, host in zip(plan.stages, hosts, strict=True)]
    return dataclasses.replace(plan, stages=tuple(stages))


PLANS = {
    "in the order of ranks": (plan_on(None, None, None), [0, 1, 2]),
    "reversed": (plan_on("atlas", "nx", "nano"), [2, 1, 0]),
    "the zo stage on rank 1": (plan_on("nx", "nano", None), [1, 0, 2]),
}


class Seeded(TinyModule):
    def __init__(self, *, seed: int = 0, option: int = 0, path: str = "") -> None:
        super().__init__(seed=seed)
        self.save_hyperparameters()


def _queries(rank: int) -> None:
    trainer_for(HybridOPStrategy(queries=2 if rank == 1 else 1)).fit(Seeded(), TRAIN())


def _accumulation(rank: int) -> None:
    trainer_for(HybridOPStrategy(), accumulate_grad_batches=1 + (rank == 2)).fit(Seeded(), TRAIN())


def _plans(rank: int) -> None:
    # One that names hosts and one that does not.
    plan, _ = PLANS["reversed" if rank == 0 else "in the order of ranks"]
    trainer_for(HybridOPStrategy(plan)).fit(Seeded(), TRAIN())


def _hyper_parameters(rank: int) -> None:
    # Paths may differ.
    path = "/proc/self" if rank else "/proc/cpuinfo"
    trainer_for(HybridOPStrategy()).fit(Seeded(option=rank, path=path), TRAIN())


def _models(rank: int) -> None:
    trainer_for(HybridOPStrategy()).fit(Seeded(seed=0), TRAIN())  # alike
    module = TinyModule(seed=5 if rank == 0 else 0)
    trainer_for(HybridOPStrategy()).fit(module, TRAIN())


def _adapters(rank: int) -> None:
    trainer_for(HybridOPStrategy()).fit(TinyModule(rank=3 if rank == 1 else 2), TRAIN())


def _missing_host(rank: int) -> None:
    trainer_for(HybridOPStrategy(plan_on("nano", "moon", None))).fit(Seeded(), TRAIN())


def _small_host(rank: int) -> None:
    trainer_for(HybridOPStrategy(plan_on("nx", "nano", "nano"))).fit(Seeded(), TRAIN())


REFUSED: dict[Callable[[int], None], str] = {
    _queries: "The ranks do not have the same configuration: the strategy's queries is 1 on ranks 0, 2 (hosts nano, atlas) and "
    "2 on rank 1 (host nx); start every host with the same options and files.",
    _accumulation: "The ranks do not have the same configuration: the Trainer's accumulate_grad_batches is 1 on ranks 0-1 (hosts "
    "nano, nx) and 2 on rank 2 (host atlas); start every host with the same options and files.",
    _plans: "The ranks do not have the same configuration: the plan's stage 0 is {'first': 0, 'last': 2, 'role': 'zo', 'host': "
    "'atlas'} on rank 0 (host nano) and {'first': 0, 'last': 2, 'role': 'zo'} on ranks 1-2 (hosts nx, atlas); start "
    "every host with the same options and files.",
    _hyper_parameters: "The ranks do not have the same configuration: the module's option is 0 on rank 0 (host nano), 1 on rank "
    "1 (host nx) and 2 on rank 2 (host atlas); start every host with the same options and files.",
    _models: "The ranks do not have the same model: model.base_model.model.model.embed_tokens.weight has some values on rank 0 "
    "(host nano) and other values on ranks 1-2 (hosts nx, atlas); give every host the same model files, and call "
    "seed_everything before the module is made.",
    _adapters: "The ranks do not have the same model: the shape of "
    "model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight is [2,16] on ranks 0, 2 (hosts nano, "
    "atlas) and [3,16] on rank 1 (host nx); start every host with the same options and files.",
    _missing_host: "Stage 1 of the plan is for the host moon, where no processes of this run came up (hosts and their processes: "
    "nano (1), nx (1), atlas (1)); start one there for each (HYBRIDOP_HOST says what a host is called), or change `host` "
    "in the plan.",
    _small_host: "Stages 1, 2 of the plan are for the host nano, where 1 process of this run came up (hosts and their processes: "
    "nano (1), nx (1), atlas (1)); start one there for each (HYBRIDOP_HOST says what a host is called), or change `host` "
    "in the plan.",
}


def _everything() -> tuple[list[Run], list[str]]:
    rank = int(os.environ["RANK"])
    os.environ["HYBRIDOP_HOST"] = HOSTS[rank]
    runs = [fit(Job(strategy={"plan": plan}, train=TRAIN)) for plan, _ in PLANS.values()]
    said = []
    for case in REFUSED:
        try:
            case(rank)
        except Exception as error:
            said.append(str(error))
        else:
            said.append("nothing was refused")
    return runs, said


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return run_ranks(_everything, 3)


def test_the_plan_decides_which_rank_is_which_stage_and_that_changes_nothing(results: list[Any]) -> None:
    reference: Run = results[0][0][0]
    assert len(set(reference.losses)) == 2
    for number, (_, rank_of_stage) in enumerate(PLANS.values()):
        runs = [runs[number] for runs, _ in results]
        assert [runs[rank].stage for rank in rank_of_stage] == [0, 1, 2]
        for run in runs:
            assert run.losses == reference.losses
            assert run.parameters.keys() == reference.parameters.keys()
            for name, parameter in run.parameters.items():
                assert torch.equal(parameter, reference.parameters[name])


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=[case.__name__ for case in REFUSED])
def test_ranks_that_do_not_have_the_same_say_so_in_one_sentence(results: list[Any], case: int) -> None:
    expected = list(REFUSED.values())[case]

    assert [said[case] for _, said in results] == [expected] * 3


def test_a_rank_computes_on_the_device_of_its_own_stage() -> None:
    plan = even_plan(blocks=2, stages=2)
    stages = (plan.stages[0], dataclasses.replace(plan.stages[1], device="cuda:1"))
    strategy = HybridOPStrategy(dataclasses.replace(plan, stages=stages))
    strategy._rank_of_stage = [1, 0]

    assert strategy.compute_device == torch.device("cuda:1")
