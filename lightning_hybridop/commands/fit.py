"""`hybridop fit`: checks a configuration, makes the run's folder and has its processes run the recipe."""

import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from torch.distributed import TCPStore

from lightning_hybridop.commands import launch
from lightning_hybridop.commands.configuration import ConfigurationError, Run, check_folder, compose_runs
from lightning_hybridop.commands.parts import PLAN_OPTIONS, factory, run_plan, run_strategy
from lightning_hybridop.commands.recipes import load_recipe
from lightning_hybridop.commands.worker import CONFIGURATION
from lightning_hybridop.planning.plan import Plan


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
        run = join_run(overrides)
        check(run)
        if int(os.environ["RANK"]) == 0:
            write_configuration(run)
        load_recipe("fit")(run.config, run.folder)
        return
    runs = compose_runs("fit", overrides, multirun=multirun)
    plans = [check(run) for run in runs]
    for number, (run, plan) in enumerate(zip(runs, plans, strict=True), start=1):
        if len(runs) > 1:
            print(f"Run {number} of {len(runs)}: {run.folder}", flush=True)
        write_configuration(run)
        if plan.processes == 1:
            load_recipe("fit")(run.config, run.folder)
        else:
            launch.launch(run.folder, processes=plan.processes, port=run.config.port)


def check_plan_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigurationError when a plan file and options that it holds are given together."""
    keys = {override.partition("=")[0].lstrip("+") for override in overrides}
    if "plan" not in keys or "plan=auto" in overrides:
        return
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
            f"{f' in {plan.replicas} replicas' if plan.replicas > 1 else ''}; start one process for each."
        )
    if ranks is None:
        launch.check_port(config.port)
    run_strategy(config, plan)
    factory(config.data)().setup("fit")
    return plan


def join_run(overrides: Sequence[str]) -> Run:
    """Return the run that torchrun's processes do together: rank 0 names the folder, the others take its name."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        run = compose_runs("fit", overrides)[0]
        if not any(override.startswith("folder=") for override in overrides):
            raise ConfigurationError(
                "RANK is set but torchrun did not start this process; pass folder=<folder>, so that all ranks share one."
            )
        return run
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False)
    key = f"hybridop/folder/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if int(os.environ["RANK"]) == 0:
        run = compose_runs("fit", overrides)[0]
        store.set(key, str(run.folder))
        return run
    return compose_runs("fit", overrides, folder=Path(store.get(key).decode()))[0]


def write_configuration(run: Run) -> None:
    """Make the run's folder and write its configuration there.

    Raises ConfigurationError when the folder already holds a run.
    """
    check_folder(run.folder)
    run.folder.mkdir(parents=True, exist_ok=True)
    path = run.folder / CONFIGURATION
    if path.exists():
        raise ConfigurationError(
            f"{run.folder} already holds a run; pass another folder=, or remove that one."
        )
    OmegaConf.save(run.config, path)
