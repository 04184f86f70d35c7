"""`hybridop fit`: checks a configuration, makes the run's folder and has its processes run the recipe."""

import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from omegaconf import OmegaConf, open_dict

from lightning_hybridop.commands import launch
from lightning_hybridop.commands.configuration import ConfigurationError, Run, check_folder, compose_runs
from lightning_hybridop.commands.failures import sentence
from lightning_hybridop.commands.parts import PLAN_OPTIONS, factory, run_plan, run_strategy
from lightning_hybridop.commands.recipes import load_recipe
from lightning_hybridop.commands.resuming import (
    AUTO,
    CONFIGURATION,
    ENDED,
    check_continues,
    differences,
    go_on_from_newest,
    hold,
    is_ended,
    newest_checkpoint,
    unfinished_run,
    whole_file,
)
from lightning_hybridop.pipeline.interface import host_name
from lightning_hybridop.pipeline.meeting import meeting_store
from lightning_hybridop.pipeline.roll_call import tell_all
from lightning_hybridop.planning.plan import Plan

SECONDS_TO_COME = timedelta(seconds=300)
"""How long processes of several hosts wait for each other at the start: one of them may still read its model."""


def fit(overrides: Sequence[str], *, multirun: bool = False) -> None:
    """Do the runs that the overrides describe, one after the other; all are checked before the first one starts.

    A run is done in the processes that torchrun started this one as, if it did, in this process alone if the plan has
    one stage, else in local processes started here.
    """
    check_plan_overrides(overrides)
    if "RANK" in os.environ:
        if multirun:
            raise ConfigurationError(
                "--multirun starts the processes of each run itself; leave torchrun out."
            )
        _fit_together(overrides)
        return
    runs = compose_runs("fit", overrides, multirun=multirun)
    if runs[0].config.resume == AUTO and not _names_folder(overrides):
        if multirun:
            raise ConfigurationError("resume=auto and --multirun need folder=, so that runs find their own.")
        found = unfinished_run(runs[0].config, runs[0].folder.parents[1])
        if found is not None:
            runs = compose_runs("fit", overrides, folder=found)
    plans = [check(run) for run in runs]
    for number, (run, plan) in enumerate(zip(runs, plans, strict=True), start=1):
        if len(runs) > 1:
            print(f"Run {number} of {len(runs)}: {run.folder}", flush=True)
        goes_on = run.config.resume == AUTO
        if goes_on and has_ended(run.folder):
            continue
        write_configuration(run, goes_on=goes_on)
        if plan.processes == 1:
            go_on_from_newest(run.config, run.folder, restarted=False)
            load_recipe("fit")(run.config, run.folder)
        else:
            launch.launch(
                run.folder,
                processes=plan.processes,
                port=run.config.port,
                restarts=run.config.restarts,
            )


def _fit_together(overrides: Sequence[str]) -> None:
    """Do one run in the processes that torchrun started."""
    run, goes_on = join_run(overrides)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = meeting_store(rank=rank, size=size, timeout=SECONDS_TO_COME)
    ended = rank == 0 and goes_on and has_ended(run.folder)
    problem = None
    try:
        check(run)
        if rank == 0 and not ended:
            write_configuration(run, goes_on=goes_on)
        elif _keeps_copies(run) and (run.folder / CONFIGURATION).exists():
            check_continues(run.config, run.folder)
    except Exception as error:
        problem = error
    mine = {"host": host_name(), "problem": None if problem is None else sentence(problem), "ended": ended}
    told = tell_all(store, mine, topic="check", rank=rank, size=size)
    if problem is not None:
        raise problem
    for other, answer in enumerate(told):
        if answer["problem"] is not None:
            raise ConfigurationError(f"Rank {other} (host {answer['host']}): {answer['problem']}")
    if told[0]["ended"]:
        return
    if _keeps_copies(run) and not (run.folder / CONFIGURATION).exists():
        # What its copies of checkpoints are of.
        check_folder(run.folder)
        run.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(run.folder / CONFIGURATION) as beside:
            OmegaConf.save(run.config, beside)
    load_recipe("fit")(run.config, run.folder)
    if _keeps_copies(run):
        (run.folder / ENDED).touch()


def _keeps_copies(run: Run) -> bool:
    """Tell whether this process is the one of its host that keeps copies of rank 0's checkpoints."""
    return bool(run.config.strategy.checkpoint_copies) and os.environ.get("LOCAL_RANK") == "0"


def has_ended(folder: Path) -> bool:
    """Tell whether a folder holds a run that has come to its end, and say so if it does."""
    ended = is_ended(folder)
    if ended:
        print(f"The run in {folder} has come to its end; pass another folder= for a new one.", flush=True)
    return ended


