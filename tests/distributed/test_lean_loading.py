"""A pipeline whose stages read only their own weights trains as one whose stages read the whole model."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lightning_hybridop import HybridOPStrategy, Plan, Stage
from lightning_hybridop.callbacks import AdapterCheckpoint
from lightning_hybridop.pipeline.weights import WeightError
from tests.distributed.harness import run_ranks
from tests.distributed.runs import Job, Run, fit, merged_gradients, run_jobs, trainer_for
from tests.lean_models import FolderModule, Loading, gpt2_config, llama_config, save_random
from tests.tiny import loader

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    # GPT-2 stores transposed linear layers; peft notices and does the right thing.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": llama_config(),
    "tied": llama_config(tied=True),
    "gpt2": gpt2_config(),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    saved = {name: save_random(config, tmp_path_factory.mktemp(name)) for name, config in CONFIGS.items()}
    for folder in saved.values():
        assert len(list(folder.glob("*.safetensors"))) > 2
    return saved


def plan(lasts: Sequence[int], *, dtypes: Sequence[str | None] = (), zo: int = 0) -> Plan:
    return Plan(
        blocks=lasts[-1],
        stages=tuple(
            Stage(
                first=first,
                last=last,
                role="zo" if index < zo else "bp",
                dtype=dtypes[index] if dtypes else None,
            )
            for index, (first, last) in enumerate(zip((0, *lasts), lasts, strict=False))
        ),
        micro_batches=2,
    )


def job(folder: Path, strategy: Plan, trainer: dict[str, Any] | None = None, **module: Any) -> Job:
    return Job(
        strategy={"plan": strategy},
        module=partial(FolderModule, str(folder), **module),
        train=partial(loader, 16),
        validation=partial(loader, 6),
        trainer=trainer or {},
    )


def assert_same(found: list[Run], expected: list[Run]) -> None:
    for step in range(len(expected[0].losses)):
        gradients, wanted = merged_gradients(found, step), merged_gradients(expected, step)
        assert gradients.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(gradients[name], wanted[name])] == []
        assert any(gradient.count_nonzero() for gradient in wanted.values())
    for run, reference in zip(found, expected, strict=True):
        assert run.losses == reference.losses
        assert run.metrics == reference.metrics
        assert all(torch.equal(run.parameters[name], value) for name, value in reference.parameters.items())


def cases(ranks: int) -> list[tuple[str, Plan, dict[str, Any]]]:
    """Return models with plans and module options: tied and untied, several splits, roles and dtypes."""
    if ranks == 1:
        return [(name, plan((6,)), {"late": name == "tied"}) for name in CONFIGS]
    if ranks == 2:
        return [
            (
                "llama",
                plan((5, 6)),
                {"unfrozen": "model.norm"},
            ),  # trained beside adapters, so read on all ranks
            ("tied", plan((2, 6), dtypes=("bfloat16", None), zo=1), {"late": True}),
            ("gpt2", plan((2, 6)), {}),
        ]
    return [
        ("llama", plan((2, 4, 6), dtypes=("float16", "float32", "bfloat16"), zo=1), {"late": True}),
        ("tied", plan((1, 3, 6)), {}),
        ("gpt2", plan((1, 5, 6)), {"late": True}),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_losses_gradients_and_metrics_are_those_of_ordinary_loading_bit_for_bit(
    ranks: int, folders: dict[str, Path]
) -> None:
    jobs = [
        job(folders[name], strategy, loading=loading, **options)
        for name, strategy, options in cases(ranks)
        for loading in ("ordinary", "lean")
    ]

    runs = run_jobs(jobs, ranks) if ranks > 1 else [[fit(each)] for each in jobs]

    for ordinary, lean in zip(runs[::2], runs[1::2], strict=True):
        assert_same(lean, ordinary)


class WithoutValues(FolderModule):
    """Loads nothing, and says nothing about where its weights are."""

    def loaded(self) -> PreTrainedModel:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(llama_config())
        return model


def test_weights_without_values_are_refused_by_name() -> None:
    # A zo stage, since a single bp stage behaves as plain Lightning.
    trainer = trainer_for(HybridOPStrategy(plan=plan((6,), zo=1)))

    with pytest.raises(WeightError, match=r"embed_tokens\.weight lies on `meta`.*load_on_demand"):
        trainer.fit(WithoutValues("", loading="lean"), loader(8), loader(8))


def train_and_save(folder: str, target: Path, loading: Loading) -> None:
    """Train for an epoch on two stages, writing a checkpoint and the adapter's folder."""
    trainer = trainer_for(
        HybridOPStrategy(plan=plan((2, 6))), callbacks=[AdapterCheckpoint(target / "adapter")]
    )
    trainer.fit(FolderModule(folder, loading=loading, unfrozen="model.norm"), loader(16), loader(6))
    trainer.save_checkpoint(target / "epoch.ckpt")


def validate(folder: str, lasts: Sequence[int], loading: Loading) -> float:
    trainer = trainer_for(HybridOPStrategy(plan=plan(lasts)))
    (metrics,) = trainer.validate(FolderModule(folder, loading=loading, late=True), loader(6), verbose=False)
    return float(metrics["val_loss"])


def whole_story(folder: str, target: Path) -> tuple[float, float, Run, Run]:
    """Validate; save and resume, each with both ways of loading, across splits."""
    losses = [validate(folder, (2, 6), loading) for loading in ("ordinary", "lean")]
    for loading in ("ordinary", "lean"):
        train_and_save(folder, target / loading, loading)
    ordinary, lean = (fit(resumption(folder, target, (5, 6), loading)) for loading in ("ordinary", "lean"))
    return losses[0], losses[1], ordinary, lean


def resumption(folder: str, target: Path, lasts: Sequence[int], loading: Loading) -> Job:
    """Return the second epoch of what was saved with that way of loading."""
    return Job(
        strategy={"plan": plan(lasts)},
        module=partial(FolderModule, folder, loading=loading, late=True, unfrozen="model.norm"),
        train=partial(loader, 16),
        validation=partial(loader, 6),
        trainer={"max_epochs": 2},
        checkpoint=str(target / loading / "epoch.ckpt"),
    )


@pytest.mark.slow
def test_validation_checkpoints_resumption_and_adapter_folders_are_those_of_ordinary_loading(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = str(folders["llama"])

    stories = run_ranks(whole_story, 2, folder, tmp_path)

    assert stories[0][0] == stories[0][1]
    assert_same([story[3] for story in stories], [story[2] for story in stories])
    files = {
        loading: sorted((tmp_path / loading / "adapter").rglob("*.safetensors"))
        for loading in ("ordinary", "lean")
    }
    adapters = [
        {name: value for file in found for name, value in load_file(file).items()} for found in files.values()
    ]
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[1][name], value) for name, value in adapters[0].items())
    assert any("lora_B" in name and value.count_nonzero() for name, value in adapters[0].items())
    alone = [fit(resumption(folder, tmp_path, (6,), loading)) for loading in ("ordinary", "lean")]
    assert_same([alone[1]], [alone[0]])
