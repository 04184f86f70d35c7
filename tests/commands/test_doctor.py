"""`hybridop doctor`: alone and with others, when a run would start and when it would not."""

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_hybridop.cli import main
from lightning_hybridop.commands import doctor
from lightning_hybridop.commands.configuration import compose_runs
from lightning_hybridop.commands.doctor import DoctorError
from lightning_hybridop.commands.hosts import override_value
from lightning_hybridop.planning.plan import Stage
from lightning_hybridop.reporting.findings import Finding, findings_table
from tests.distributed.harness import run_ranks

MODEL = ("model=hf", "model.name=random-4-blocks", "model.blocks=4", "data=headlines", "data.held_out_rows=4")


def test_alone_it_tries_what_this_host_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "WIDTH", 250)

    assert main(["doctor", *MODEL, "cluster=local_1zo_1bp"]) == 0

    said = capsys.readouterr().out
    for found in (
        "2 stages: zo 0-1, bp 2-3",
        "HeadlinesData found",
        "random-4-blocks found: llama",
        "one is found when the run starts",
        f"torch {torch.__version__}",
        "MiB free",
        "a product in float32 agrees with the CPU's",
        "its gradient in float32 agrees with the formula",
        "A run would start.",
    ):
        assert found in said, said
    # The zo stage tries no backward.
    assert said.count("forward") == 2
    assert said.count("backward") == 1


def test_each_fault_comes_with_its_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "WIDTH", 250)
    stages = [
        {"first": 0, "last": 2, "role": "zo", "device": "npu:0"},
        {"first": 2, "last": 4, "device": "cuda:7"},
    ]
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"blocks": 4, "stages": stages}), encoding="utf-8")
    options = ("data=agnews", "data.train=missing.csv", "data.test=missing.csv", "port=70000")

    assert main(["doctor", *MODEL[:3], f"plan={plan}", *options]) == 1

    out, err = capsys.readouterr()
    rows = {
        columns[0]: columns[1:]
        for line in out.splitlines()
        if len(columns := [part.strip() for part in line.split("  ") if part.strip()][3:]) > 1
        and " no " in line
    }
    assert rows["port"] == [
        "port=70000 is no port number",
        "pass one from 1 to 65535, or leave port= out.",
    ]
    assert "there is no npu:0 on this machine" in out
    assert "there is no cuda:7 on this machine" in out
    assert "missing.csv" in rows["data"][0]
    assert err == (
        "hybridop: A run would not start: 4 of 7 checks failed; the table says how to mend each.\n"
    )


def test_a_stage_that_lacks_its_runtime_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    notes = doctor._Notes(0)

    doctor._try_stage(notes, Stage(first=0, last=1, role="zo", executor="onnxruntime"))

    assert (notes.findings[0].found, notes.findings[0].remedy) == (
        "onnxruntime needs onnxruntime and onnx, which is not installed here",
        "pip install 'lightning-hybridop[onnx]'",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_device_that_computes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    stage = Stage(first=0, last=1)
    doctor._forward(stage, dtype)
    doctor._backward(stage, dtype)
    right = doctor._weights
    monkeypatch.setattr(doctor, "_weights", lambda *asked: (*right(*asked)[:2], right(*asked)[2] * 1.2))

    with pytest.raises(DoctorError, match="computes something else than expected"):
        doctor._forward(stage, dtype)


def test_a_remedy_is_marked() -> None:
    good = Finding(rank=0, host="nano", topic="port", found="free")
    bad = Finding(rank=1, host="nx", topic="device", found="[none]", remedy="buy one")
    columns = [list(column.cells) for column in findings_table([good, bad]).columns]

    assert columns[2] == ["ok", "[bold red]no[/]"]
    assert columns[4] == ["free", r"\[none]"]
    assert columns[5] == ["", "buy one"]


CPU = {"device": "cpu", "profile": "jetson-orin-nano-8gb"}
SLOW = {"forward_tflops": {"float16": 0.02}, "backward_tflops": {"float16": 0.02}}
WORKLOAD = ("workload.dtype=float16", "workload.architecture.blocks=4")


def on_hosts(*devices: dict[str, Any]) -> str:
    hosts = [
        {"name": name, "devices": [device]} for name, device in zip(("nano", "nx"), devices, strict=True)
    ]
    return f"hosts={override_value({'hosts': hosts})}"


def _together() -> list[tuple[int | str, str]]:
    rank = int(os.environ["RANK"])
    os.environ["HYBRIDOP_HOST"] = ("nano", "nx")[rank]
    doctor.WIDTH = 250
    results: list[tuple[int | str, str]] = []
    for options in (
        ("cluster=local_1zo_1bp",),
        ("cluster=local_1zo_1bp", f"strategy.queries={rank + 1}"),
        ("cluster=local_4bp",),
        (on_hosts({"device": "cpu"}, {"device": "npu:0"}), "plan=auto"),
        (on_hosts(CPU, {**CPU, **SLOW}), "workload=smollm2_135m", *WORKLOAD),
    ):
        said = io.StringIO()
        with redirect_stdout(said):
            try:
                doctor.doctor([*MODEL, *options])
                code: int | str = 0
            except DoctorError as error:
                code = str(error)
            except SystemExit as ended:
                code = int(str(ended.code))
        results.append((code, said.getvalue()))
    return results


@pytest.mark.distributed
def test_together_ranks_compare_and_measure_and_rank_0_tells() -> None:
    first, second = run_ranks(_together, 2)

    assert [said for _, said in second] == [""] * 5
    assert [code for code, _ in second] == [0, 1, 1, 1, 0]
    code, said = first[0]
    assert code == 0, said
    assert "A run would start." in said
    assert "2 processes at 127.0.0.1:" in said
    assert "stage 0: zo, blocks 0-1" in said
    assert "stage 1: bp, blocks 2-3" in said
    assert said.count("arrive as they were sent (float32, bfloat16, float16, int8)") == 2
    links = said.partition("Links")[2].splitlines()
    (row,) = [line.split() for line in links if "(nano)" in line]
    assert row[:4] == ["0", "(nano)", "1", "(nx)"]
    assert float(row[4].replace(",", "")) > 10
    assert 0 < float(row[5]) < 100

    code, said = first[1]
    assert str(code).startswith("A run would not start: 2 of ")
    assert "strategy.queries is 1 on rank 0 (host nano) and 2 on rank 1 (host nx)" in said
    assert "start every host with the same options and files." in said

    code, said = first[2]
    assert str(code).startswith("A run would not start: 2 of ")
    assert "The plan has 4 stages, but 2 processes run" in said
    assert "start one process per stage." in said

    # The zo stage, which comes first, is on the second host.
    code, said = first[3]
    assert str(code).startswith("A run would not start: 1 of ")
    (row,) = [line.split() for line in said.splitlines() if "there is no npu:0" in line]
    assert row[:4] == ["1", "nx", "no", "device"]

    # The fastest plan leaves the second host out, but it has come.
    code, said = first[4]
    assert code == 0, said
    assert "2 stages: bp " in said


def test_the_meeting_is_that_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: dict[str, Any] = {}
    monkeypatch.setattr(doctor.world, "enter", lambda **arguments: entered.update(arguments))
    monkeypatch.setenv("MASTER_ADDR", "nano")
    monkeypatch.setenv("MASTER_PORT", "29500")
    options = ("strategy.interface=eth1", "strategy.heartbeat=30")

    doctor._meet(compose_runs("doctor", options)[0].config, 1, 2)

    assert (entered["rank"], entered["size"]) == (1, 2)
    assert (entered["interface"], entered["patience"]) == ("eth1", 30)
