"""`hybridop launch`: the command of each host, and starting them with an ssh that runs everything here."""

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybridop.cli import main
from lightning_hybridop.commands import help as help_of_launch
from lightning_hybridop.commands import hosts
from lightning_hybridop.commands.configuration import compose_runs
from lightning_hybridop.commands.failures import RunError, RunInterruptedError
from lightning_hybridop.commands.hosts import HostCommand, host_commands, override_value, start
from lightning_hybridop.commands.parts import run_plan
from lightning_hybridop.planning.hosts import Host, HostDevice
from lightning_hybridop.planning.plan import Plan, even_plan, save_plan
from tests.distributed.harness import free_port

ROOT = Path(__file__).parents[2]
CPU = {"device": "cpu", "profile": "jetson-orin-nano-8gb"}
FILE = {
    "hosts": [
        {"name": "nano", "address": "127.0.0.2", "ssh": "me@nano", "interface": "lo", "devices": [{**CPU}]},
        {"name": "nx", "address": "127.0.0.3", "folder": "my runs", "devices": [{**CPU}, {**CPU}]},
    ],
    "efficiency": 0.4,
}
OPTIONS = ("workload=smollm2_135m", "workload.dtype=float16", "recipe=quickstart", "use_all=true")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lan.yaml"
    path.write_text(yaml.safe_dump(FILE), encoding="utf-8")
    return path


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(
        st.characters(exclude_categories=["C", "Z"], exclude_characters="$") | st.sampled_from(" '\"\\")
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,5}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(plain)
def test_what_is_handed_on_arrives_as_it_was(value: Any) -> None:
    parsed = OverridesParser.create().parse_override(f"hosts={override_value(value)}")

    assert unquoted(parsed.value()) == value


def unquoted(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): unquoted(part) for name, part in value.items()}
    if isinstance(value, list):
        return [unquoted(part) for part in value]
    return getattr(value, "text", value)


def test_each_host_is_told_what_to_start(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", f"hosts={file}", *OPTIONS, "restarts=2", "min_hosts=1"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "# nano (127.0.0.2), 1 process:",
        "# nx (127.0.0.3), 2 processes:",
        "# Rank 0, which writes the run's folder, is on nano.",
    ]
    commands = [shlex.split(line) for line in lines if line and not line.startswith("#")]
    # torchrun must not look for the store of the processes on a host that may be lost.
    own_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    assert commands[0][:5] == [
        *("HYBRIDOP_HOST=nano", "TORCH_CPP_LOG_LEVEL=ERROR", own_store, "GLOO_SOCKET_IFNAME=lo", "python")
    ]
    assert commands[1][:7] == [
        *("cd", "my runs", "&&", "HYBRIDOP_HOST=nx", "TORCH_CPP_LOG_LEVEL=ERROR", own_store, "python")
    ]
    for command, processes, is_host, address in (
        (commands[0], "1", "1", "127.0.0.2"),
        (commands[1], "2", "0", "127.0.0.3"),
    ):
        begin = command.index("python")
        end = command.index("lightning_hybridop")
        assert command[begin + 1 : end + 2] == [
            *("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", processes),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.2:29500"),
            *("--rdzv-conf", f"is_host={is_host}", "--rdzv-id", "hybridop-quickstart"),
            *("--local-addr", address, "--max-restarts", "2", "-m", "lightning_hybridop", "fit"),
        ]
        goes_on = ["resume=auto", "strategy.checkpoint_copies=true"]
        assert command[end + 2 : -1] == [*goes_on, *OPTIONS, "restarts=2"]
        # The file itself need not be on the other hosts.
        parsed = OverridesParser.create().parse_override(command[-1])
        assert (parsed.key_or_group, unquoted(parsed.value())) == ("hosts", FILE)


