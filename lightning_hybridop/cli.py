"""The command `hybridop`: reads its arguments, answers `--help`, and says in one sentence what went wrong."""

import difflib
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence

from omegaconf import OmegaConf

from lightning_hybridop.commands.configuration import compose_runs, groups
from lightning_hybridop.commands.failures import RunInterruptedError, sentence

COMMANDS = {"fit": "fine-tune a language model over the stages of a plan"}

HELP = """\
usage: hybridop <command> [options]

Fine-tunes language models in one pipeline of forward-only and back-propagating devices.

commands:
{commands}

hybridop <command> --help tells more about each. Start with: hybridop fit recipe=quickstart
"""

FIT_HELP = """\
usage: hybridop fit [name=value ...] [--multirun] [--show]

Fine-tunes a language model with LoRA over the stages of a plan, in local processes that it starts itself or in those
of torchrun, and writes adapter/, checkpoints/, metrics.csv, plan.yaml, timeline.png, timeline.json, summary.json and
config.yaml to one folder.

choices of each group (name=choice):
{groups}

often used options (name=value; --show prints all):
  strategy.queries=<Q>              perturbations per micro-batch on zo stages
  strategy.exit_queries=<Q'>        further perturbations that leave at the last zo stage
  strategy.micro_batches=<M>        slices of a mini-batch
  strategy.epsilon=<size>           size of a perturbation
  cluster.zo_role=frozen            zo stages only compute: what the others learn by themselves
  plan=<file>                       a plan file in the place of cluster and the options above
  model.learning_rate=<rate>        of Adam; strategy.zo_lr_scale multiplies it on zo stages
  model.name=<hub id or folder>     another model, with model=hf
  data.train=<file> data.test=<file>    CSV files of data=agnews
  data.held_out_rows=<rows>         rows that accuracy and F1 are measured on
  trainer.max_steps=<steps>         length of the run
  folder=<folder>                   where everything is written; by default outputs/<date>/<time>-<recipe>
  port=<port>                       on which the processes find each other; by default a free one
  debug=true                        stack traces of errors

flags:
  --multirun, -m    one run for each combination of values given as name=a,b
  --show            print the configuration and stop
  --help, -h        this text

examples:
  hybridop fit recipe=quickstart
  hybridop fit recipe=quickstart strategy.queries=4 trainer.max_steps=20
  hybridop fit recipe=agnews_smollm2 cluster.zo_role=frozen
  hybridop fit recipe=quickstart cluster=local_1bp
  hybridop fit recipe=quickstart strategy.queries=1,4 --multirun
  torchrun --nproc-per-node 4 -m lightning_hybridop fit recipe=quickstart

The overrides are Hydra's: lists, groups (+group=choice), new keys (+key=value) and removals (~key) work as there.
"""

_FLAGS = {
    "--multirun": "--multirun",
    "-m": "--multirun",
    "--show": "--show",
    "--help": "--help",
    "-h": "--help",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hybridop` with the given arguments (default: those of the process) and return its exit code.

    0: done; 1: the configuration cannot work or a run failed; 2: no such command or flag; 128 + n: ended by signal n.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("--help", "-h"):
        print(HELP.format(commands=_columns({name: (text,) for name, text in COMMANDS.items()})), end="")
        return 0
    command, *rest = given
    if command not in COMMANDS:
        nearest = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"choose from: {', '.join(COMMANDS)}."
        return _fail(f"There is no command {command}; {hint}")
    return _fit(rest)


def _fit(arguments: Sequence[str]) -> int:
    flags = {_FLAGS.get(argument) for argument in arguments if argument in _FLAGS}
    overrides = [argument for argument in arguments if argument not in _FLAGS]
    if "--help" in flags:
        print(FIT_HELP.format(groups=_columns(groups())), end="")
        return 0
    for override in overrides:
        if override.startswith("-"):
            nearest = difflib.get_close_matches(override, _FLAGS, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else "options are written as name=value."
            return _fail(f"There is no flag {override}; {hint}")
    try:
        if "--show" in flags:
            _show(overrides, multirun="--multirun" in flags)
        else:
            from lightning_hybridop.commands.fit import fit  # brings torch in, which --help can do without

            fit(overrides, multirun="--multirun" in flags)
    except KeyboardInterrupt:
        return _fail("The run was interrupted.", code=128 + signal.SIGINT)
    except RunInterruptedError as error:
        return _fail(sentence(error), code=128 + error.signal)
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or "debug=true" in overrides:
            traceback.print_exc()
        return _fail(sentence(error), code=1)
    return 0


def _show(overrides: Sequence[str], *, multirun: bool) -> None:
    for run in compose_runs("fit", overrides, multirun=multirun):
        print(OmegaConf.to_yaml(run.config), end="")


def _columns(rows: Mapping[str, Sequence[str]]) -> str:
    """Return one indented line for each row, the names padded to the longest one."""
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name:<{width}}  {', '.join(texts)}" for name, texts in rows.items())


def _fail(message: str, *, code: int = 2) -> int:
    print(f"hybridop: {message}", file=sys.stderr, flush=True)
    return code
