"""Whatever happens to a run, at whatever moment: no process hangs, no checkpoint is broken, and it goes on to the same end."""

import os
import shutil
import subprocess
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hybridop.checkpoints import check_whole
from tests.distributed import chaos
from tests.network import namespaces

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]

RUNS = int(os.environ.get("HYBRIDOP_CHAOS_RUNS", "4"))
"""One of each kind of trouble; more are drawn when more are asked for."""


@cache
def no_namespaces() -> str | None:
    return namespaces.why_not()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    return cache(lambda stages: chaos.undisturbed(folder / str(stages), stages))


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_run_that_something_happens_to_ends_and_goes_on(
    seed: int, tmp_path: Path, undisturbed: Any
) -> None:
    trouble = chaos.random_trouble(seed)
    if trouble.kind == "unplug" and (reason := no_namespaces()) is not None:
        pytest.skip(reason)
    expected = undisturbed(trouble.stages)
    folder = tmp_path / "run"
    folder.mkdir()
    disk: Any = nullcontext()
    if trouble.kind == "full disk":
        if os.geteuid() != 0:
            pytest.skip("a small disk needs root")
        disk = chaos.small_disk(folder / "disk")
    try:
        with disk:
            taken = chaos.interrupted(folder, trouble)
            for path in folder.glob("disk*/*/*.ckpt"):
                check_whole(path)
                torch.load(path, weights_only=True)
            reached = chaos.resumed(folder, trouble.stages)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")
    except TimeoutError as error:
        raise AssertionError(f"{trouble}: {error}\n{chaos.log_of(folder)}") from error

    print(f"{trouble}: all gone after {taken:.1f} s")
    assert reached["loss"] == expected["loss"], trouble
    assert reached["trained"].keys() == expected["trained"].keys()
    for name, parameter in reached["trained"].items():
        assert torch.equal(parameter, expected["trained"][name]), (trouble, name)


def test_a_run_goes_on_without_the_disk_of_rank_0(tmp_path: Path, undisturbed: Any) -> None:
    trouble = chaos.Trouble(kind="kill", stages=3, rank=0, step=17, delay=0.0)
    folder = tmp_path / "run"
    folder.mkdir()

    chaos.interrupted(folder, trouble, copies=True)
    shutil.rmtree(folder / "disk")
    reached = chaos.resumed(folder, trouble.stages)

    expected = undisturbed(trouble.stages)
    assert (folder / "disk_of_rank_1").exists()
    assert reached["loss"] == expected["loss"]
    assert all(torch.equal(value, expected["trained"][name]) for name, value in reached["trained"].items())
