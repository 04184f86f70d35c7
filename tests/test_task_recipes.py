"""The recipes of the tasks from end to end, with a tiny random model and data of a few rows."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.test_launch import script_environment

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]


def multirc_files(folder: Path) -> list[str]:
    for name, passages in (("train", 4), ("val", 2)):
        rows = [
            {
                "passage": {
                    "text": f"{name} {number} is a number",
                    "questions": [
                        {
                            "question": f"{number}?",
                            "answers": [{"text": str(number + k), "label": int(k == 0)} for k in range(3)],
                        }
                    ],
                }
            }
            for number in range(passages)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return [f"data.train={folder}/train.jsonl", f"data.test={folder}/val.jsonl"]


def squad_files(folder: Path) -> list[str]:
    articles = [
        {
            "title": title,
            "paragraphs": [
                {
                    "context": f"{title} is a letter of many",
                    "qas": [
                        {
                            "id": f"{title}{number}",
                            "question": f"which {number}?",
                            "answers": [{"text": "letter", "answer_start": 7}],
                        }
                        for number in range(5)
                    ],
                }
            ],
        }
        for title in "abcd"
    ]
    (folder / "squad.json").write_text(json.dumps({"data": articles}))
    return [f"data.train={folder}/squad.json", "data.held_out_articles=1"]


@pytest.mark.parametrize(
    ("recipe", "files", "options", "scores"),
    [
        (
            "multirc_smollm2",
            multirc_files,
            ["cluster=local_1zo_1bp"],
            {"accuracy", "f1", "f1a", "exact_match"},
        ),
        (
            "squad_smollm2",
            squad_files,
            [
                *("cluster=local_1bp", "data.answers=text"),
                *("model=texts", "model.generate=true", "model.longest_answer=3"),
            ],
            {"exact_match", "f1"},
        ),
    ],
)
def test_a_recipe_fits_and_scores(
    recipe: str,
    files: Callable[[Path], list[str]],
    options: list[str],
    scores: set[str],
    tmp_path: Path,
) -> None:
    command = [
        sys.executable,
        "-m",
        "lightning_hybridop",
        "fit",
        f"recipe={recipe}",
        *files(tmp_path),
        *options,
    ]
    command += [
        "model.name=random-4-blocks",
        "model.blocks=4",
        "cluster=local_1zo_1bp",
        "trainer.max_steps=2",
    ]
    run = subprocess.run(
        [*command, f"folder={tmp_path}/run"],
        cwd=ROOT,
        env=script_environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["after"].keys() == {f"val_{score}" for score in scores | {"loss"}}
    assert "held-out loss" in run.stdout
    assert "exact match" in run.stdout
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        assert sum(bool(row.get("train_loss")) for row in csv.DictReader(file)) == 2
