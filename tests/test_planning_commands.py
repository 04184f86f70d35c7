"""`hybridop plan`, `simulate` and `compare`, as a user calls them."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_hybridop.cli import main
from lightning_hybridop.planning.plan import load_plan
from lightning_hybridop.simulation.baselines import BASELINES

ONE = "[{profile: jetson-orin-nx-16gb}]"
NPUS = "[{profile: atlas-200i-dk-a2, count: 4}]"
UNLIKE = (
    f"[{', '.join(f'{{profile: jetson-orin-nx-16gb, name: d{i}, memory_gb: {8 + i}}}' for i in range(12))}]"
)
SMALL = ("workload=smollm2_135m", "workload.dtype=float16")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def done(arguments: Sequence[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Return what a command that works prints."""
    code = main(arguments)
    written = capfd.readouterr()
    assert (code, written.err) == (0, "")
    return written.out


def failure_of(arguments: Sequence[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Return the one line that a failing command writes."""
    assert main(arguments) == 1
    written = capfd.readouterr()
    assert written.out == ""
    (line,) = written.err.splitlines()
    return line.removeprefix("hybridop: ")


@pytest.mark.parametrize("command", ["plan", "simulate", "compare", "profile"])
def test_every_command_answers_help_and_shows_its_configuration(
    command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert f"usage: hybridop {command}" in done([command, "--help"], capfd)
    assert f"name: {command}" in done([command, "--show"], capfd)


@pytest.mark.parametrize(("cluster", "workload"), [("paper_3b", "llama3_2_3b"), ("paper_8b", "llama3_1_8b")])
def test_a_plan_can_be_simulated_again(
    cluster: str, workload: str, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    on = [f"cluster={cluster}", f"workload={workload}"]
    printed = done(["plan", *on, "queries=2", "folder=planned"], capfd)
    plan = load_plan("planned/plan.yaml")
    assert plan.predicted is not None

    assert {path.name for path in (elsewhere / "planned").iterdir()} == {
        *("config.yaml", "plan.yaml", "plan.json", "stages.csv", "timeline.png")
    }
    assert f"{plan.predicted.iteration_seconds:.3f} s" in printed
    with Path("planned/stages.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["device"] for row in rows] == [stage.name for stage in plan.stages]
    for row, mib in zip(rows, plan.predicted.memory_mib, strict=True):
        assert float(row["memory_gb"]) * 1e9 == pytest.approx(mib * 2**20)
        assert float(row["memory_gb"]) <= float(row["memory_available_gb"])

    done(["simulate", *on, "plan=planned/plan.yaml", "folder=simulated", "--html"], capfd)
    simulated = json.loads(Path("simulated/simulation.json").read_text(encoding="utf-8"))
    assert simulated["iteration_seconds"] == pytest.approx(plan.predicted.iteration_seconds, rel=1e-4)
    assert "<svg" in Path("simulated/simulation.html").read_text(encoding="utf-8")
    last = max(action["end"] for action in simulated["actions"])
    assert last == pytest.approx(simulated["iteration_seconds"])


def test_another_schedule_is_simulated_on_the_same_stages(capfd: pytest.CaptureFixture[str]) -> None:
    done(["simulate", "use_all=true", "schedule=gpipe", "folder=gpipe"], capfd)
    done(["simulate", "use_all=true", "folder=own"], capfd)
    both = [
        json.loads(Path(name, "simulation.json").read_text(encoding="utf-8")) for name in ("gpipe", "own")
    ]

    assert [values["plan"]["schedule"] for values in both] == ["gpipe", "hybridop"]
    assert both[0]["plan"]["stages"] == both[1]["plan"]["stages"]
    assert both[0]["iteration_seconds"] > both[1]["iteration_seconds"]


def test_auto_fills_idle_time_and_lengthens_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    # Fast forward-only devices with little memory: they hold few blocks, and idle. A head of 128,256 words would take
    # them longer than their blocks.
    fast = "{profile: atlas-200i-dk-a2, count: 2, memory_gb: 1, forward_tflops: {float16: 20}}"
    devices = f"cluster.devices=[{fast}, {{profile: jetson-orin-nano-8gb, count: 4}}]"
    light = ["plan", "workload.architecture.vocabulary=1000", devices]
    done([*light, "folder=one"], capfd)
    done([*light, "folder=auto", "queries=auto", "exit_queries=auto"], capfd)
    one, filled = load_plan("one/plan.yaml"), load_plan("auto/plan.yaml")
    assert one.predicted is not None
    assert filled.predicted is not None

    assert filled.queries + filled.exit_queries > one.queries
    # A list schedule may even end earlier with more work.
    assert filled.predicted.iteration_seconds <= one.predicted.iteration_seconds * (1 + 1e-6)
    assert filled.predicted.comu_ti > one.predicted.comu_ti


def test_an_estimator_is_planned_and_simulated(capfd: pytest.CaptureFixture[str]) -> None:
    times = {}
    for estimator in ("loss", "boundary"):
        printed = done(
            ["plan", "use_all=true", "queries=3", f"estimator={estimator}", f"folder={estimator}"], capfd
        )
        plan = load_plan(f"{estimator}/plan.yaml")
        assert plan.predicted is not None
        assert f"estimator {estimator}" in printed
        assert plan.estimator == estimator
        times[estimator] = plan.predicted.iteration_seconds
    assert times["boundary"] < times["loss"]

    done(["simulate", "plan=boundary/plan.yaml", "folder=again"], capfd)
    simulated = json.loads(Path("again/simulation.json").read_text(encoding="utf-8"))
    assert simulated["iteration_seconds"] == pytest.approx(times["boundary"], rel=1e-4)
    assert "estimator and plan= contradict each other" in failure_of(
        ["simulate", "plan=loss/plan.yaml", "estimator=boundary"], capfd
    )


def test_every_method_is_compared_with_and_without_npus(
    elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    printed = done(["compare", "folder=compared"], capfd)
    rows = json.loads(Path("compared/comparison.json").read_text(encoding="utf-8"))["methods"]

    assert {path.name for path in (elsewhere / "compared").iterdir()} == {
        *("comparison.csv", "comparison.json", "comparison.png", "config.yaml")
    }
    for method in BASELINES:
        assert method in printed, printed
        assert [row["with_npus"] for row in rows if row["method"] == method][:2] in ([True, False], [True])
    for row in rows:
        assert (row["iteration_seconds"] is None) == (row["reason"] is not None)
        if row["iteration_seconds"] is not None:
            assert 0 < row["comu_ti"] <= 1
            assert row["samples_per_second"] == pytest.approx(8 / row["iteration_seconds"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["cluster.usable_memory=0.1"], "GB"),
        (["cluster.devices=[]"], "devices: found none, expected at least one; add a line with a profile."),
        (["cluster.link.bandwidth_mbit_s=-1"], "link.bandwidth_mbit_s: found -1, expected a number above 0."),
        (["+cluster.devices.0.memry_gb=4"], "devices[0].memry_gb: unknown field; did you mean memory_gb?"),
        (["cluster.devices=[{profile: jetson}]"], "devices[0].profile: there is no profile 'jetson'"),
        (
            ["cluster.devices=[{profile: atlas-200i-a2-20t},{profile: jetson-orin-nx-16gb}]"],
            "atlas-200i-a2-20t-0: its memory is unknown; set memory_gb",
        ),
        (["workload.dtype=float32"], "float32 is unknown"),
        (["workload.rows=0"], "rows: found 0, expected a whole number of at least 1."),
        (["queries=-1"], "queries: found -1, expected a whole number of at least 0, or auto."),
        (["micro_batches=0"], "micro_batches: found 0, expected a whole number from 1 to 8, the rows of"),
        (["micro_batches=auto"], "micro_batches: found 'auto', expected a whole number from 1 to 8"),
        (["micro_batches=16"], "micro_batches: found 16, expected a whole number from 1 to 8"),
        (["queries=many"], "queries: found 'many', expected a whole number of at least 0, or auto."),
        (["objective=speed"], "objective is 'speed', expected makespan or paper."),
        (["estimator=spsa"], "estimator is 'spsa', expected one of loss, boundary, adjoint."),
        (
            ["estimator=adjoint", "exit_queries=1", "use_all=true"],
            "exit_queries: found 1 with the estimator adjoint",
        ),
        (
            [f"cluster.devices={NPUS}", "estimator=boundary"],
            "estimator: found boundary for devices of which none",
        ),
        (["cluster=local_2bp"], "This cluster says how many processes run on this host"),
        (["cluster=paper_4b"], "There is no cluster=paper_4b; choose from:"),
        (["~cluster"], "There is no cluster; pass cluster=<name>"),
        (
            ["cluster.devices=[{profile: jetson-orin-nx-16g}]"],
            "devices[0].profile: there is no profile 'jetson-orin-nx-16g'; did you mean jetson-orin-nx-16gb?",
        ),
        (["cluster.devices=3"], "devices: found int, expected a list of profiles."),
        (["cluster.devices={}"], "cluster.devices={} cannot take the place of"),
        (["cluster.devices=[{profile: ~/x.yaml}]"], "with values that hold ~, : or spaces in quotes"),
        (["cluster.devices=[{profile: []}]"], "devices[0].profile: there is no profile []"),
        (["cluster.devices=[{profile: jetson-orin-nx-16gb, name: 3}]"], "devices[0].name: found 3"),
        (
            ["cluster.devices=[{profile: jetson-orin-nx-16gb, count: 1000000000}]"],
            "devices[0].count: found 1000000000, expected a whole number of at most 64.",
        ),
        (
            ["cluster.devices=[{profile: jetson-orin-nx-16gb, memory_gb: 1e300}]"],
            "memory_gb: found 1e+300, expected a number from 1e-12 to 1e+15.",
        ),
        ([f"cluster.devices={UNLIKE}"], "devices: found 12 kinds of devices, expected at most 10"),
        (["cluster.link=0"], "link: found int, expected fields with values."),
        (["cluster.efficiency=1.5"], "efficiency: found 1.5, expected a share of at most 1."),
        (["workload.dtype=[]"], "dtype: found [], expected one of"),
        (
            ["workload.adapter.targets=[[q]]"],
            "adapter.targets: found [['q']], expected a list of projections.",
        ),
        (["workload.architecture.blocks=1000"], "architecture.blocks: found 1000, expected"),
        (
            [f"workload.rows={10**25}"],
            "rows: found 100000... (84 bits), expected a whole number of at most 4096.",
        ),
        (["use_all=abc"], "use_all: found 'abc', expected true or false."),
    ],
)
def test_what_cannot_be_planned_gets_one_sentence_and_leaves_no_folder(
    options: list[str], said: str, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said in failure_of(["plan", *options], capfd)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("devices", "said"), [(ONE, "one device"), (NPUS, "every stage learns from perturbations alone")]
)
def test_an_odd_cluster_is_planned_with_a_word_about_it(
    devices: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    printed = done(["plan", *SMALL, f"cluster.devices={devices}"], capfd)
    assert said in " ".join(printed.split()).lower()


def test_a_used_folder_is_not_written_into(elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done(["plan", "folder=same"], capfd)
    assert "already holds files" in failure_of(["plan", "folder=same"], capfd)


def test_a_measured_profile_takes_the_place_of_one_of_the_library(
    elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profile = "name: bench\nforward_tflops: {float16: 2}\nbackward_tflops: {float16: 2}\nmemory_gb: 16\n"
    for efficiency, folder in (("1.0", "own"), ("null", "shared")):
        (elsewhere / f"{folder}.yaml").write_text(f"{profile}efficiency: {efficiency}\n", encoding="utf-8")
        done(
            ["plan", *SMALL, f"cluster.devices=[{{profile: {folder}.yaml, count: 2}}]", f"folder={folder}"],
            capfd,
        )
    own, shared = load_plan("own/plan.yaml"), load_plan("shared/plan.yaml")
    assert own.predicted is not None
    assert shared.predicted is not None

    assert [stage.name for stage in own.stages] == ["bench-0", "bench-1"]
    # The cluster's efficiency of 0.4 is for rates that nobody measured.
    assert shared.predicted.iteration_seconds > 2 * own.predicted.iteration_seconds
    assert "cannot read missing.yaml" in failure_of(
        ["plan", "cluster.devices=[{profile: missing.yaml}]"], capfd
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["micro_batches=0"], "micro_batches: found 0, expected a whole number of at least 1, because"),
        (["queries=-1"], "queries: found -1, expected a whole number of at least 0, because"),
        (["exit_queries=auto"], "exit_queries: found 'auto', expected a whole number of at least 0, because"),
        (["objective=paper"], "There is no option objective"),
    ],
)
def test_what_cannot_be_compared_gets_one_sentence(
    options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said in failure_of(["compare", *options], capfd)


def test_a_plan_file_and_what_it_holds_cannot_both_be_given(capfd: pytest.CaptureFixture[str]) -> None:
    done(["plan", *SMALL, f"cluster.devices={ONE}", "folder=planned"], capfd)
    given = ["simulate", *SMALL, f"cluster.devices={ONE}", "plan=planned/plan.yaml"]

    assert "queries and plan= contradict each other" in failure_of([*given, "queries=2"], capfd)
    assert "objective is 'speed'" in failure_of([*given, "objective=speed"], capfd)


def test_a_folder_that_is_a_file_is_refused_before_anything_is_planned(
    elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "file").write_text("", encoding="utf-8")
    for folder in ("file", "file/below"):
        assert "is a file, so nothing can be written to" in failure_of(["plan", f"folder={folder}"], capfd)


def test_names_that_look_like_markup_are_shown_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    device = "{profile: jetson-orin-nx-16gb, name: '[/red]'}"
    assert "[/red]" in done(["plan", *SMALL, f"cluster.devices=[{device}]"], capfd)


def test_a_role_that_a_device_cannot_play_is_refused(
    elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    done(["plan", "use_all=true", "folder=planned"], capfd)
    path = elsewhere / "planned" / "plan.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("role: zo", "role: bp"), encoding="utf-8")

    said = failure_of(["simulate", f"plan={path}"], capfd)
    assert said.startswith(
        "stages[0].role: found bp, but atlas-200i-dk-a2-0 only runs forward in this cluster"
    )


def test_with_every_device_in_use_the_best_number_of_micro_batches_is_taken(
    capfd: pytest.CaptureFixture[str],
) -> None:
    slow = ["plan", "use_all=true", "cluster.link.latency_ms=10000"]
    for count in ("null", "1", "2", "4", "8"):
        done([*slow, f"micro_batches={count}", f"folder=m{count}"], capfd)
    seconds = {}
    for count in ("null", "1", "2", "4", "8"):
        predicted = load_plan(f"m{count}/plan.yaml").predicted
        assert predicted is not None
        seconds[count] = predicted.iteration_seconds
    assert seconds.pop("null") == min(seconds.values())
