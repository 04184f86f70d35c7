"""Composes the Hydra configuration of a run from the shipped groups and the user's overrides."""

import difflib
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightning_hybridop.planning.fields import read_yaml

PACKAGE = Path(__file__).resolve().parent.parent


class ConfigurationError(ValueError):
    """The configuration asked for does not exist or cannot work; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run to do: its configuration (without Hydra's own part) and the folder that everything is written to."""

    config: DictConfig
    folder: Path


def shipped_folder(name: str) -> Path:
    """Return the folder `conf` or `recipes`: inside the installed package, or beside it in a checkout."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def compose_runs(
    command: str, overrides: Sequence[str], *, multirun: bool = False, folder: Path | None = None
) -> list[Run]:
    """Return the run that the overrides describe, or with `multirun` one for each combination of swept values.

    `folder`, if given, is the folder of the run. Raises ConfigurationError for an override that Hydra does not
    understand or that names no known key or group.
    """
    with initialize_config_dir(str(shipped_folder("conf")), version_base="1.3"):
        try:
            if not multirun:
                config = _compose(command, overrides)
                return [_run(config, folder or _unused(Path(config.folder or config.hydra.run.dir), config))]
            runs: list[Run] = []
            parent: Path | None = None
            for number, chosen in enumerate(_combinations(overrides)):
                config = _compose(command, chosen)
                with open_dict(config.hydra):
                    config.hydra.job.num = number
                # Named after the time: all runs take the first one's.
                parent = parent or _unused(Path(config.folder or config.hydra.sweep.dir), config)
                runs.append(_run(config, parent / str(config.hydra.sweep.subdir)))
            return runs
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigurationError(_sentence(error, command, overrides)) from error


GROUPS = {
    "launch": ("model", "data", "cluster", "workload", "strategy", "trainer", "callbacks", "recipe"),
    "doctor": ("model", "data", "cluster", "workload", "strategy", "trainer", "callbacks", "recipe"),
    "plan": ("cluster", "workload"),
    "simulate": ("cluster", "workload"),
    "compare": ("cluster", "workload"),
    "profile": ("model",),
    "export": ("model",),
    "rebuild": (),
}
"""The groups that a command's configuration is made of, where it is not made of all."""


def check_folder(folder: Path) -> None:
    """Raise ConfigurationError when nothing can be written to a folder, which need not exist yet."""
    above = next(path for path in (folder, *folder.parents) if path.exists() or path == path.parent)
    if not above.is_dir():
        raise ConfigurationError(
            f"folder: {above} is a file, so nothing can be written to {folder}; pass another folder=."
        )
    if not os.access(above, os.W_OK | os.X_OK) or len(folder.name.encode()) > 255:
        raise ConfigurationError(f"folder: {folder} cannot be written; pass another folder=.")


def groups(command: str = "fit") -> dict[str, tuple[str, ...]]:
    """Return the groups of a command's configuration, each with the names of its choices."""
    conf = shipped_folder("conf")
    return {
        folder.name: tuple(sorted(file.stem for file in folder.glob("*.yaml")))
        for folder in sorted(conf.iterdir())
        if folder.is_dir() and folder.name != "hydra" and folder.name in GROUPS.get(command, (folder.name,))
    }


def _compose(command: str, overrides: Sequence[str]) -> DictConfig:
    return compose(command, list(overrides), return_hydra_config=True)


def _unused(folder: Path, config: DictConfig) -> Path:
    """Return `folder`, or its name with a number when it was named after a second in which another run began."""
    names = itertools.chain(
        [folder], (folder.with_name(f"{folder.name}-{count}") for count in itertools.count(2))
    )
    return folder if config.folder else next(name for name in names if not name.exists())


def _run(config: DictConfig, folder: Path) -> Run:
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    own.folder = str(folder.resolve())
    if own.get("hosts") is not None:
        with open_dict(own):
            own.cluster = _hosts(own.hosts)
    if missing := sorted(OmegaConf.missing_keys(own)):
        raise ConfigurationError(_missing(missing[0]))
    OmegaConf.resolve(own)
    return Run(config=own, folder=folder.resolve())


def _hosts(given: Any) -> Any:
    """Return what a hosts file says, given its path or its own content, to stand in the place of the cluster."""
    if isinstance(given, str):
        return read_yaml(Path(given).expanduser(), what="hosts file", error=ConfigurationError)
    if isinstance(given, DictConfig):
        return OmegaConf.to_container(given)
    raise ConfigurationError(f"hosts: found {given!r}, expected the path of a hosts file.")


def _combinations(overrides: Sequence[str]) -> Iterator[list[str]]:
    choices: list[list[str]] = []
    for text, override in zip(
        overrides, OverridesParser.create().parse_overrides(list(overrides)), strict=True
    ):
        swept = override.is_sweep_override()
        if swept and not override.is_discrete_sweep():
            raise ConfigurationError(
                f"{text} sweeps over an interval, which needs a search; give the values to run, as in {_example(text)}."
            )
        key = override.get_key_element()
        choices.append([f"{key}={value}" for value in override.sweep_string_iterator()] if swept else [text])
    for combination in itertools.product(*choices):
        yield list(combination)


def _example(override: str) -> str:
    return override.partition("=")[0] + "=1,2"


def _sentence(error: Exception, command: str, overrides: Sequence[str]) -> str:
    """Return what an error of Hydra's means for the user, in one sentence, with the nearest known name."""
    text = str(error)
    if unknown := re.search(r"Could not override '([^']+)'", text):
        key = unknown.group(1)
        nearest = _nearest(key, _known_keys(command, overrides)) or f"; +{key}=<value> would add one."
        return f"There is no option {key}{nearest}"
    if unknown := re.search(r"Could not find '(\w+)/([^']+)'", text):
        group, choice = unknown.groups()
        known = groups().get(group, ())
        return f"There is no {group}={choice}; choose from: {', '.join(known)}."
    if missing := re.search(r"Missing mandatory value: (\S+)", text):
        return _missing(missing.group(1))
    if "LexerNoViableAlt" in text or type(error).__name__.startswith("Lexer"):
        return "An override cannot be read; write it as name=value, with values that hold ~, : or spaces in quotes."
    if merging := re.search(r"Error merging override (\S+)", text):
        return f"{merging.group(1)} cannot take the place of what the configuration has there; --show prints what that is."
    if unreadable := re.search(r"Error parsing override '([^']*)'", text):
        return f"{unreadable.group(1)} cannot be read; write an override as name=value, in quotes if it has spaces."
    return " ".join(text.split())


def _missing(key: str) -> str:
    return f"{key} has no value; pass {key}=<value>."


def _nearest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not matches:
        # The last part alone may be right, with its group left out.
        matches = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    return f"; did you mean {matches[0]}?" if matches else ""


def _known_keys(command: str, overrides: Sequence[str]) -> list[str]:
    """Return all option names of the configuration with the chosen groups, `group.option` and group names."""
    chosen = [override for override in overrides if override.partition("=")[0] in groups()]
    try:
        config = compose(command, chosen)
    except (HydraException, OmegaConfBaseException):
        config = compose(command)
    return [*groups(), *_flat(config, "")]


def _flat(config: DictConfig, prefix: str) -> Iterator[str]:
    for key in map(str, config):
        yield prefix + key
        child = config._get_node(key)  # the public way would try to resolve values that are still missing
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _flat(child, f"{prefix}{key}.")
