"""What zo stages have learnt since a checkpoint can be had again, bit for bit, from the scalars that were logged."""

import math
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from safetensors import safe_open
from torch import Tensor, nn

from lightning_hybridop import HybridOPMixin
from lightning_hybridop.callbacks import ScalarLog
from lightning_hybridop.cli import main
from lightning_hybridop.estimation.scalar_log import read_scalar_log
from lightning_hybridop.pipeline.rebuilding import RebuildError, Rebuilt, rebuild
from lightning_hybridop.planning.plan import even_plan
from tests.distributed.runs import Batch, Job, answers_loader, run_jobs
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]


class CyclingAdam(TinyModule):
    """Two groups, of which a scheduler moves rates and momentum at every step; weight decay in one."""

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [{"params": trained[1::2]}, {"params": trained[::2], "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OwnDecisions(HybridOPMixin, TinyModule):
    """Momentum, and its own limits and rates for zo stages."""

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01)

    def learning_rate_scale(self, role: str) -> float | None:
        return 0.3 if role == "zo" else None

    def gradient_clip_val(self, role: str) -> float | None:
        return 0.02 if role == "zo" else None


class LosesDirections(TinyModule):
    """One mini-batch has no usable direction."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[override]
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss * math.inf if batch_idx == 9 and not torch.is_grad_enabled() else loss


class Stages(Callback):
    """Keeps what the stages themselves have when training ends, before they tell each other."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if strategy.role == "zo":
            own = strategy._assembly.engine.zo_parameters
            values = {name: parameter.detach().clone() for name, parameter in own.items()}
            torch.save(values, self.path / f"rank_{trainer.global_rank}.pt")


class ForgetsHost(Callback):
    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        del os.environ["HYBRIDOP_HOST"]


GARBAGE = b"something else than a log" * 9
ZO_AND_BP = {"stages": 4, "zo_stages": 2, "micro_batches": 2, "seed": 5}
CASES: dict[str, dict[str, Any]] = {
    # Antithetic pairs, early exit, clipping by norm, a scale of zo rates.
    "norm": {
        "strategy": {
            **ZO_AND_BP,
            "queries": 2,
            "exit_queries": 2,
            "difference": "antithetic",
            "zo_lr_scale": 0.1,
        },
        "module": CyclingAdam,
        "train": partial(loader, 48, batch_size=4),
        "trainer": {"gradient_clip_val": 0.5},
    },
    # A direction for each row, accumulation over two mini-batches (the last step takes one), clipping by value.
    "rows": {
        "strategy": {
            **ZO_AND_BP,
            "estimator": "boundary",
            "directions": "row",
            "distribution": "rademacher",
            "shrinkage": True,
        },
        "module": OwnDecisions,
        "train": partial(loader, 92, batch_size=4),
        "trainer": {"gradient_clip_algorithm": "value", "accumulate_grad_batches": 2, "gradient_clip_val": 1},
    },
    # Two pipelines side by side; Adam; a mini-batch without any usable direction.
    "replicas": {
        "strategy": {
            "stages": 2,
            "zo_stages": 1,
            "micro_batches": 1,
            "replicas": 2,
            "directions": "minibatch",
            "seed": 7,
        },
        "module": LosesDirections,
        "train": partial(answers_loader, [3, 1, 2, 4] * 12, batch_size=4),
    },
}

_PLAN = even_plan(
    blocks=6, stages=4, zo_stages=2, micro_batches=2, queries=2, exit_queries=2, difference="antithetic"
)
# The same, but with the last stage on rank 0, which writes the log.
FIRST_RANK_LAST = {
    "plan": replace(
        _PLAN, stages=tuple(replace(stage, host=f"host{3 - i}") for i, stage in enumerate(_PLAN.stages))
    ),
    "zo_lr_scale": 0.1,
    "seed": 5,
}


def _job(folder: Path, case: dict[str, Any], **more: Any) -> Job:
    return Job(
        callbacks=partial(_callbacks, folder),
        **{**case, **more, "trainer": {"enable_checkpointing": True, **case.get("trainer", {})}},
    )


def _callbacks(folder: Path) -> list[Callback]:
    saving = ModelCheckpoint(folder / "checkpoints", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    return [saving, ScalarLog(folder / "scalars.log"), Stages(folder)]


def _callbacks_on_hosts(folder: Path) -> list[Callback]:
    """Return those of a run that takes each process for a host."""
    os.environ["HYBRIDOP_HOST"] = f"host{os.environ['RANK']}"
    # What it saves in the place of the weights is their average.
    return [EMAWeightAveraging(), *_callbacks(folder), ForgetsHost()]


def _full_disk() -> list[Callback]:
    return [ScalarLog("/dev/full")]


def _callbacks_in_copy(original: Path, folder: Path) -> list[Callback]:
    """Return those of a run that goes on in a folder like that of another one."""
    if os.environ["RANK"] == "0":
        shutil.copytree(original, folder)
    return _callbacks(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one run of each case, and some that go on from step 8 of one."""
    parent = tmp_path_factory.mktemp("runs")
    for name in (*CASES, "elsewhere", "adjoint"):
        (parent / name).mkdir()
    jobs = [_job(parent / name, case) for name, case in CASES.items()]
    norm = CASES["norm"]
    resumed = _job(
        parent / "resumed",
        {**norm, "strategy": {**norm["strategy"], "zo_stages": 1}},
        checkpoint=str(parent / "norm" / "checkpoints" / "step=8.ckpt"),
    )
    jobs.append(replace(resumed, callbacks=partial(_callbacks_in_copy, parent / "norm", parent / "resumed")))
    exact = {**norm["strategy"], "estimator": "adjoint", "exit_queries": 0, "difference": "forward"}
    jobs.append(
        replace(
            _job(parent / "elsewhere", {**norm, "strategy": FIRST_RANK_LAST}),
            callbacks=partial(_callbacks_on_hosts, parent / "elsewhere"),
        )
    )
    # A log that is none, where a run goes on; a disk that is full.
    goes_on = str(parent / "norm" / "checkpoints" / "step=8.ckpt")
    (parent / "aside").mkdir()
    (parent / "aside" / "scalars.log").write_bytes(GARBAGE)
    jobs.append(_job(parent / "aside", norm, checkpoint=goes_on))
    unsaved = {**norm, "trainer": {**norm["trainer"], "enable_checkpointing": False}}
    jobs.append(replace(_job(parent / "full", unsaved, checkpoint=goes_on), callbacks=_full_disk))
    jobs.append(_job(parent / "adjoint", {**norm, "strategy": exact, "train": partial(loader, 8)}))
    runs = run_jobs(jobs, 4)
    assert [run[0].global_step for run in runs[:-1]] == [12] * (len(jobs) - 1)
    return parent


def real(folder: Path) -> dict[str, Tensor]:
    """Return what the zo stages held at the end of a run; replicas of a stage hold the same."""
    values: dict[str, Tensor] = {}
    for path in sorted(folder.glob("rank_*.pt")):
        own = torch.load(path, weights_only=True)
        for name in own.keys() & values.keys():
            assert torch.equal(own[name], values[name])
        values |= own
    return values


def from_checkpoint(
    folder: Path, step: int, case: dict[str, Any]
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Return the parameters of a checkpoint and their optimizer, made by the module itself."""
    module = case.get("module", TinyModule)()
    checkpoint = torch.load(folder / "checkpoints" / f"step={step}.ckpt", weights_only=True)
    module.load_state_dict(checkpoint["state_dict"], strict=False)
    made = module.configure_optimizers()
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    named = module.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}, optimizer


def replayed(folder: Path, case: str, *, to_step: int = 12) -> tuple[dict[str, nn.Parameter], Rebuilt]:
    parameters, optimizer = from_checkpoint(folder / case, 4, CASES[case])
    log = read_scalar_log(folder / case / "scalars.log")
    return parameters, rebuild(parameters, optimizer, log, from_step=4, to_step=to_step)


@pytest.mark.parametrize("case", CASES)
def test_what_zo_stages_learn_is_rebuilt_bit_for_bit(folder: Path, case: str) -> None:
    before, _ = from_checkpoint(folder / case, 4, CASES[case])
    parameters, rebuilt = replayed(folder, case)
    expected = real(folder / case)
    assert expected
    for name, value in expected.items():
        assert torch.equal(parameters[name], value), name
        assert not torch.equal(before[name], value), name
    assert rebuilt.steps == 8
    # That of step 12 is there where a checkpoint was made at the end.
    assert set(rebuilt.checked) == {4, 8, 12}


def test_the_log_has_what_the_cases_are_about(folder: Path) -> None:
    norm = read_scalar_log(folder / "norm" / "scalars.log")
    settings = [norm.updates[step].settings for step in (5, 6)]
    assert all(clip.norm > clip.limit == 0.5 for one in settings for clip in one.clippings)
    assert settings[0].learning_rates != settings[1].learning_rates
    assert settings[0].options != settings[1].options
    rows = read_scalar_log(folder / "rows" / "scalars.log")
    assert [len(rows.updates[step].mini_batches) for step in (11, 12)] == [2, 1]
    assert rows.updates[1].settings.clippings[0].limit == 0.02
    assert {key.row for key, _ in rows.mini_batches[0]} == {0, 1}
    replicas = read_scalar_log(folder / "replicas" / "scalars.log")
    assert [len(replicas.mini_batches[number]) for number in (8, 9)] == [1, 0]
    # A direction takes 14 bytes, a step not much more.
    assert rows.bytes_of_steps[2] < 8 * 14 + 150


def test_a_rank_that_back_propagates_logs_what_zo_stages_do(folder: Path) -> None:
    here, elsewhere = (read_scalar_log(folder / name / "scalars.log") for name in ("norm", "elsewhere"))
    assert elsewhere.updates == here.updates
    assert elsewhere.mini_batches == here.mini_batches
    assert elsewhere.marks == here.marks
    assert {path.name for path in (folder / "elsewhere").glob("rank_*.pt")} == {"rank_2.pt", "rank_3.pt"}


def test_averaged_weights_are_not_taken_for_those_that_steps_go_on_from(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "elsewhere"
    checkpoint = torch.load(run / "checkpoints" / "step=4.ckpt", weights_only=True)
    name = next(iter(real(run)))
    assert not torch.equal(checkpoint["state_dict"][name], checkpoint["current_model_state"][name])
    assert main(["rebuild", f"folder={run}", f"checkpoint={run}/checkpoints/step\\=4.ckpt"]) == 0
    assert "checks passed 3 (step 4, 8, 12)" in " ".join(capsys.readouterr().out.split())


def test_a_changed_coefficient_is_noticed_at_the_next_mark(folder: Path) -> None:
    parameters, optimizer = from_checkpoint(folder / "norm", 4, CASES["norm"])
    log = read_scalar_log(folder / "norm" / "scalars.log")
    (key, coefficient), *others = log.mini_batches[5]
    log.mini_batches[5] = ((key, coefficient * 1.0001), *others)
    with pytest.raises(
        RebuildError, match="At step 8 the parameters of stage 0 are not those that the run had"
    ):
        rebuild(parameters, optimizer, log, from_step=4, to_step=12)


def test_a_checkpoint_of_another_run_is_noticed_before_the_first_step(folder: Path) -> None:
    parameters, optimizer = from_checkpoint(folder / "norm", 4, CASES["norm"])
    with torch.no_grad():
        next(iter(parameters.values())).add_(1e-6)
    log = read_scalar_log(folder / "norm" / "scalars.log")
    with pytest.raises(RebuildError, match="At step 4 the parameters"):
        rebuild(parameters, optimizer, log, from_step=4, to_step=5)


def test_steps_that_the_log_lacks_are_refused(folder: Path) -> None:
    parameters, optimizer = from_checkpoint(folder / "norm", 4, CASES["norm"])
    log = read_scalar_log(folder / "norm" / "scalars.log")
    with pytest.raises(RebuildError, match="lacks step 13"):
        rebuild(parameters, optimizer, log, from_step=4, to_step=14)
    with pytest.raises(RebuildError, match="Step 3 lies before the checkpoint's, 4"):
        rebuild(parameters, optimizer, log, from_step=4, to_step=3)


def test_a_run_that_goes_on_by_another_plan_is_rebuilt_from_where_it_went_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "resumed"
    assert main(["rebuild", f"folder={run}", f"checkpoint={run}/checkpoints/step\\=4.ckpt"]) == 1
    assert "From step 8 on the run had other zo stages" in capsys.readouterr().err
    (run / "checkpoints" / "step=12.ckpt").unlink()
    assert main(["rebuild", f"folder={run}"]) == 0
    expected = torch.load(run / "rank_0.pt", weights_only=True)
    with safe_open(run / "rebuilt.safetensors", "pt") as file:
        assert file.metadata() == {"step": "12"}
        assert set(file.keys()) == expected.keys()
        for name, value in expected.items():
            assert torch.equal(file.get_tensor(name), value), name
    first = read_scalar_log(folder / "norm" / "scalars.log")
    later = read_scalar_log(run / "scalars.log")
    assert later.mini_batches[7] == first.mini_batches[7]
    assert later.mini_batches[8] != first.mini_batches[8]


@pytest.mark.parametrize("case", CASES)
def test_the_command_needs_nothing_but_the_folder(
    folder: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / case
    assert main(["rebuild", f"folder={run}", f"checkpoint={run}/checkpoints/step\\=4.ckpt", "step=11"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "steps replayed 7 (from 4 to 11)" in said
    assert "checks passed 2 (step 4, 8)" in said
    parameters, _ = replayed(folder, case, to_step=11)
    with safe_open(run / "rebuilt.safetensors", "pt") as file:
        names = real(run).keys()
        assert set(file.keys()) == names
        for name in names:
            assert torch.equal(file.get_tensor(name), parameters[name]), name


def test_a_log_that_cannot_be_gone_on_with_is_put_aside(folder: Path) -> None:
    run = folder / "aside"
    assert (run / "scalars.log.unusable").read_bytes() == GARBAGE
    log = read_scalar_log(run / "scalars.log")
    assert (log.starts[0].step, log.last_step) == (8, 12)
    parameters, optimizer = from_checkpoint(folder / "norm", 8, CASES["norm"])
    assert rebuild(parameters, optimizer, log, from_step=8, to_step=12).checked == (12,)
    for name, value in real(folder / "norm").items():
        assert torch.equal(parameters[name], value), name
    with pytest.raises(
        RebuildError, match="The log begins at step 8; take a checkpoint of that step or a later"
    ):
        rebuild(parameters, optimizer, log, from_step=4, to_step=12)


def test_without_an_estimate_nothing_is_logged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not (folder / "adjoint" / "scalars.log").exists()
    assert main(["rebuild", f"folder={folder / 'adjoint'}"]) == 1
    assert "scalars.log cannot be read (No such file or directory)" in capsys.readouterr().err
