"""`resume=auto`: which folder, which checkpoint, and what had been logged."""

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from lightning_hybridop.commands import resuming
from lightning_hybridop.commands.configuration import ConfigurationError, compose_runs


def checkpoint(path: Path, step: int, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": step, "state_dict": {"weight": torch.ones(3)}, **more}, path)
    return path


def configured(folder: Path, *overrides: str) -> DictConfig:
    return compose_runs("fit", ["recipe=quickstart", *overrides, f"folder={folder}"])[0].config


def saved(folder: Path, *overrides: str) -> DictConfig:
    config = configured(folder, *overrides)
    folder.mkdir(parents=True)
    OmegaConf.save(config, folder / resuming.CONFIGURATION)
    return config


def test_the_newest_checkpoint_is_that_of_the_latest_step(tmp_path: Path) -> None:
    checkpoint(tmp_path / "recovery" / "step-20.ckpt", 20)
    checkpoint(tmp_path / "checkpoints" / "last.ckpt", 12)

    assert resuming.newest_checkpoint(tmp_path) == resuming.Found(
        path=tmp_path / "recovery" / "step-20.ckpt", step=20
    )
    assert resuming.newest_checkpoint(tmp_path / "nothing") is None


def test_broken_and_foreign_checkpoints_are_left_out_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "recovery" / "step-5.ckpt", 5)
    torn = checkpoint(tmp_path / "recovery" / "step-9.ckpt", 9)
    torn.write_bytes(torn.read_bytes()[:-200])
    (tmp_path / "recovery" / "step-10.ckpt").write_text("no checkpoint")
    # One that would have to run code to be read.
    checkpoint(tmp_path / "recovery" / "step-11.ckpt", 11, somewhere=Path("somewhere"))
    torch.save([1, 2], tmp_path / "recovery" / "step-12.ckpt")

    found = resuming.newest_checkpoint(tmp_path)

    assert found is not None
    assert found.step == 5
    said = capsys.readouterr().out.splitlines()
    assert len([line for line in said if "is left out: " in line]) == 4


def test_an_unfinished_run_of_the_same_options_is_found_wherever_it_lies(tmp_path: Path) -> None:
    saved(tmp_path / "day" / "other", "trainer.max_steps=7")
    saved(tmp_path / "day" / "same")
    saved(tmp_path / "day" / "finished")
    (tmp_path / "day" / "finished" / resuming.SUMMARY).write_text("{}")
    config = configured(tmp_path / "day" / "new", "cluster=local_1zo_1bp", "strategy.micro_batches=2")

    assert resuming.unfinished_run(config, tmp_path) == tmp_path / "day" / "same"
    assert (
        resuming.unfinished_run(configured(tmp_path / "day" / "new", "model.learning_rate=0.5"), tmp_path)
        is None
    )


def test_a_run_that_is_still_going_on_is_left_to_itself(tmp_path: Path) -> None:
    saved(tmp_path / "day" / "same")
    config = configured(tmp_path / "day" / "new")
    script = (
        "import sys, time; from pathlib import Path; from lightning_hybridop.commands.resuming import hold; "
        "print(hold(Path(sys.argv[1])), flush=True); time.sleep(60)"
    )

    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "day" / "same")], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert resuming.unfinished_run(config, tmp_path) is None
        assert not resuming.hold(tmp_path / "day" / "same")
        other.kill()
    assert resuming.unfinished_run(config, tmp_path) == tmp_path / "day" / "same"


def test_other_hosts_are_no_other_run(tmp_path: Path) -> None:
    saved(tmp_path / "run")

    changed = configured(tmp_path / "run")
    OmegaConf.set_struct(changed, False)
    changed.hosts = {"hosts": [{"name": "nano"}]}
    assert resuming.differences(changed, tmp_path / "run") == []


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> None:
        with resuming.whole_file(path) as beside:
            beside.write_text("ne")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_learns_from_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    saved(tmp_path / "run")

    resuming.check_continues(
        configured(tmp_path / "run", "resume=auto", "cluster=local_4bp"), tmp_path / "run"
    )
    with pytest.raises(
        ConfigurationError,
        match=r"holds a run with another data\.batch_size, which resume=auto cannot go on with",
    ):
        resuming.check_continues(configured(tmp_path / "run", "data.batch_size=3"), tmp_path / "run")


@pytest.mark.parametrize("content", ["[1, 2]", "\x00", "{a: {b: [", "!!python/object:os.system {}"])
def test_a_folder_without_a_configuration_is_no_run_to_go_on_with(tmp_path: Path, content: str) -> None:
    config = configured(tmp_path / "new")
    (tmp_path / resuming.CONFIGURATION).write_text(content)

    assert resuming.unfinished_run(config, tmp_path) is None


def rows(path: Path) -> list[tuple[str, str]]:
    with path.open(newline="") as file:
        return [(row["step"], row["train_loss"]) for row in csv.DictReader(file)]


def test_what_was_logged_before_stands_in_front_of_what_comes_after(tmp_path: Path) -> None:
    metrics = tmp_path / resuming.METRICS
    metrics.write_text("step,train_loss\n0,4.0\n1,3.5\n2,3.0\n3,2.")
    resuming.set_metrics_aside(tmp_path, 2)
    assert not metrics.exists()
    # Interrupted again, with a column more.
    metrics.write_text("epoch,step,train_loss\n0,2,3.1\n0,3,2.9\n0,4,")
    resuming.set_metrics_aside(tmp_path, 4)
    metrics.write_text("step,train_loss\n4,2.7\n")

    resuming.join_metrics(tmp_path)

    assert rows(metrics) == [("0", "4.0"), ("1", "3.5"), ("2", "3.1"), ("3", "2.9"), ("4", "2.7")]
    assert not (tmp_path / resuming.METRICS_BEFORE).exists()
    resuming.join_metrics(tmp_path)
    assert len(rows(metrics)) == 5
