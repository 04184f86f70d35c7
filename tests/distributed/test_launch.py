"""The ways in which a script's processes are started: by the strategy itself, and by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import sys
import lightning
from lightning_hybridop import HybridOPStrategy
from tests.tiny import TinyModule, loader

module = TinyModule()
trainer = lightning.Trainer(
    strategy={strategy},
    accelerator="cpu",
    {options}
    max_steps=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, loader(16))
with open(sys.argv[1] + f"/rank_{{trainer.global_rank}}", "w") as file:
    file.write(f"{{trainer.world_size}} {{trainer.global_step}} {{trainer.callback_metrics['train_loss']:.6f}}")
{ending}
"""


def run_script(
    folder: Path, strategy: str, *, options: str = "", ending: str = "", torchrun: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the script as a user would and wait until it and all its children are gone (its pipe is closed)."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(strategy=strategy, options=options, ending=ending))
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    launcher = []
    if torchrun is not None:
        launcher = [
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={torchrun}",
            f"--master-port={free_port()}",
        ]
    # Waits for the end of the pipe, that is for every process that inherited it.
    return subprocess.run(
        [sys.executable, *launcher, str(script), str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )


def answers(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("rank_*"))]


@pytest.mark.parametrize("torchrun", [None, 3], ids=["by itself", "torchrun"])
def test_a_script_runs_on_all_stages(tmp_path: Path, torchrun: int | None) -> None:
    done = run_script(tmp_path, "HybridOPStrategy(stages=3, zo_stages=1, seed=1)", torchrun=torchrun)

    assert done.returncode == 0, done.stdout
    found = answers(tmp_path)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert found[0].startswith("3 2 ")


def test_the_strategy_has_a_name(tmp_path: Path) -> None:
    done = run_script(tmp_path, '"hybridop"', options="devices=2,")

    assert done.returncode == 0, done.stdout
    assert [answer.split()[0] for answer in answers(tmp_path)] == ["2", "2"]


def test_a_failing_rank_ends_the_script(tmp_path: Path) -> None:
    ending = "if trainer.global_rank == 1: raise RuntimeError('rank 1 gave up')"

    done = run_script(tmp_path, "HybridOPStrategy(stages=3, seed=1)", ending=ending, torchrun=3)

    assert done.returncode != 0
    assert "rank 1 gave up" in done.stdout
