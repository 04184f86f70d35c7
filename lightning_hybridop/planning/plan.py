"""The plan: which stage holds which blocks, in which role, with how many micro-batches and queries."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from lightning_hybridop.planning.fields import check_number, check_whole, checked_fields, read_yaml

Role = Literal["zo", "bp", "frozen"]
ScheduleName = Literal["hybridop", "gpipe", "1f1b"]
Estimator = Literal["loss", "boundary", "adjoint"]
Difference = Literal["forward", "central", "antithetic"]
ExitBaseline = Literal["exit", "full", "running"]
DTypeName = Literal["float32", "bfloat16", "float16"]
ExecutorName = Literal["torch", "openvino", "onnxruntime"]
WeightsName = Literal["int8"]
WireName = Literal["bfloat16", "float16", "int8"]

MOST_PASSES = 4096
"""The most micro-batches, and queries of each, that a schedule is made for."""

PERTURBED_AHEAD = 8
"""With the boundary estimator, how many perturbed forwards a stage is ahead of the next one at most: they wait there."""

_FIGURES = ("predicted", "measured")

_HEADER = """\
# A stage runs the blocks `first` to `last` - 1 as zo (learns from perturbations), bp (back-propagates) or frozen
# (learns nothing). It may also have a name, a host, a device, a dtype, an executor and its weights, a wire (how its hidden
# states travel to the next stage), and relative times: speed, backward, transfer."""


class PlanError(ValueError):
    """A plan that cannot run; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One device's contiguous range `[first, last)` of transformer blocks.

    `name` is that of the cluster's device it was planned for, `host` the host that runs it (None: whichever).
    `executor` runs its blocks: torch, or an inference runtime where nothing back-propagates, which may keep its frozen
    `weights` as int8. `dtype` is what frozen weights are cast to, in a runtime the precision of its arithmetic (None:
    left as loaded). `wire` is how its hidden states travel to the next stage (None: in the dtype that they have);
    gradients come back over such a link in bfloat16. Schedules are made for relative times: a forward of one block takes
    `1 / speed` units, a backward `backward` forwards, and a hidden state or gradient `transfer` units to the next stage
    or back.
    """

    first: int
    last: int
    role: Role = "bp"
    name: str | None = None
    host: str | None = None
    device: str = "cpu"
    dtype: DTypeName | None = None
    executor: ExecutorName = "torch"
    weights: WeightsName | None = None
    wire: WireName | None = None
    speed: float = 1.0
    backward: float = 2.0
    transfer: float = 0.0

    @property
    def forward_time(self) -> float:
        """Relative time of a forward."""
        return (self.last - self.first) / self.speed

    @property
    def block_range(self) -> str:
        """The blocks as people count them, both ends included: `0-7`, or `3` for a single block."""
        last = self.last - 1
        return str(last) if self.first == last else f"{self.first}-{last}"


MIB = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a mini-batch of a plan takes, predicted or measured: seconds, Comu_ti of 1, and MiB of each stage."""

    iteration_seconds: float
    comu_ti: float
    memory_mib: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A pipeline over a model of `blocks` transformer blocks.

    `micro_batches` is M, `queries` Q and `exit_queries` Q' of the paper. zo stages learn by one `estimator`: from
    differences of the "loss", which need every perturbed forward to run to the end; at the "boundary", from what the
    first bp stage sends back, where perturbed forwards end at the last zo stage and `queries_per_forward` of them may
    ride together; or from exact "adjoint" gradients, for which they go back as bp stages do and nothing is perturbed. An
    "antithetic" `difference` walks a query's direction backwards in the next query. So many `replicas` of the pipeline run
    side by side, each with `micro_batches` of a mini-batch. What was `predicted` and `measured` of a plan
    is part of its file, not of what it is: plans that differ in nothing else are equal.

    Raises:
        PlanError: a field has a value that cannot run.
    """

    blocks: int
    stages: tuple[Stage, ...]
    micro_batches: int = 4
    queries: int = 1
    exit_queries: int = 0
    estimator: Estimator = "loss"
    queries_per_forward: int = 1
    schedule: ScheduleName = "hybridop"
    difference: Difference = "forward"
    exit_baseline: ExitBaseline = "exit"
    replicas: int = 1
    predicted: Figures | None = field(default=None, compare=False)
    measured: Figures | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_whole("blocks", self.blocks, 1, error=PlanError)
        check_whole("micro_batches", self.micro_batches, 1, MOST_PASSES, error=PlanError)
        check_whole("queries", self.queries, 0, MOST_PASSES, error=PlanError)
        check_whole("exit_queries", self.exit_queries, 0, MOST_PASSES, error=PlanError)
        check_whole("replicas", self.replicas, 1, MOST_PASSES, error=PlanError)
        check_whole("queries_per_forward", self.queries_per_forward, 1, MOST_PASSES, error=PlanError)
        _check_choice("estimator", self.estimator, get_args(Estimator))
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
        if self.stages[-1].wire is not None:
            raise PlanError(
                f"stages[{len(self.stages) - 1}].wire: found {self.stages[-1].wire} on the last stage, which sends no hidden "
                "states; leave it out there."
            )
        _check_role_order(self.stages)
        if self.exit_queries > 0 and not self.zo_stages:
            raise PlanError(
                f"exit_queries: found {self.exit_queries} without a zo stage to exit from; set it to 0 or give a stage "
                "the role zo."
            )
        _check_estimator(self)

    @property
    def zo_stages(self) -> tuple[int, ...]:
        """Indices of the stages that learn from perturbations."""
        return tuple(index for index, stage in enumerate(self.stages) if stage.role == "zo")

    @property
    def bp_stages(self) -> tuple[int, ...]:
        """Indices of the stages that back-propagate."""
        return tuple(index for index, stage in enumerate(self.stages) if stage.role == "bp")

    @property
    def processes(self) -> int:
        """How many processes run the plan: one for each stage of each replica."""
        return len(self.stages) * self.replicas

    @property
    def wire(self) -> WireName | None:
        """How hidden states travel, if all stages but the last send theirs in the same way; else None."""
        wires = {stage.wire for stage in self.stages[:-1]}
        return wires.pop() if len(wires) == 1 else None

    @property
    def exit_stage(self) -> int | None:
        """The last zo stage, where early exits leave; None without a zo stage."""
        return self.zo_stages[-1] if self.zo_stages else None


