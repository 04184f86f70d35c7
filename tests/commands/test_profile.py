"""`hybridop profile` on a tiny model: what it prints, keeps and writes, and what it refuses."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

from lightning_hybridop.commands import profile as command
from lightning_hybridop.commands.configuration import ConfigurationError
from lightning_hybridop.commands.profile import model_configuration, profile
from lightning_hybridop.devices.host import NoDeviceError
from lightning_hybridop.devices.measure import Measured
from lightning_hybridop.devices.timed_model import MeasureError
from lightning_hybridop.modules.language_models import LanguageModelError
from lightning_hybridop.planning.cluster import profile_from_dict
from lightning_hybridop.planning.workload import architecture_from_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def tiny(model: Path, *overrides: str) -> list[str]:
    return ["model=hf", f"model.name={model}", "rows=2", "length=8", "device=cpu", *overrides]


def test_it_measures_prints_and_keeps(
    model: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile(tiny(model))

    written = capsys.readouterr()
    for word in (
        "one block",
        "embedding",
        "head and loss",
        "backward ms",
        "Memory for a process",
        "kB per token.",
    ):
        assert word in written.out
    assert "refresh=true" not in written.out
    assert len(list((cache / "profiles").glob("*.yaml"))) == 1
    assert list((tmp_path / "here").iterdir()) == []


def test_the_cache_answers_until_it_is_told_not_to(
    model: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []
    real = command.measure

    def counted(*arguments: object, **named: object) -> Measured:
        runs.append("run")
        return real(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "measure", counted)
    profile(tiny(model))
    capsys.readouterr()
    profile(tiny(model))
    assert runs == ["run"]
    assert "refresh=true measures again." in capsys.readouterr().out
    profile(tiny(model, "refresh=true"))
    assert len(runs) == 2
    profile(tiny(model, "length=9"))
    assert len(runs) == 3
    (damaged, *_) = (cache / "profiles").glob("*2x8.yaml")
    damaged.write_text("{")
    profile(tiny(model))
    assert len(runs) == 4


def test_the_written_profile_is_one_that_a_cluster_can_use(model: Path, tmp_path: Path) -> None:
    profile(tiny(model, f"folder={tmp_path / 'out'}"))

    written = profile_from_dict(yaml.safe_load((tmp_path / "out" / "profile.yaml").read_text()))
    assert set(written.forward_tflops) == set(written.backward_tflops) == {"float32"}
    assert set(written.head_forward_tflops) == {"float32"}
    assert written.memory_gb is not None
    assert not written.forward_only


def test_smollm2_needs_no_model_file() -> None:
    sizes = architecture_from_config(model_configuration("smollm2").to_dict())

    assert sizes.parameters == 134_515_008
    assert sizes.blocks == 30


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["rows=0"], ConfigurationError, "rows: found 0, expected a whole number of at least 1."),
        (["length=1.5"], ConfigurationError, "length: found 1.5, expected a whole number of at least 1."),
        (["repeats=x"], ConfigurationError, "repeats: found 'x', expected a whole number of at least 1."),
        (["processes=0"], ConfigurationError, "processes: found 0, expected a whole number of at least 1."),
        (
            ["dtype=int8"],
            ConfigurationError,
            "dtype: found 'int8', expected one of float32, bfloat16, float16.",
        ),
        (["refresh=perhaps"], ConfigurationError, "refresh: found 'perhaps', expected true or false."),
        (["row=2"], ConfigurationError, "There is no option row; did you mean rows?"),
        (["device=cuda:99"], NoDeviceError, "device: there is no cuda:99 on this machine; choose another,"),
        (["length=65"], MeasureError, "length: found 65, but"),
        (["model.name=./missing"], LanguageModelError, "The model folder ./missing does not exist:"),
    ],
)
def test_bad_input_is_refused(model: Path, overrides: list[str], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        profile(tiny(model, *overrides))

    assert str(error.value).startswith(message)


def run(command_line: Sequence[str], cache: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HYBRIDOP_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command_line, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.distributed
def test_local_processes_measure_their_links(model: Path, cache: Path) -> None:
    out = run([sys.executable, "-m", "lightning_hybridop", "profile", *tiny(model, "processes=3")], cache)

    assert [pair for pair in ("0 and rank 1", "0 and rank 2", "1 and rank 2") if pair not in out] == []
    assert out.count("one block") == 1


@pytest.mark.distributed
def test_under_torchrun_rank_0_prints_every_machine_and_the_links(
    model: Path, cache: Path, tmp_path: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    folder = f"folder={tmp_path / 'out'}"
    out = run([*torchrun, "lightning_hybridop", "profile", *tiny(model, folder)], cache)

    assert out.count("one block") == 2
    assert out.count("rank 0 and rank 1") == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"profile.yaml", "profile_1.yaml"}
