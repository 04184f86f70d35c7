"""The plan: which stage holds which blocks, in which role, with how many micro-batches and queries."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

Role = Literal["zo", "bp", "frozen"]
ScheduleName = Literal["hybridop", "gpipe", "1f1b"]
Difference = Literal["forward", "central"]
ExitBaseline = Literal["exit", "full"]
DTypeName = Literal["float32", "bfloat16", "float16"]

_HEADER = """\
# A stage runs the blocks `first` to `last` - 1 as zo (learns from perturbations), bp (back-propagates) or frozen
# (learns nothing). It may also have a device, a dtype and a relative speed."""


class PlanError(ValueError):
    """A plan that cannot run; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One device's contiguous range `[first, last)` of transformer blocks.

    `dtype` is what its frozen weights are cast to (None: left as loaded). `speed` is relative: a forward of one
    block takes `1 / speed` units of time.
    """

    first: int
    last: int
    role: Role = "bp"
    device: str = "cpu"
    dtype: DTypeName | None = None
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A pipeline over a model of `blocks` transformer blocks.

    `micro_batches` is M, `queries` Q and `exit_queries` Q' of the paper.

    Raises:
        PlanError: a field has a value that cannot run.
    """

    blocks: int
    stages: tuple[Stage, ...]
    micro_batches: int = 4
    queries: int = 1
    exit_queries: int = 0
    schedule: ScheduleName = "hybridop"
    difference: Difference = "forward"
    exit_baseline: ExitBaseline = "exit"

    def __post_init__(self) -> None:
        _check_integer("blocks", self.blocks, 1)
        _check_integer("micro_batches", self.micro_batches, 1)
        _check_integer("queries", self.queries, 0)
        _check_integer("exit_queries", self.exit_queries, 0)
        _check_choice("schedule", self.schedule, get_args(ScheduleName))
        _check_choice("difference", self.difference, get_args(Difference))
        _check_choice("exit_baseline", self.exit_baseline, get_args(ExitBaseline))
        if not isinstance(self.stages, tuple):
            # A list would make the plan unhashable, and schedules are cached by plan.
            raise PlanError(f"stages: found {type(self.stages).__name__}, expected a tuple of Stage.")
        if not self.stages:
            raise PlanError(
                "stages: found none, expected at least one; add a line with first, last and role."
            )
        if len(self.stages) > self.blocks:
            raise PlanError(
                f"stages: found {len(self.stages)} stages for {self.blocks} blocks, expected at most one stage per "
                "block; use fewer stages."
            )
        for index, stage in enumerate(self.stages):
            _check_stage(index, stage)
        _check_cover(self.blocks, self.stages)
        _check_role_order(self.stages)
        if self.exit_queries > 0 and not self.zo_stages:
            raise PlanError(
                f"exit_queries: found {self.exit_queries} without a zo stage to exit from; set it to 0 or give a stage "
                "the role zo."
            )

    @property
    def zo_stages(self) -> tuple[int, ...]:
        """Indices of the stages that learn from perturbations."""
        return tuple(index for index, stage in enumerate(self.stages) if stage.role == "zo")

    @property
    def bp_stages(self) -> tuple[int, ...]:
        """Indices of the stages that back-propagate."""
        return tuple(index for index, stage in enumerate(self.stages) if stage.role == "bp")

    @property
    def exit_stage(self) -> int | None:
        """The last zo stage, where early exits leave; None without a zo stage."""
        return self.zo_stages[-1] if self.zo_stages else None


def even_plan(*, blocks: int, stages: int, zo_stages: int = 0, **options: Any) -> Plan:
    """Spread `blocks` evenly over `stages`, earlier stages taking the remainder; the first `zo_stages` are zo.

    `options` are further fields of `Plan`.

    Raises:
        PlanError: more stages than blocks, more zo stages than stages, or a bad option.
    """
    _check_integer("blocks", blocks, 1)
    _check_integer("stages", stages, 1)
    _check_integer("zo_stages", zo_stages, 0)
    if zo_stages > stages:
        raise PlanError(f"zo_stages: found {zo_stages} of {stages} stages; use at most {stages}.")
    if stages > blocks:
        raise PlanError(
            f"stages: found {stages} stages for {blocks} blocks, expected at most one stage per block; use fewer stages."
        )
    bounds = [index * (blocks // stages) + min(index, blocks % stages) for index in range(stages + 1)]
    ranges = tuple(
        Stage(first=bounds[index], last=bounds[index + 1], role="zo" if index < zo_stages else "bp")
        for index in range(stages)
    )
    return Plan(blocks=blocks, stages=ranges, **options)


def load_plan(path: str | Path) -> Plan:
    """Read a plan from a YAML file.

    Raises:
        PlanError: the file is missing, is not YAML, or holds an invalid plan.
    """
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"plan: cannot read {path} ({error.strerror}); give the path of a plan's YAML file."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise PlanError(f"plan: {path} is not a YAML file ({reason}).") from error
    return plan_from_dict(values)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as YAML that a person can read and edit: one line per stage, defaults left out of stages."""
    values = plan_to_dict(plan)
    stages = values.pop("stages")
    lines = [
        _HEADER,
        *(yaml.safe_dump({name: value}, sort_keys=False).rstrip() for name, value in values.items()),
    ]
    lines.append("stages:")
    for stage in stages:
        inline = yaml.safe_dump(stage, default_flow_style=True, sort_keys=False, width=1000).strip()
        lines.append(f"- {inline}")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain containers; `plan_from_dict` reads them back."""
    values = dataclasses.asdict(plan)
    defaults = {field.name: field.default for field in dataclasses.fields(Stage)}
    shown = ("first", "last", "role")
    values["stages"] = [
        {name: value for name, value in stage.items() if name in shown or value != defaults[name]}
        for stage in values["stages"]
    ]
    return values


def plan_from_dict(values: Any) -> Plan:
    """Return the plan that plain containers describe.

    Raises:
        PlanError: an unknown or missing field, or a value that cannot run.
    """
    fields = _checked_fields("plan", values, Plan)
    stages = fields["stages"]
    if not isinstance(stages, (list, tuple)):
        raise PlanError(f"stages: found {type(stages).__name__}, expected a list with one entry per stage.")
    fields["stages"] = tuple(
        Stage(**_checked_fields(f"stages[{index}]", stage, Stage)) for index, stage in enumerate(stages)
    )
    return Plan(**fields)


def _checked_fields(where: str, values: Any, kind: type[Plan] | type[Stage]) -> dict[str, Any]:
    """Return `values` as keyword arguments of `kind`, refusing unknown and missing names."""
    if not isinstance(values, Mapping):
        raise PlanError(f"{where}: found {type(values).__name__}, expected fields with values.")
    known = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(known)}."
            raise PlanError(f"{where}.{name}: unknown field; {hint}")
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.name not in values:
            raise PlanError(f"{where}.{field.name}: missing; it has no default, give it a value.")
    return dict(values)


def _check_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(f"{name}: found {value!r}, expected a whole number of at least {least}.")


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise PlanError(f"{name}: found {value!r}, expected one of {', '.join(map(str, choices))}.")


def _check_stage(index: int, stage: Any) -> None:
    where = f"stages[{index}]"
    if not isinstance(stage, Stage):
        raise PlanError(f"{where}: found {type(stage).__name__}, expected a Stage.")
    _check_integer(f"{where}.first", stage.first, 0)
    _check_integer(f"{where}.last", stage.last, 0)
    _check_choice(f"{where}.role", stage.role, get_args(Role))
    _check_choice(f"{where}.dtype", stage.dtype, (None, *get_args(DTypeName)))
    if stage.last <= stage.first:
        raise PlanError(
            f"{where}.last: found {stage.last} with first {stage.first}, expected a larger number; give the stage at "
            "least one block or remove it."
        )
    if not isinstance(stage.device, str) or not stage.device:
        raise PlanError(
            f"{where}.device: found {stage.device!r}, expected a name such as cpu, cuda:0 or npu."
        )
    speed = stage.speed
    if not isinstance(speed, (int, float)) or isinstance(speed, bool) or not 0 < speed < float("inf"):
        raise PlanError(f"{where}.speed: found {speed!r}, expected a number above 0.")


def _check_cover(blocks: int, stages: tuple[Stage, ...]) -> None:
    """Check that the stages run every block once and in order."""
    expected = 0
    for index, stage in enumerate(stages):
        if stage.first > expected:
            raise PlanError(
                f"stages[{index}].first: {named_blocks(expected, stage.first)} in no stage; start at {expected}."
            )
        if stage.first < expected:
            raise PlanError(
                f"stages[{index}].first: {named_blocks(stage.first, min(expected, stage.last))} in two stages; start at "
                f"{expected}."
            )
        expected = stage.last
    last = len(stages) - 1
    if expected < blocks:
        raise PlanError(
            f"stages[{last}].last: {named_blocks(expected, blocks)} in no stage; the model has {blocks} blocks."
        )
    if expected > blocks:
        raise PlanError(f"stages[{last}].last: found {expected}, but the model has only {blocks} blocks.")


def named_blocks(first: int, last: int) -> str:
    """Return "block 3 is" or "blocks 3 to 5 are" for the blocks `[first, last)`."""
    return f"block {first} is" if last - first == 1 else f"blocks {first} to {last - 1} are"


def _check_role_order(stages: tuple[Stage, ...]) -> None:
    for index in range(1, len(stages)):
        if stages[index].role != "bp" and stages[index - 1].role == "bp":
            raise PlanError(
                f"stages[{index}].role: found {stages[index].role} behind a bp stage, but gradients cannot cross a "
                "forward-only stage; put zo and frozen stages before all bp stages."
            )