def even_plan(
    *, blocks: int, stages: int, zo_stages: int = 0, wire: WireName | None = None, **options: Any
) -> Plan:
    """Spread `blocks` evenly over `stages`, earlier stages taking the remainder; the first `zo_stages` are zo.

    `wire` is that of all stages but the last, `options` are further fields of `Plan`.

    Raises:
        PlanError: more stages than blocks, more zo stages than stages, or a bad option.
    """
    check_whole("blocks", blocks, 1, error=PlanError)
    check_whole("stages", stages, 1, error=PlanError)
    check_whole("zo_stages", zo_stages, 0, error=PlanError)
    if zo_stages > stages:
        raise PlanError(f"zo_stages: found {zo_stages} of {stages} stages; use at most {stages}.")
    if stages > blocks:
        raise PlanError(
            f"stages: found {stages} stages for {blocks} blocks, expected at most one stage per block; use fewer stages."
        )
    bounds = [index * (blocks // stages) + min(index, blocks % stages) for index in range(stages + 1)]
    ranges = tuple(
        Stage(
            first=bounds[index],
            last=bounds[index + 1],
            role="zo" if index < zo_stages else "bp",
            wire=wire if index < stages - 1 else None,
        )
        for index in range(stages)
    )
    return Plan(blocks=blocks, stages=ranges, **options)


def load_plan(path: str | Path) -> Plan:
    """Read a plan from a YAML file.

    Raises:
        PlanError: the file is missing, is not YAML, or holds an invalid plan.
    """
    return plan_from_dict(read_yaml(path, what="plan", error=PlanError))


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as YAML that a person can read and edit: one line per stage, defaults left out of stages."""
    values = plan_to_dict(plan)
    stages = values.pop("stages")
    figures = {name: values.pop(name) for name in _FIGURES if name in values}
    lines = [
        _HEADER,
        *(yaml.safe_dump({name: value}, sort_keys=False).rstrip() for name, value in values.items()),
    ]
    lines.append("stages:")
    for stage in stages:
        inline = yaml.safe_dump(stage, default_flow_style=True, sort_keys=False, width=1000).strip()
        lines.append(f"- {inline}")
    for name, value in figures.items():
        lines.append(
            yaml.safe_dump({name: value}, default_flow_style=None, sort_keys=False, width=1000).rstrip()
        )
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain containers; `plan_from_dict` reads them back."""
    values = dataclasses.asdict(plan)
    for name in _FIGURES:
        if values[name] is None:
            del values[name]
        else:
            values[name]["memory_mib"] = list(values[name]["memory_mib"])
    defaults = {option.name: option.default for option in dataclasses.fields(Stage)}
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
    fields = checked_fields("plan", values, Plan, error=PlanError)
    stages = fields["stages"]
    if not isinstance(stages, (list, tuple)):
        raise PlanError(f"stages: found {type(stages).__name__}, expected a list with one entry per stage.")
    fields["stages"] = tuple(
        Stage(**checked_fields(f"stages[{index}]", stage, Stage, error=PlanError))
        for index, stage in enumerate(stages)
    )
    for name in _FIGURES:
        if fields.get(name) is not None:
            fields[name] = _figures(name, fields[name])
    return Plan(**fields)


def _figures(where: str, values: Any) -> Figures:
    figures = checked_fields(where, values, Figures, error=PlanError)
    memory = figures["memory_mib"]
    if not isinstance(memory, (list, tuple)):
        raise PlanError(f"{where}.memory_mib: found {memory!r}, expected a list with one number per stage.")
    for name in ("iteration_seconds", "comu_ti"):
        check_number(f"{where}.{name}", figures[name], error=PlanError, above=False)
    for value in memory:
        check_number(f"{where}.memory_mib", value, error=PlanError, above=False)
    return Figures(**{**figures, "memory_mib": tuple(memory)})


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise PlanError(f"{name}: found {value!r}, expected one of {', '.join(map(str, choices))}.")


def _check_stage(index: int, stage: Any) -> None:
    where = f"stages[{index}]"
    if not isinstance(stage, Stage):
        raise PlanError(f"{where}: found {type(stage).__name__}, expected a Stage.")
    check_whole(f"{where}.first", stage.first, 0, error=PlanError)
    check_whole(f"{where}.last", stage.last, 0, error=PlanError)
    _check_choice(f"{where}.role", stage.role, get_args(Role))
    _check_choice(f"{where}.dtype", stage.dtype, (None, *get_args(DTypeName)))
    _check_choice(f"{where}.executor", stage.executor, get_args(ExecutorName))
    _check_choice(f"{where}.weights", stage.weights, (None, *get_args(WeightsName)))
    _check_choice(f"{where}.wire", stage.wire, (None, *get_args(WireName)))
    if stage.executor != "torch" and stage.role == "bp":
        raise PlanError(
            f"{where}.executor: found {stage.executor} on a bp stage, but an inference runtime does not back-propagate; use "
            "torch, or give the stage another role."
        )
    if stage.executor != "torch" and stage.device != "cpu":
        raise PlanError(
            f"{where}.executor: found {stage.executor} on the device {stage.device}, but torch's part of such a stage stays on "
            "the CPU; set device to cpu."
        )
    if stage.weights is not None and stage.executor == "torch":
        raise PlanError(
            f"{where}.weights: found {stage.weights} with the executor torch, but only an inference runtime has it; choose "
            "such an executor, or leave it out."
        )
    if stage.last <= stage.first:
        raise PlanError(
            f"{where}.last: found {stage.last} with first {stage.first}, expected a larger number; give the stage at "
            "least one block or remove it."
        )
    if not isinstance(stage.device, str) or not stage.device:
        raise PlanError(
            f"{where}.device: found {stage.device!r}, expected a name such as cpu, cuda:0 or npu."
        )
    if stage.name is not None and (not isinstance(stage.name, str) or not stage.name):
        raise PlanError(
            f"{where}.name: found {stage.name!r}, expected the name of one of the cluster's devices."
        )
    if stage.host is not None and (not isinstance(stage.host, str) or not stage.host.strip()):
        raise PlanError(f"{where}.host: found {stage.host!r}, expected the name of a host.")
    check_number(f"{where}.speed", stage.speed, error=PlanError)
    for name in ("backward", "transfer"):
        check_number(f"{where}.{name}", getattr(stage, name), error=PlanError, above=False)


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


def _check_estimator(plan: Plan) -> None:
    """Check that zo stages are given what their estimator needs; without zo stages there is nothing to estimate."""
    if plan.queries_per_forward > 1 and plan.estimator != "boundary":
        raise PlanError(
            f"queries_per_forward: found {plan.queries_per_forward} with the estimator {plan.estimator}, but only with "
            "boundary do queries ride together; set it to 1."
        )
    if plan.estimator == "loss" or plan.exit_stage is None:
        return
    behind = plan.stages[plan.exit_stage + 1].role if plan.exit_stage + 1 < len(plan.stages) else None
    if behind != "bp":
        raise PlanError(
            f"estimator: found {plan.estimator} with {behind or 'no stage'} behind the last zo stage, but its gradient "
            "comes from a bp stage there; add one, or use the estimator loss."
        )
    for index in range(plan.zo_stages[0], plan.exit_stage):
        if plan.stages[index].role == "frozen":
            raise PlanError(
                f"stages[{index}].role: found frozen behind a zo stage, but the estimator {plan.estimator} needs zo stages "
                "next to each other; put frozen stages before them, or use the estimator loss."
            )
    if plan.estimator == "adjoint" and plan.exit_queries > 0:
        raise PlanError(
            f"exit_queries: found {plan.exit_queries} with the estimator adjoint, which perturbs nothing; set it to 0."
        )