def check_plan_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigurationError when a plan file and options that it holds are given together."""
    keys = {override.partition("=")[0].lstrip("+") for override in overrides}
    if "plan" not in keys or "plan=auto" in overrides:
        return
    # Hosts are where the plan's stages run; the rest of a cluster is what a plan is made for.
    if "cluster.hosts" in keys:
        keys -= {"cluster", *(f"cluster.{name}" for name in ("hosts", "master", "port", "name"))}
    held = sorted(
        key
        for key in keys
        if key.split(".")[0] == "cluster" or key in {f"strategy.{option}" for option in PLAN_OPTIONS}
    )
    if held:
        raise ConfigurationError(
            f"{held[0]} and plan= contradict each other; change it in the plan file instead."
        )


def check(run: Run) -> Plan:
    """Return the run's plan, having tried all that can fail before its processes start."""
    config = run.config
    plan = run_plan(config)
    ranks = os.environ.get("WORLD_SIZE")
    if ranks is not None and int(ranks) != plan.processes:
        raise ConfigurationError(
            f"{ranks} processes were started but the plan has {len(plan.stages)} stages"
            f"{f' in {plan.replicas} replicas' if plan.replicas > 1 else ''}{_places(plan)}; start one process for each."
        )
    if ranks is None:
        check_hosts(plan)
        launch.check_port(config.port)
    run_strategy(config, plan)
    factory(config.data)().setup("fit")
    return plan


def check_hosts(plan: Plan) -> None:
    """Raise ConfigurationError when a plan's stages are on other hosts than this one, whose processes are started there."""
    if any(stage.host not in (None, host_name()) for stage in plan.stages):
        raise ConfigurationError(
            f"The plan has stages on other hosts than {host_name()}{_places(plan)}; start them with `hybridop launch`, or with "
            "torchrun on each host."
        )


def _places(plan: Plan) -> str:
    """Return how many stages are on which host, in brackets; nothing for a plan that names none."""
    counts = Counter(stage.host for stage in plan.stages if stage.host is not None)
    return f" ({', '.join(f'{host}: {count}' for host, count in counts.items())})" if counts else ""


def join_run(overrides: Sequence[str]) -> tuple[Run, bool]:
    """Return the run that torchrun's processes do together, and whether it goes on: all in one folder, from one checkpoint.

    Hosts share no disk: of the processes that have a checkpoint of the run the one with the latest will read it for all. A
    run that torchrun has started again, on any host, goes on as with `resume=auto`.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = compose_runs("fit", overrides)[0]
    if "TORCHELASTIC_RUN_ID" not in os.environ and not _names_folder(overrides):
        raise ConfigurationError(
            "RANK is set but torchrun did not start this process; pass folder=<folder>, so that all ranks share one."
        )
    store = meeting_store(rank=rank, size=size, timeout=SECONDS_TO_COME)
    mine = {
        "new": _portable(own.folder),
        # torchrun counts a start only where a process had failed.
        "goes_on": own.config.resume == AUTO or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0,
        "host": host_name(),
    }
    told = tell_all(store, mine, topic="fit", rank=rank, size=size)
    goes_on = any(other["goes_on"] for other in told)
    folder = Path(told[0]["new"])
    if goes_on and not _names_folder(overrides):
        candidate = unfinished_run(own.config, own.folder.parents[1])
        name = None if candidate is None else _portable(candidate)
        names = tell_all(store, name, topic="unfinished", rank=rank, size=size)
        # They are named after the time.
        folder = Path(max((one for one in names if one is not None), default=folder))
    run = compose_runs("fit", overrides, folder=folder)[0]
    known = (run.folder / CONFIGURATION).exists() and not differences(run.config, run.folder)
    found = newest_checkpoint(run.folder) if goes_on and known else None
    steps = tell_all(store, None if found is None else found.step, topic="checkpoint", rank=rank, size=size)
    step = max((one for one in steps if one is not None), default=None)
    with open_dict(run.config):
        if step is not None:
            reader = steps.index(step)
            # The ranks that are not to read a file of theirs have a name here that no file has.
            path = f"step {step} of rank {reader}" if found is None or rank != reader else str(found.path)
            run.config.resume = AUTO
            run.config.checkpoint = {"path": path, "step": step}
            _say(rank, f"Going on from step {step} of {folder}, which {told[reader]['host']} has.")
        elif goes_on:
            _say(rank, "No host has a checkpoint of this run, which begins at its first step.")
        run.config.present = [other["host"] for other in told] if "HYBRIDOP_HOST" in os.environ else None
    return run, goes_on


def _say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def _names_folder(overrides: Sequence[str]) -> bool:
    return any(override.startswith("folder=") for override in overrides)


def _portable(folder: Path) -> str:
    """Return a folder's path as other hosts can have it: below their own working directory if it is below this one's."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def write_configuration(run: Run, *, goes_on: bool) -> None:
    """Make the run's folder and write its configuration there; it is this process's until that ends.

    Raises ConfigurationError when the folder already holds a run, unless this one goes on with that.
    """
    check_folder(run.folder)
    run.folder.mkdir(parents=True, exist_ok=True)
    path = run.folder / CONFIGURATION
    if path.exists():
        if not goes_on:
            raise ConfigurationError(
                f"{run.folder} already holds a run; pass another folder=, remove that one, or go on with it by resume=auto."
            )
        check_continues(run.config, run.folder)
    if not hold(run.folder):
        raise ConfigurationError(f"The run in {run.folder} is still going on; wait for it, or end it.")
    # A full disk must not take what the run can be recognised by.
    with whole_file(path) as beside:
        OmegaConf.save(run.config, beside)
