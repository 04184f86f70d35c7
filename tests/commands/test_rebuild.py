"""`hybridop rebuild` says in one sentence what is missing, runs nothing that a file names, and equals a formula."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_hybridop.cli import main
from lightning_hybridop.estimation.directions import DirectionKey, direction
from lightning_hybridop.estimation.scalar_log import Mark, ScalarLogWriter, Start, StepSettings, Update
from lightning_hybridop.pipeline.rebuilding import checksum

NAMES = ("model.first", "model.second", "model.last")
SGD = "torch.optim.sgd.SGD"


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(3, 4, generator=generator) for name in NAMES}


def key(step: int, query: int = 0) -> DirectionKey:
    return DirectionKey(seed=11, step=step, micro_batch=0, query=query)


def make_run(folder: Path, *, optimizer: str = SGD, marked: dict[str, Tensor] | None = None) -> Path:
    """Write a run of three steps with a checkpoint at 1; its first two parameters are those of a zo stage."""
    (folder / "checkpoints").mkdir(parents=True)
    values = parameters()
    made = torch.optim.SGD([torch.nn.Parameter(value) for value in values.values()], lr=9.0)
    checkpoint = {"global_step": 1, "state_dict": values, "optimizer_states": [made.state_dict()]}
    torch.save(checkpoint, folder / "checkpoints" / "step-1.ckpt")
    writer = ScalarLogWriter(folder / "scalars.log", seed=11, distribution="normal", goes_on=False)
    stages = {0: NAMES[:2]}
    writer.start(Start(step=0, mini_batch=0, optimizer=optimizer, groups=(NAMES,), stages=stages))
    for step in (1, 2, 3):
        writer.mini_batch(step - 1, ((key(step - 1), 0.5), (key(step - 1, 1), -0.25 * step)))
        settings = StepSettings(share=0.5, learning_rates=(0.1 * step,), options="[{}]")
        writer.update(Update(step=step, mini_batches=(step - 1,), settings=settings))
        if step == 1:
            own = {name: values[name] for name in NAMES[:2]}
            writer.mark(Mark(step=1, checksums={0: checksum(own)}, stages=stages))
        if step == 3 and marked is not None:
            writer.mark(Mark(step=3, checksums={0: checksum(marked)}, stages=stages))
    writer.close()
    return folder


def by_formula(step: int) -> dict[str, Tensor]:
    """Return what steps 2 to `step` make of the zo stage's parameters, in float64."""
    found = {name: value.double() for name, value in parameters().items() if name in NAMES[:2]}
    for taken in range(2, step + 1):
        for name, value in found.items():
            gradient = 0.5 * direction(key(taken - 1), name, value.shape).double()
            gradient -= 0.25 * taken * direction(key(taken - 1, 1), name, value.shape).double()
            found[name] = value - 0.1 * taken * 0.5 * gradient
    return found


def failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["rebuild", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("step", [1, 2, 3])
def test_what_comes_out_is_what_the_formula_says(tmp_path: Path, step: int) -> None:
    run = make_run(tmp_path / "run")
    assert main(["rebuild", f"folder={run}", f"step={step}"]) == 0
    found = load_file(run / "rebuilt.safetensors")
    assert found.keys() == set(NAMES[:2])
    for name, value in by_formula(step).items():
        torch.testing.assert_close(found[name].double(), value, atol=1e-6, rtol=1e-6)


def test_the_table_says_what_was_replayed_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    (run / "scalars.log").write_bytes((run / "scalars.log").read_bytes() + b"\x02\x00")
    assert main(["rebuild", f"folder={run}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "steps replayed 2 (from 1 to 3) mini-batches 2 directions 4" in said
    # 13 + 4 + 2 * 14 of a mini-batch, 13 + 20 + 8 + 4 of an update.
    assert "bytes of log per step 90 bytes of log per direction 45.0 checks passed 1 (step 1)" in said
    assert "scalars.log ends in an incomplete record, which was left out." in said


def test_other_parameters_than_the_run_had_are_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", marked=parameters() | {NAMES[0]: torch.zeros(3, 4)})
    assert "At step 3 the parameters of stage 0 are not those that the run had" in failure(
        [f"folder={run}"], capsys
    )
    assert not (run / "rebuilt.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["folder={run}", "step=4"], "The log lacks step 4, so step 4 cannot be rebuilt from step 1"),
        (
            ["folder={run}", "step=0"],
            "has no checkpoint of step 0 or an earlier one; pass checkpoint=<file>.",
        ),
        (["folder={run}", "step=-1"], "step: found -1, expected a whole number of at least 0."),
        (["folder={run}", "step=last"], "step: found 'last', expected a whole number of at least 0."),
        (["folder={run}/none"], "there is no folder"),
        (["folder={run}/checkpoints"], "scalars.log cannot be read (No such file or directory)"),
        (["folder={run}", "checkpoint={run}/none.ckpt"], "is not a whole checkpoint (there is no such file)"),
        ([], "folder has no value; pass folder=<value>."),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(
    tmp_path: Path, arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    assert expected in failure([argument.format(run=run) for argument in arguments], capsys)


@pytest.mark.parametrize(
    "name",
    ["os.system", "torch.optim.sgd.system", "torch.optim.Optimizer", "torch.optim.lbfgs.LBFGS", "SGD", ""],
)
def test_a_log_can_name_only_optimizers_of_torch(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", optimizer=name)
    assert f"The run's optimizer is {name!r}, but this command knows those of torch alone" in failure(
        [f"folder={run}"], capsys
    )


def _without(checkpoint: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in checkpoint.items() if name != key}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda c: _without(c, "optimizer_states"),
            "has no optimizer state; pass one that was saved without",
        ),
        (
            lambda c: {**c, "state_dict": _without(c["state_dict"], NAMES[2])},
            f"lacks {NAMES[2]}, which the run",
        ),
        (lambda c: {**c, "optimizer_states": [{"state": {}, "param_groups": []}]}, "is another optimizer's"),
        (
            lambda c: {**c, "state_dict": {**c["state_dict"], NAMES[0]: torch.ones(3, 4)}},
            "At step 1 the param",
        ),
        (lambda c: {**c, "callbacks": Path}, "which could run code while it is loaded"),
    ],
)
def test_another_runs_checkpoint_is_refused(
    tmp_path: Path, change: Any, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    path = run / "checkpoints" / "step-1.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    torch.save(change(checkpoint), run / "changed.ckpt")
    assert expected in failure([f"folder={run}", f"checkpoint={run}/changed.ckpt"], capsys)