def test_the_documented_commands_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "hosts.md").read_text(encoding="utf-8")
    texts = [page, (ROOT / "README.md").read_text(encoding="utf-8"), help_of_launch.LAUNCH]
    lines = {
        tuple(shlex.split(line, comments=True)[1:])
        for text in texts
        for line in text.splitlines()
        if line.strip().startswith("hybridop ") and "hosts=lan.yaml" in line
    }
    (file,) = [block for block in page.split("```") if block.startswith("yaml\n# lan.yaml")]
    (tmp_path / "lan.yaml").write_text(file.removeprefix("yaml\n"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    assert len(lines) >= 6
    counts = []
    for line in sorted(lines):
        assert main([part for part in line if part != "start=true"]) == 0, capsys.readouterr().err
        counts.append(capsys.readouterr().out.count("HYBRIDOP_HOST="))
    # All hosts where the page says so, else those that make the run faster.
    assert {0, 2, 3} == set(counts)


@pytest.mark.parametrize("page", ["hosts", "security"])
def test_every_documented_torchrun_tells_the_others_an_address(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [shlex.split(line) for line in text.splitlines() if "torchrun --nnodes" in line]

    addresses = [command[command.index("--local-addr") + 1] for command in commands]
    assert len(set(addresses)) == 2
    endpoint = commands[0][commands[0].index("--rdzv-endpoint") + 1]
    assert endpoint == f"{addresses[0]}:29500"


def test_with_a_measured_plan_every_device_has_a_process(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", f"hosts={file}", "recipe=quickstart", "plan=auto", "command=doctor"]) == 0

    text = capsys.readouterr().out
    assert "--nproc-per-node 2" in text
    assert text.count("-m lightning_hybridop doctor recipe=quickstart plan=auto 'hosts=") == 2


def test_processes_are_counted_by_the_plan_that_the_run_makes(tmp_path: Path) -> None:
    slow = {"device": "cpu", "forward_tflops": {"float16": 0.02}, "backward_tflops": {"float16": 0.02}}
    gpu = {"device": "cuda:0", "profile": "jetson-orin-nano-8gb"}
    devices = {"nano": [gpu], "nx": [gpu, {**gpu, **slow}], "old": [{**gpu, **slow}]}
    values = {"hosts": [{"name": name, "devices": own} for name, own in devices.items()]}
    (tmp_path / "lan.yaml").write_text(json.dumps(values), encoding="utf-8")
    overrides = [f"hosts={tmp_path / 'lan.yaml'}", *OPTIONS[:-1]]

    commands = host_commands(compose_runs("launch", overrides)[0].config, overrides)

    # The fastest plan has two stages, but what runs on nx is to use whatever is there.
    assert {made.host.name: made.processes for made in commands} == {"nano": 1, "nx": 2}
    run = compose_runs("fit", overrides)[0].config
    assert len(run_plan(run).stages) == 2
    run.present = ["nano", "nx", "nx"]
    assert [stage.host for stage in run_plan(run).stages].count("nx") == 2
    assert len(run_plan(run).stages) == 3


def test_every_replica_has_processes_of_its_own(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = tuple(
        replace(stage, host=host)
        for stage, host in zip(even_plan(blocks=30, stages=3).stages, ("nx", "nano", "nx"), strict=True)
    )
    save_plan(Plan(blocks=30, stages=stages, replicas=2), tmp_path / "plan.yaml")

    assert main(["launch", f"hosts={file}", f"plan={tmp_path / 'plan.yaml'}"]) == 0

    out = capsys.readouterr().out
    assert "# nano (127.0.0.2), 2 processes:" in out
    assert "# nx (127.0.0.3), 4 processes:" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe=quickstart"], "This cluster names no hosts; pass hosts=<file>"),
        (["cluster=lan"], "hosts: found none, expected a list with one entry per host, such as"),
        (["hosts=missing.yaml"], "hosts file: cannot read missing.yaml"),
        (["hosts=3"], "hosts: found 3, expected the path of a hosts file."),
        (["hosts={file}", *OPTIONS, "command=reboot"], "command is 'reboot', expected fit or doctor."),
        (
            ["hosts={file}", *OPTIONS, "min_hosts=3"],
            "min_hosts: found 3, expected a whole number of at most 2.",
        ),
        *(
            (
                ["hosts={file}", *OPTIONS, "strategy.replicas=2", *plan],
                "strategy.replicas is 2, but the hosts' devices are planned as one pipeline; leave it out, or",
            )
            for plan in ([], ["plan=auto"])
        ),
        (["hosts={file}", *OPTIONS, "start=maybe"], "start: found 'maybe', expected true or false."),
        (
            ["hosts={file}", "plan={plan}"],
            "stages[0].host: found None, expected one of the hosts file's (nano, nx).",
        ),
    ],
)
def test_what_cannot_be_started_is_said_in_one_sentence(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("blocks: 30\nstages: [{first: 0, last: 30}]\n", encoding="utf-8")

    code = main(["launch", *(text.format(file=file, plan=plan) for text in arguments)])

    assert code == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "held"),
    [
        ([], None),
        (["cluster.port=29600"], None),
        (["cluster.efficiency=0.5"], "cluster.efficiency"),
        (["strategy.queries=2"], "strategy.queries"),
    ],
)
def test_hosts_do_not_contradict_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], held: str | None
) -> None:
    (stage,) = even_plan(blocks=30, stages=1).stages
    save_plan(Plan(blocks=30, stages=(replace(stage, host="nano"),)), tmp_path / "plan.yaml")
    named = ("cluster=lan", "cluster.hosts=[{name:nano,devices:[{device:cpu}]}]")

    code = main(["launch", *named, f"plan={tmp_path / 'plan.yaml'}", *arguments])

    said = capsys.readouterr()
    assert (code, said.err) == (
        (0, "")
        if held is None
        else (1, f"hybridop: {held} and plan= contradict each other; change it in the plan file instead.\n")
    )


