"""Processes that do not have the same say so in one sentence, the same on every rank."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from lightning_hybridop.pipeline import agreement
from lightning_hybridop.pipeline.agreement import (
    AgreementError,
    check_facts,
    check_values,
    check_versions,
    compared_versions,
    model_facts,
    versions,
)
from lightning_hybridop.pipeline.weights import await_weights, stored_tensors
from tests.distributed.harness import run_ranks

SAME = {
    "python": "3.11.4",
    "torch": "2.13.0+cpu",
    "lightning": "2.6.6",
    "transformers": "5.24.0",
    "peft": "0.21.2",
    "lightning-hybridop": "0.1.0, sources 0a1b2c3d",
}


def compared(**changed: str) -> tuple[list[str], list[str]]:
    """Compare three ranks on two hosts, the last of which has something else."""
    other = {**SAME, **{name.replace("_", "-"): value for name, value in changed.items()}}
    return compared_versions(["nano", "nano", "nx"], [SAME, SAME, other])


def test_equal_versions_are_not_mentioned() -> None:
    assert compared() == ([], [])


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("python", "3.11.9"),
        ("torch", "2.13.1+cu126"),
        ("torch", "2.13.0a0+872d972e41.nv24.08"),
        ("lightning", "2.6.4"),
        ("transformers", "5.24.1"),
        ("peft", "0.21.0"),
    ],
)
def test_another_patch_level_or_build_is_a_notice(name: str, version: str) -> None:
    assert compared(**{name: version}) == (
        [],
        [f"{name} is {SAME[name]} on ranks 0-1 (host nano) and {version} on rank 2 (host nx)"],
    )


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("python", "3.12.1"),
        ("torch", "2.12.0+cpu"),
        ("lightning", "2.7.0"),
        ("transformers", "4.9.0"),
        ("peft", "not installed"),
        ("lightning_hybridop", "0.1.0, sources ffffffff"),
    ],
)
def test_another_minor_version_is_refused_and_so_is_other_code_of_this_package(
    name: str, version: str
) -> None:
    refused, noticed = compared(**{name: version})
    shown = name.replace("_", "-")

    assert refused == [f"{shown} is {SAME[shown]} on ranks 0-1 (host nano) and {version} on rank 2 (host nx)"]
    assert noticed == []


def test_a_wheel_and_a_checkout_of_the_same_code_agree() -> None:
    refused, noticed = compared(lightning_hybridop="not installed, sources 0a1b2c3d")

    assert not refused
    assert len(noticed) == 1


def test_own_versions_are_known() -> None:
    found = versions()

    assert list(found) == list(SAME)
    assert found["torch"].startswith(torch.__version__.partition("+")[0])
    assert len(found["lightning-hybridop"].rpartition(" ")[2]) == 8


def _both(action: Callable[[int], None]) -> str:
    try:
        action(int(os.environ["RANK"]))
    except AgreementError as error:
        return str(error)
    return "no difference"


class Model(nn.Module):
    def __init__(self, *, width: int = 20, trained: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(3, width, bias=False)
        self.second = nn.Linear(width, 2).requires_grad_(trained)


def _model(seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options)


def _awaited(file: Path) -> Model:
    """Return the model with weights that are still to be read from the file."""
    with torch.device("meta"):
        model = Model()
    assert await_weights(model, stored_tensors([file])) == []
    return model


def _compare(folder: str) -> list[str]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["HYBRIDOP_HOST"] = "nano" if rank < 2 else "nx"
    store = dist.TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0, timeout=timedelta(seconds=20)
    )
    said = [
        _both(lambda rank: check_versions(dist.PrefixStore("same", store), rank=rank, size=size)),
    ]
    real = agreement.versions
    agreement.versions = lambda: {**real(), "peft": "9.9.9" if rank == 2 else "0.21.2"}
    said.append(_both(lambda rank: check_versions(dist.PrefixStore("other", store), rank=rank, size=size)))
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size)

    def facts(rank: int) -> None:
        check_facts({"epochs": "3", "steps": str(7 if rank == 1 else 8)}, "configuration")

    def partly_known(rank: int) -> None:
        check_facts({"epochs": "3"} | ({} if rank == 1 else {"file": "7"}), "configuration")

    def shapes(rank: int) -> None:
        check_facts(model_facts(_model(width=5 if rank == 2 else 20)), "model")

    def trained(rank: int) -> None:
        check_facts(model_facts(_model(trained=rank != 0)), "model")

    def rounded(rank: int) -> None:
        # A phone's processor, a graphics card and a laptop with its last bits otherwise.
        model = _model()
        if rank == 1:
            model.first.bfloat16()
        with torch.no_grad():
            model.first.weight *= 1 + 1e-6 * rank
        check_values(model)

    def seeded_otherwise(rank: int) -> None:
        check_values(_model(seed=1 if rank == 2 else 0))

    def from_files(rank: int) -> None:
        check_values(_awaited(Path(folder) / "one.safetensors"))

    def from_another_file(rank: int) -> None:
        check_values(_awaited(Path(folder) / ("other.safetensors" if rank == 1 else "one.safetensors")))

    def file_and_memory(rank: int) -> None:
        check_values(_awaited(Path(folder) / "one.safetensors") if rank else _model())

    checks = (
        facts,
        partly_known,
        shapes,
        trained,
        rounded,
        seeded_otherwise,
        from_files,
        from_another_file,
        file_and_memory,
    )
    said += [_both(check) for check in checks]
    dist.barrier()
    return said


@pytest.mark.distributed
def test_every_rank_says_the_same_about_what_differs(tmp_path: Path) -> None:
    save_file(_model().state_dict(), tmp_path / "one.safetensors")
    save_file(_model(seed=1).state_dict(), tmp_path / "other.safetensors")

    first, *others = run_ranks(_compare, 3, str(tmp_path))

    assert all(said == first for said in others)
    same = "no difference"
    values = "give every host the same model files, and call seed_everything before the module is made."
    options = "start every host with the same options and files."
    assert first == [
        same,
        "The hosts do not run the same: peft is 0.21.2 on ranks 0-1 (host nano) and 9.9.9 on rank 2 (host nx). Install the "
        "same versions on every host.",
        f"The ranks do not have the same configuration: steps is 8 on ranks 0, 2 (hosts nano, nx) and 7 on rank 1 (host nano); "
        f"{options}",
        same,
        "The ranks do not have the same model: the shape of first.weight is [20,3] on ranks 0-1 (host nano) and [5,3] on rank 2 "
        f"(host nx); {options}",
        "The ranks do not have the same model: the number of trainable parameters is 1 on rank 0 (host nano) and 3 on ranks 1-2 "
        f"(hosts nano, nx); {options}",
        same,
        "The ranks do not have the same model: first.weight has some values on ranks 0-1 (host nano) and other values on rank 2 "
        f"(host nx); {values}",
        same,
        "The ranks do not have the same model: first.weight has some values on ranks 0, 2 (hosts nano, nx) and other values on "
        f"rank 1 (host nano); {values}",
        same,
    ]


def _notice() -> list[str]:
    import warnings

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        "127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0, timeout=timedelta(seconds=20)
    )
    agreement.versions = lambda: {"torch": f"2.13.{rank}"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_versions(store, rank=rank, size=size)
    return [str(warning.message) for warning in caught]


@pytest.mark.distributed
def test_a_notice_is_given_once_in_a_run() -> None:
    first, second = run_ranks(_notice, 2)

    assert len(first) == 1
    assert "torch is 2.13.0 on rank 0" in first[0]
    assert second == []
