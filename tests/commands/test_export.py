"""`hybridop export`: what it writes and prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from lightning_hybridop.cli import main
from lightning_hybridop.planning.plan import even_plan, save_plan


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


MODEL = ("model=hf", "model.name=random-4-blocks", "rows=2", "length=8")


def test_it_writes_a_stage_and_prints_its_operators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    assert main(["export", *MODEL, "first=1", "last=3", f"folder={folder}"]) == 0
    printed = capsys.readouterr().out
    assert "random-4-blocks, blocks 1-2, 2 x 8 tokens" in printed
    (softmax,) = (line.split() for line in printed.splitlines() if line.strip().startswith("Softmax"))
    assert softmax == ["Softmax", "2", "2"]
    assert json.loads((folder / "stage.json").read_text())["blocks"] == [1, 3]
    assert (folder / "forward.onnx").is_file()
    assert (folder / "adjoint.onnx").is_file()


def test_it_takes_a_stage_of_a_plan(tmp_path: Path) -> None:
    save_plan(even_plan(blocks=4, stages=2, zo_stages=1), tmp_path / "plan.yaml")
    folder = tmp_path / "made"
    assert main(["export", *MODEL, f"plan={tmp_path / 'plan.yaml'}", "stage=1", f"folder={folder}"]) == 0
    assert json.loads((folder / "stage.json").read_text())["blocks"] == [2, 4]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("first=4", "first: found 4, expected a whole number of at most 3."),
        ("last=5", "last: found 5, expected a whole number of at most 4."),
        ("rows=0", "rows: found 0, expected a whole number of at least 1."),
        ("weights=int4", "weights: found 'int4', expected one of int8."),
        ("dtype=float64", "dtype: found 'float64', expected one of float32, bfloat16, float16."),
        ("model.lora_targets=q_proj", "model.lora_targets: found 'q_proj', expected a list of projections"),
        ("model.lora_dropout=0.1", "lora_dropout.default of block 0 drops values at random"),
    ],
)
def test_it_refuses_in_one_sentence(
    override: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *MODEL, f"folder={tmp_path / 'made'}", override]) == 1
    assert sentence in capsys.readouterr().err


def test_it_refuses_a_stage_that_the_model_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(even_plan(blocks=6, stages=2), tmp_path / "plan.yaml")
    options = (f"plan={tmp_path / 'plan.yaml'}", f"folder={tmp_path / 'made'}")
    assert main(["export", *MODEL, *options, "stage=1"]) == 1
    assert "stage 1 ends with block 5, but random-4-blocks has 4 blocks" in capsys.readouterr().err
    assert main(["export", *MODEL, *options, "stage=2"]) == 1
    assert "stage: found 2, expected a whole number of at most 1." in capsys.readouterr().err


def test_help_and_the_configuration_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--help"]) == 0
    assert "hybridop export model=smollm2 last=15" in capsys.readouterr().out
    assert main(["export", "--show"]) == 0
    assert "name: export" in capsys.readouterr().out