def test_fit_alone_does_not_pretend_to_be_several_hosts(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", f"hosts={file}", *OPTIONS]) == 1

    said = capsys.readouterr().err
    assert "The plan has stages on other hosts than" in said
    assert "nx: 2" in said
    assert "start them with `hybridop launch`" in said


# Starting. An ssh that runs the command here, and says whom it was to log in as.

SSH = """#!/bin/sh
test "$1 $2 $3" = "-tt -o BatchMode=yes" || exit 9
shift 3
echo "as $1"
test "$1" = "me@unreachable" && exit 255
exec bash -c "$2"
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH, encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def command(name: str, script: str, *, login: str | None = None, folder: Path | None = None) -> HostCommand:
    host = Host(name=name, devices=(HostDevice(),), ssh=login or f"me@{name}", folder=folder and str(folder))
    environment = {"HYBRIDOP_HOST": name}
    return HostCommand(
        host=host, processes=1, environment=environment, arguments=(sys.executable, "-c", script)
    )


SAY = "import os; print(os.environ['HYBRIDOP_HOST'], os.getcwd(), '$HOME')"
STAY = "import time; print('stays', flush=True); time.sleep(60)"
FAIL = "import sys, time; time.sleep({after}); sys.exit('it broke')"


@pytest.mark.usefixtures("ssh")
def test_what_hosts_say_stands_behind_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()

    start([command("nano", SAY, folder=folder), command("nx", SAY)], needed=2)

    assert sorted(capsys.readouterr().out.splitlines()) == [
        "nano | as me@nano",
        f"nano | nano {folder} $HOME",
        "nx   | as me@nx",
        f"nx   | nx {os.getcwd()} $HOME",
    ]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "no.such.name.invalid"])
def test_this_host_needs_no_ssh(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str
) -> None:
    # Paths in the hosts file are relative to the home folder, here as with ssh.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my runs").mkdir()
    own_name = address.startswith("no.")
    monkeypatch.setenv("HYBRIDOP_HOST", "here" if own_name else "there")
    host = Host(name="here", address=address, folder="my runs", devices=(HostDevice(),))

    start([HostCommand(host=host, processes=1, environment={}, arguments=("pwd",))], needed=1)

    assert capsys.readouterr().out == f"here | {tmp_path / 'my runs'}\n"


@pytest.mark.parametrize(
    ("path", "arrives"),
    [("~", "{home}"), ("~/my runs", "{home}/my runs"), ("a ~/b", "a ~/b"), ("$HOME/x", "$HOME/x")],
)
def test_a_path_below_the_home_folder_is_found_by_the_shell(tmp_path: Path, path: str, arrives: str) -> None:
    program = HostCommand(
        host=Host(name="here", devices=(HostDevice(),), folder="~/"),
        processes=1,
        environment={"NAME": "here"},
        arguments=(path, "~", "a b"),
    )

    text = program.text.replace("&& NAME=here ", "&& echo ")

    environment = {**os.environ, "HOME": str(tmp_path)}
    said = subprocess.run(["bash", "-c", f"{text}; pwd"], env=environment, capture_output=True, text=True)
    assert said.stdout.splitlines() == [f"{arrives.format(home=tmp_path)} ~ a b", str(tmp_path)]


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.usefixtures("ssh")
def test_one_that_fails_ends_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hosts, "SECONDS_TO_END", 0.5)
    before = set(children())
    began = time.monotonic()

    with pytest.raises(
        RunError, match=r"^nx: its command ended with exit code 1; look at what it says above.$"
    ):
        start([command("nano", STAY), command("nx", FAIL.format(after=0.5))], needed=2)

    assert time.monotonic() - began < 20
    assert set(children()) <= before
    assert "nx   | it broke" in capsys.readouterr().out


@pytest.mark.usefixtures("ssh")
def test_a_host_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "SECONDS_TO_END", 0.5)

    with pytest.raises(
        RunError, match=r"^nx: ssh could not reach me@unreachable; look at what it says above, and"
    ):
        start([command("nano", STAY), command("nx", SAY, login="me@unreachable")], needed=2)


@pytest.mark.usefixtures("ssh")
def test_a_host_too_few_is_no_failure_where_fewer_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    later = "import time; time.sleep(1.5); print('went on')"

    start([command("nano", later), command("nx", FAIL.format(after=0))], needed=1)

    assert "nano | went on" in capsys.readouterr().out


@pytest.mark.usefixtures("ssh")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_ends_all(number: signal.Signals, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(children())
    # What starts the tests may have told its children to ignore it.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(1.5, os.kill, (os.getpid(), number)).start()
    expected: type[BaseException] = KeyboardInterrupt if number == signal.SIGINT else RunInterruptedError

    try:
        with pytest.raises(expected):
            start([command("nano", STAY), command("nx", STAY)], needed=2)
    finally:
        signal.signal(signal.SIGINT, ignored)

    assert set(children()) <= before
    assert capsys.readouterr().out.count("stays") == 2


@pytest.mark.usefixtures("ssh")
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_two_hosts_fine_tune_and_the_plan_says_who_did_what(tmp_path: Path) -> None:
    own = {"python": sys.executable, "folder": str(tmp_path)}
    values = {**FILE, "port": free_port(), "hosts": [{**host, **own} for host in FILE["hosts"]]}  # type: ignore[attr-defined]
    (tmp_path / "lan.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    options = (
        *(
            "workload=smollm2_135m",
            "workload.dtype=float16",
            "workload.architecture.blocks=4",
            "use_all=true",
        ),
        *(
            "model=hf",
            "model.name=random-4-blocks",
            "model.blocks=4",
            "data=headlines",
            "data.held_out_rows=4",
        ),
        *("data.batch_size=4", "trainer.max_steps=2", "strategy.micro_batches=2", "callbacks.trace=null"),
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GLOO_SOCKET_IFNAME", "MASTER_PORT")
    }

    done = subprocess.run(
        [
            *(sys.executable, "-m", "lightning_hybridop", "launch", f"hosts={tmp_path / 'lan.yaml'}"),
            *(*options, f"folder={tmp_path / 'run'}", "start=true"),
        ],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )

    assert done.returncode == 0, done.stdout
    assert "nano | as me@nano" in done.stdout
    assert any(line.startswith("nano | All files of this run") for line in done.stdout.splitlines())
    plan = yaml.safe_load((tmp_path / "run" / "plan.yaml").read_text(encoding="utf-8"))
    assert sorted(stage["host"] for stage in plan["stages"]) == ["nano", "nx", "nx"]
