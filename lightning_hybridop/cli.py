"""The command `hybridop`: reads its arguments, answers `--help`, and says in one sentence what went wrong."""

import difflib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from omegaconf import OmegaConf

from lightning_hybridop.commands import help as texts
from lightning_hybridop.commands.configuration import compose_runs, groups
from lightning_hybridop.commands.failures import RunInterruptedError, sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command: what it is for, its help, the flags beside --help and --show, and what runs it.

    `run` takes the overrides and the flags that were given. It imports what it needs itself, because --help can do
    without torch.
    """

    purpose: str
    help: str
    run: Callable[[Sequence[str], frozenset[str]], None]
    flags: Mapping[str, str]


def _fit(overrides: Sequence[str], flags: frozenset[str]) -> None:
    from lightning_hybridop.commands.fit import fit

    fit(overrides, multirun="--multirun" in flags)


def _plan(overrides: Sequence[str], flags: frozenset[str]) -> None:
    from lightning_hybridop.commands.plan import plan

    plan(overrides)


def _simulate(overrides: Sequence[str], flags: frozenset[str]) -> None:
    from lightning_hybridop.commands.simulate import simulate

    simulate(overrides, html="--html" in flags)


def _compare(overrides: Sequence[str], flags: frozenset[str]) -> None:
    from lightning_hybridop.commands.compare import compare

    compare(overrides)


def _profile(overrides: Sequence[str], flags: frozenset[str]) -> None:
    from lightning_hybridop.commands.profile import profile

    profile(overrides)


def _gradients(overrides: Sequence[str], flags: frozenset[str]) -> None:
    from lightning_hybridop.commands.gradients import gradients

    gradients(overrides, plot="--plot" in flags)


def _export(overrides: Sequence[str], flags: frozenset[str]) -> None:
    from lightning_hybridop.commands.export import export

    export(overrides)


def _rebuild(overrides: Sequence[str], flags: frozenset[str]) -> None:
    from lightning_hybridop.commands.rebuild import rebuild_run

    rebuild_run(overrides)


def _launch(overrides: Sequence[str], flags: frozenset[str]) -> None:
    from lightning_hybridop.commands.hosts import launch

    launch(overrides)


def _doctor(overrides: Sequence[str], flags: frozenset[str]) -> None:
    from lightning_hybridop.commands.doctor import doctor

    doctor(overrides)


COMMANDS = {
    "fit": Command(
        purpose="fine-tune a language model over the stages of a plan",
        help=texts.FIT,
        run=_fit,
        flags={"--multirun": "--multirun", "-m": "--multirun"},
    ),
    "launch": Command(
        purpose="start a run on several hosts, or print how to", help=texts.LAUNCH, run=_launch, flags={}
    ),
    "doctor": Command(
        purpose="say whether a run would start, and what is missing",
        help=texts.DOCTOR,
        run=_doctor,
        flags={},
    ),
    "plan": Command(
        purpose="lay a model over the devices of a cluster", help=texts.PLAN, run=_plan, flags={}
    ),
    "simulate": Command(
        purpose="run one mini-batch of a plan in simulated time",
        help=texts.SIMULATE,
        run=_simulate,
        flags={"--html": "--html"},
    ),
    "compare": Command(
        purpose="simulate every method on a cluster", help=texts.COMPARE, run=_compare, flags={}
    ),
    "profile": Command(
        purpose="measure this machine for the planner", help=texts.PROFILE, run=_profile, flags={}
    ),
    "export": Command(
        purpose="write a stage as ONNX, for the compilers of other devices",
        help=texts.EXPORT,
        run=_export,
        flags={},
    ),
    "rebuild": Command(
        purpose="rebuild what forward-only stages had learnt since a checkpoint",
        help=texts.REBUILD,
        run=_rebuild,
        flags={},
    ),
    "gradients": Command(
        purpose="compare each estimator with the true gradient",
        help=texts.GRADIENTS,
        run=_gradients,
        flags={"--plot": "--plot"},
    ),
}

HELP = """\
usage: hybridop <command> [options]

Fine-tunes language models in one pipeline of forward-only and back-propagating devices.

commands:
{commands}

hybridop <command> --help tells more about each. Start with: hybridop fit recipe=quickstart
"""

_FLAGS = {"--show": "--show", "--help": "--help", "-h": "--help"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hybridop` with the given arguments (default: those of the process) and return its exit code.

    0: done; 1: the configuration cannot work or a run failed; 2: no such command or flag; 128 + n: ended by signal n.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("--help", "-h"):
        purposes = {name: (command.purpose,) for name, command in COMMANDS.items()}
        print(HELP.format(commands=_columns(purposes)), end="")
        return 0
    name, *rest = given
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"choose from: {', '.join(COMMANDS)}."
        return _fail(f"There is no command {name}; {hint}")
    return _run(name, COMMANDS[name], rest)


def _run(name: str, command: Command, arguments: Sequence[str]) -> int:
    known = {**_FLAGS, **command.flags}
    flags = frozenset(known[argument] for argument in arguments if argument in known)
    overrides = [argument for argument in arguments if argument not in known]
    if "--help" in flags:
        print(command.help.format(groups=_columns(groups(name)), name=name), end="")
        return 0
    for override in overrides:
        if override.startswith("-"):
            nearest = difflib.get_close_matches(override, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "options are written as name=value."
            return _fail(f"There is no flag {override}; {hint}")
    try:
        if "--show" in flags:
            _show(name, overrides, multirun="--multirun" in flags)
        else:
            command.run(overrides, flags)
    except KeyboardInterrupt:
        return _fail("The run was interrupted.", code=128 + signal.SIGINT)
    except RunInterruptedError as error:
        return _fail(sentence(error), code=128 + error.signal)
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or "debug=true" in overrides:
            traceback.print_exc()
        return _fail(sentence(error), code=1)
    return 0


def _show(name: str, overrides: Sequence[str], *, multirun: bool) -> None:
    for run in compose_runs(name, overrides, multirun=multirun):
        print(OmegaConf.to_yaml(run.config), end="")


def _columns(rows: Mapping[str, Sequence[str]]) -> str:
    """Return one indented line for each row, the names padded to the longest one."""
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name:<{width}}  {', '.join(texts)}" for name, texts in rows.items())


def _fail(message: str, *, code: int = 2) -> int:
    print(f"hybridop: {message}", file=sys.stderr, flush=True)
    return code
