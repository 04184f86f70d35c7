"""The example script is an ordinary one: it runs as it is, and without the line that knows of a pipeline."""

import csv
import sys
from pathlib import Path

import pytest

from lightning_hybridop.modules.random_models import random_model_folder
from tests.distributed.test_launch import ROOT, launch

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]

OURS = (
    "from lightning_hybridop import HybridOPStrategy\n",
    "        strategy=HybridOPStrategy(stages=2, zo_stages=1),\n",
)


def without_strategy(script: str) -> str:
    for line in OURS:
        assert script.count(line) == 1
        script = script.replace(line, "")
    return script


def test_the_example_runs_with_and_without_its_strategy(tmp_path: Path) -> None:
    with (tmp_path / "texts.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([f"number {i}", "even" if i % 2 == 0 else "odd"] for i in range(30))
    script = (ROOT / "examples" / "finetune.py").read_text(encoding="utf-8")
    assert "hybridop" not in without_strategy(script).lower()
    for name, text in (("with", script), ("without", without_strategy(script))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "finetune.py").write_text(text, encoding="utf-8")
        options = ["--model", str(random_model_folder(4)), "--steps", "3"]
        result = launch(
            [sys.executable, "finetune.py", "../texts.csv", *options], cwd=folder, PYTHONDONTWRITEBYTECODE=""
        )
        assert result.returncode == 0, result.stderr
        assert "`Trainer.fit` stopped: `max_steps=3` reached." in result.stderr
        assert len(list(folder.glob("lightning_logs/*/checkpoints/*.ckpt"))) == 1
