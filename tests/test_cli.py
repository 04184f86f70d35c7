import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TokenizersBackend

from lightning_hybridop.cli import main
from lightning_hybridop.commands.configuration import compose_runs, groups
from lightning_hybridop.commands.failures import first_failure, write_failure
from lightning_hybridop.data.headlines import headlines
from lightning_hybridop.modules.prompts import CLASSES
from lightning_hybridop.planning.plan import even_plan, load_plan, plan_to_dict

ROOT = Path(__file__).parents[1]
BLOCKS = 4
LONGEST_RUN = 240  # seconds; most of it is several processes that import torch at once
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and an environment that says nothing about runs."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in (*RANK_VARIABLES, "HYDRA_FULL_ERROR", "HYBRIDOP_DATA"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model that knows the words of the headlines."""
    folder = tmp_path_factory.mktemp("model")
    train, held_out = headlines()
    splitter = pre_tokenizers.Whitespace()
    words = {word for row in (*train, *held_out) for word, _ in splitter.pre_tokenize_str(row.text)}
    names = ["<unk>", "<eos>", "Topic", ":", *CLASSES, *sorted(words - set(CLASSES))]
    backend = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = splitter
    TokenizersBackend(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tiny(model: Path, *overrides: str) -> list[str]:
    """Return the arguments of a fit of the tiny model on a few headlines."""
    small = ("data.held_out_rows=10", "trainer.max_steps=4", "model.learning_rate=0.01")
    return ["fit", "model=hf", f"model.name={model}", "data=headlines", *small, *overrides]


# What needs no processes.


def failure_of(arguments: Sequence[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Return the one line that a failing command writes."""
    assert main(arguments) != 0
    written = capfd.readouterr()
    assert written.out == ""
    (line,) = written.err.splitlines()
    assert line.startswith("hybridop: ")
    return line.removeprefix("hybridop: ")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_the_commands(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "fit" in capfd.readouterr().out


def test_help_of_fit_lists_every_choice_of_every_group(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help"]) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    for folder in (path for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "hydra"):
        (line,) = (line for line in lines if line and line[0] == folder.name)
        assert {word.rstrip(",") for word in line[1:]} == {file.stem for file in folder.glob("*.yaml")}


def test_unknown_command_names_the_nearest(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fitt"]) == 2
    assert capfd.readouterr().err == "hybridop: There is no command fitt; did you mean fit?\n"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--multi-run"], "There is no flag --multi-run; did you mean --multirun?"),
        (["strategy.epsilonn=1"], "There is no option strategy.epsilonn; did you mean strategy.epsilon?"),
        (["queries=2"], "There is no option queries; did you mean strategy.queries?"),
        (
            ["recipe=quickstrat"],
            "There is no recipe=quickstrat; choose from: agnews_smollm2, emulated_3b, multirc_smollm2, quickstart, squad_smollm2.",
        ),
        (["strategy.queries"], "strategy.queries cannot be read; write an override as name=value"),
        (["model.name=???"], "model.name has no value; pass model.name=<value>."),
        (["strategy.queries=interval(1,2)", "-m"], "strategy.queries=interval(1,2) sweeps over an interval"),
        (["strategy.micro_batches=0"], "micro_batches: found 0, expected a whole number of at least 1."),
        (["strategy.epsilon=0"], "epsilon is 0, expected a number above 0."),
        (["strategy.epsilon=-1e-3"], "epsilon is -0.001, expected a number above 0."),
        (["cluster=local_2bp", "strategy.exit_queries=1"], "exit_queries: found 1 without a zo stage"),
        (["cluster.zo_role=frozen", "strategy.exit_queries=1"], "exit_queries: found 1 without a zo stage"),
        (["cluster.zo_role=bp"], "cluster.zo_role is 'bp', expected zo or frozen."),
        (["cluster.bp_stages=3"], "stages: found 5 stages for 4 blocks"),
        (["plan=missing.yaml"], "plan: cannot read missing.yaml"),
        (["plan=missing.yaml", "strategy.queries=2"], "strategy.queries and plan= contradict each other"),
        (["model.name=./missing"], "The model folder ./missing does not exist"),
        (["data=agnews", "data.train=a.csv", "data.test=b.csv"], "The AG News file b.csv does not exist"),
        (["port=0"], "port=0 is no port number"),
        (["port=http"], "port=http is no port number"),
    ],
)
def test_bad_input_gets_one_sentence_and_leaves_no_folder(
    overrides: list[str], said: str, model: Path, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert failure_of(tiny(model, *overrides), capfd).startswith(said)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"micro_batchs": 4}, "plan.micro_batchs: unknown field; did you mean micro_batches?"),
        ({"blocks": 5}, "stages[1].last: block 4 is in no stage"),
    ],
)
def test_bad_plan_file_gets_one_sentence(
    change: dict[str, object], said: str, model: Path, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = plan_to_dict(even_plan(blocks=BLOCKS, stages=2, zo_stages=1)) | change
    (elsewhere / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert failure_of(tiny(model, "plan=plan.yaml"), capfd).startswith(said)


def test_data_file_with_a_wrong_column_gets_one_sentence(
    model: Path, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "rows.csv").write_text("label,title,description\n1,a,b\n")
    said = failure_of(tiny(model, "data=agnews", "data.train=rows.csv", "data.test=rows.csv"), capfd)
    assert "rows.csv, line 1" in said
    assert "class_index,title,description" in said


@pytest.mark.parametrize("named", ["option", "environment"])
def test_port_in_use_gets_one_sentence(
    named: str, model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port if named == "environment" else 1))
        overrides = [f"port={port}"] if named == "option" else []
        said = failure_of(tiny(model, *overrides), capfd)
    assert said.startswith(f"Port {port} cannot be used (Address already in use)")


def test_a_folder_that_holds_a_run_is_not_written_to(
    model: Path, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "old").mkdir()
    (elsewhere / "old" / "config.yaml").write_text("name: old\n")
    assert "already holds a run" in failure_of(tiny(model, "folder=old"), capfd)
    assert (elsewhere / "old" / "config.yaml").read_text() == "name: old\n"


def test_debug_shows_the_stack_trace(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(tiny(model, "strategy.epsilon=0", "debug=true")) == 1
    assert "Traceback" in capfd.readouterr().err


def test_every_choice_of_every_group_composes() -> None:
    for group, choices in groups().items():
        for choice in choices:
            (run,) = compose_runs("fit", ["model.name=any", f"{group}={choice}"])
            assert run.config.model.name == "any" or group == "recipe"


def test_runs_of_the_same_second_get_folders_of_their_own(elsewhere: Path) -> None:
    overrides = ["hydra.run.dir=outputs/now"]
    (first,) = compose_runs("fit", overrides)
    first.folder.mkdir(parents=True)
    (second,) = compose_runs("fit", overrides)
    assert [first.folder, second.folder] == [elsewhere / "outputs/now", elsewhere / "outputs/now-2"]
    assert second.config.callbacks.adapter.folder == str(second.folder / "adapter")


def test_multirun_gives_each_combination_its_own_folder() -> None:
    overrides = ["strategy.queries=1,2", "cluster=local_2zo_2bp,local_1zo_1bp", "model.lora_targets=[q_proj]"]
    runs = compose_runs("fit", overrides, multirun=True)
    chosen = [(run.config.strategy.queries, run.config.cluster.bp_stages) for run in runs]
    assert chosen == [(1, 2), (1, 1), (2, 2), (2, 1)]
    assert [run.folder.name for run in runs] == ["0", "1", "2", "3"]
    assert len({run.folder.parent for run in runs}) == 1
    assert all(run.config.model.lora_targets == ["q_proj"] for run in runs)


def test_the_first_cause_is_told_not_its_consequences(tmp_path: Path) -> None:
    write_failure(tmp_path, 0, RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    write_failure(tmp_path, 2, ValueError("Row 3\nis empty."))
    write_failure(tmp_path, 1, KeyError("input_ids"))
    assert first_failure(tmp_path) == "rank 2: Row 3 is empty."


# Real runs.


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "lightning_hybridop", *arguments]


def csv_column(path: Path, name: str) -> list[float]:
    with path.open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fit_starts_its_processes_and_fills_one_folder(model: Path, elsewhere: Path) -> None:
    saving = ("checkpoint_every=1", "+callbacks.recovery.save_top_k=-1")
    run = subprocess.run(
        command(tiny(model, "cluster=local_1zo_1bp", "cluster.bp_stages=2", "strategy.wire=int8", *saving)),
        capture_output=True,
        text=True,
        timeout=LONGEST_RUN,
    )
    assert run.returncode == 0, run.stderr
    (folder,) = elsewhere.glob("outputs/*/*")
    assert str(folder) in run.stdout
    assert {path.name for path in folder.iterdir()} >= {
        *("adapter", "checkpoints", "config.yaml", "metrics.csv", "plan.yaml"),
        *("summary.json", "timeline.json", "timeline.png", "scalars.log"),
    }
    assert load_plan(folder / "plan.yaml") == even_plan(blocks=BLOCKS, stages=3, zo_stages=1, wire="int8")
    assert len(csv_column(folder / "metrics.csv", "train_loss")) == 4
    assert len(csv_column(folder / "metrics.csv", "comu_ti/stage_2")) == 4
    summary = json.loads((folder / "summary.json").read_text())
    assert [summary["before"]["val_loss"], summary["after"]["val_loss"]] == csv_column(
        folder / "metrics.csv", "val_loss"
    )
    assert summary["after"]["val_loss"] < summary["before"]["val_loss"]
    assert summary["steps"] == 4
    assert len(summary["peak_memory_mib"]) == len(summary["comu_ti_per_stage"]) == 3
    # A hidden state of int8 with its scales takes 20 bytes a token, twice, a gradient 32.
    first, second, third = summary["sent_mib_per_mini_batch"]
    assert first == second == pytest.approx(third * 40 / 32)

    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    trained = [name for name in weights if "lora_B" in name]
    assert len(trained) == 2 * BLOCKS

    # What the forward-only stage has learnt since the first checkpoint is in the log.
    assert main(["rebuild", f"folder={folder}", f"checkpoint={folder / 'recovery' / 'step-1.ckpt'}"]) == 0
    rebuilt = load_file(folder / "rebuilt.safetensors")
    assert len(rebuilt) == 4 * load_plan(folder / "plan.yaml").stages[0].last
    for name, value in rebuilt.items():
        assert torch.equal(value, weights[name.removeprefix("model.").replace(".default.", ".")]), name
    assert all(weights[name].abs().max() > 0 for name in trained)
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder / "adapter")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_ranks_share_one_folder(model: Path, elsewhere: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    options = ("cluster=local_1zo_1bp", "cluster.zo_role=frozen", "strategy.replicas=2")
    arguments = tiny(model, *options, "trainer.max_steps=1")
    run = subprocess.run(
        [*launcher, "-m", "lightning_hybridop", *arguments],
        capture_output=True,
        text=True,
        timeout=LONGEST_RUN,
    )
    assert run.returncode == 0, run.stderr
    (folder,) = elsewhere.glob("outputs/*/*")
    assert (folder / "summary.json").is_file()
    plan = load_plan(folder / "plan.yaml")
    assert plan.stages[0].role == "frozen"
    assert (len(plan.stages), plan.replicas) == (2, 2)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stage_that_fails_ends_the_run_with_its_sentence(model: Path, elsewhere: Path) -> None:
    # Only the processes themselves find out that the plan does not fit the model.
    (elsewhere / "plan.yaml").write_text(
        yaml.safe_dump(plan_to_dict(even_plan(blocks=5, stages=2, zo_stages=1)))
    )
    started = subprocess.Popen(
        command(tiny(model, "plan=plan.yaml", "folder=run")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, errors = started.communicate(timeout=LONGEST_RUN)
    assert started.returncode == 1
    told = [line for line in errors.splitlines() if line.startswith("hybridop: ")]
    assert len(told) == 1
    assert "5" in told[0]
    assert "4" in told[0]
    assert "Traceback" not in errors
    assert "Traceback" in (elsewhere / "run" / "logs" / "rank_1.log").read_text()
    assert processes_in(elsewhere) == []


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_running_when_the_command_is_ended(number: int, model: Path, elsewhere: Path) -> None:
    started = subprocess.Popen(
        command(tiny(model, "cluster=local_1zo_1bp", "trainer.max_steps=100000", "folder=run")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: (elsewhere / "run" / "timeline.json").is_file(), seconds=LONGEST_RUN)
    finally:
        started.send_signal(number)
    assert started.wait(timeout=20) == (128 + number if number == signal.SIGTERM else -number)
    wait_until(lambda: processes_in(elsewhere) == [], seconds=15)


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose current folder is `folder`, this one left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.cwd() == str(folder):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def wait_until(condition: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(LONGEST_RUN)
def test_an_emulated_cluster_is_planned_and_takes_its_time(model: Path, elsewhere: Path) -> None:
    devices = "[{profile: atlas-200i-dk-a2}, {profile: jetson-orin-nano-8gb, count: 2}]"
    emulated = (
        *("cluster=paper_3b", f"cluster.devices={devices}", "cluster.emulate=true", "use_all=true"),
        *("workload=llama3_2_3b", f"workload.architecture.blocks={BLOCKS}"),
        *("workload.architecture.vocabulary=1000", "trainer.max_steps=3", "folder=run"),
    )
    finished = subprocess.run(
        command(tiny(model, *emulated)), capture_output=True, text=True, timeout=LONGEST_RUN
    )

    assert finished.returncode == 0, finished.stderr
    plan = load_plan(elsewhere / "run" / "plan.yaml")
    assert plan.predicted is not None
    assert plan.measured is not None
    assert plan.measured.iteration_seconds > 0.99 * plan.predicted.iteration_seconds
    assert "iteration: predicted" in finished.stdout
