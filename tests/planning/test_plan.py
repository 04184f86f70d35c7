import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybridop.planning.plan import (
    Estimator,
    ExecutorName,
    Plan,
    PlanError,
    Role,
    Stage,
    even_plan,
    load_plan,
    plan_from_dict,
    plan_to_dict,
    save_plan,
)
from tests.schedules.executor import plans

STAGES = (
    Stage(first=0, last=2, role="zo", name="board-0", device="npu:0", dtype="float16", speed=0.5),
    Stage(first=2, last=3, role="frozen"),
    Stage(first=3, last=5),
)
PLAN = Plan(blocks=5, stages=STAGES, micro_batches=2, queries=3, exit_queries=1, schedule="1f1b")


def stages_of(*ranges: tuple[int, int]) -> tuple[Stage, ...]:
    return tuple(Stage(first=first, last=last) for first, last in ranges)


def with_last(**change: Any) -> tuple[Stage, ...]:
    return (*STAGES[:2], replace(STAGES[2], **change))


def sizes(plan: Plan) -> list[int]:
    return [stage.last - stage.first for stage in plan.stages]


def test_roles_and_exit_stage() -> None:
    assert PLAN.zo_stages == (0,)
    assert PLAN.bp_stages == (2,)
    assert PLAN.exit_stage == 0
    assert even_plan(blocks=3, stages=3, zo_stages=2).exit_stage == 1
    assert even_plan(blocks=3, stages=3).exit_stage is None


def test_a_plan_is_a_value() -> None:
    assert hash(PLAN) == hash(replace(PLAN))
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN
    assert replace(PLAN, micro_batches=1) != PLAN


@pytest.mark.parametrize(
    ("blocks", "stages", "expected"),
    [(30, 4, [8, 8, 7, 7]), (30, 7, [5, 5, 4, 4, 4, 4, 4]), (6, 6, [1] * 6), (5, 1, [5])],
)
def test_even_plan_gives_the_remainder_to_earlier_stages(
    blocks: int, stages: int, expected: list[int]
) -> None:
    plan = even_plan(blocks=blocks, stages=stages)

    assert sizes(plan) == expected
    assert [block for stage in plan.stages for block in range(stage.first, stage.last)] == list(range(blocks))


def test_even_plan_puts_zo_stages_first_and_passes_options_on() -> None:
    plan = even_plan(blocks=4, stages=4, zo_stages=2, queries=7, difference="central")

    assert [stage.role for stage in plan.stages] == ["zo", "zo", "bp", "bp"]
    assert (plan.queries, plan.difference) == (7, "central")


def test_hidden_states_of_all_stages_but_the_last_travel_as_asked_for() -> None:
    plan = even_plan(blocks=4, stages=3, wire="int8")

    assert [stage.wire for stage in plan.stages] == ["int8", "int8", None]
    assert plan.wire == "int8"
    assert even_plan(blocks=4, stages=1, wire="int8").stages[0].wire is None
    assert replace(plan, stages=(replace(plan.stages[0], wire=None), *plan.stages[1:])).wire is None
    assert plan_from_dict(plan_to_dict(plan)) == plan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blocks": 2, "stages": 3}, "stages: found 3 stages for 2 blocks"),
        ({"blocks": 2, "stages": 0}, "stages: found 0"),
        ({"blocks": "2", "stages": 2}, "blocks: found '2'"),
        ({"blocks": 2, "stages": 2, "zo_stages": 3}, "zo_stages: found 3 of 2 stages"),
        ({"blocks": 2, "stages": 2, "zo_stages": -1}, "zo_stages: found -1"),
        ({"blocks": 2, "stages": 2, "micro_batches": 0}, "micro_batches: found 0"),
    ],
)
def test_even_plan_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        even_plan(**arguments)

    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": 0}, "blocks: found 0, expected a whole number of at least 1."),
        ({"micro_batches": 0}, "micro_batches: found 0, expected a whole number of at least 1."),
        ({"micro_batches": 1.5}, "micro_batches: found 1.5, expected a whole number of at least 1."),
        ({"queries": -1}, "queries: found -1, expected a whole number of at least 0."),
        ({"queries": True}, "queries: found True, expected a whole number of at least 0."),
        ({"exit_queries": -1}, "exit_queries: found -1, expected a whole number of at least 0."),
        ({"schedule": "pipedream"}, "schedule: found 'pipedream', expected one of hybridop, gpipe, 1f1b."),
        (
            {"difference": "backward"},
            "difference: found 'backward', expected one of forward, central, antithetic.",
        ),
        ({"exit_baseline": None}, "exit_baseline: found None, expected one of exit, full, running."),
        ({"stages": ()}, "stages: found none, expected at least one;"),
        ({"stages": list(STAGES)}, "stages: found list, expected a tuple of Stage."),
        ({"stages": None}, "stages: found NoneType, expected a tuple of Stage."),
        ({"stages": (*STAGES[:2], {"first": 3, "last": 5})}, "stages[2]: found dict, expected a Stage."),
        ({"blocks": 2}, "stages: found 3 stages for 2 blocks, expected at most one stage per block;"),
        ({"stages": STAGES[1:]}, "stages[0].first: blocks 0 to 1 are in no stage; start at 0."),
        ({"stages": STAGES[:2]}, "stages[1].last: blocks 3 to 4 are in no stage; the model has 5 blocks."),
        (
            {"stages": stages_of((0, 2), (3, 5)), "exit_queries": 0},
            "stages[1].first: block 2 is in no stage; start at 2.",
        ),
        (
            {"stages": stages_of((0, 3), (1, 5)), "exit_queries": 0},
            "stages[1].first: blocks 1 to 2 are in two stages; start at 3.",
        ),
        (
            {"stages": stages_of((3, 5), (0, 3)), "exit_queries": 0},
            "stages[0].first: blocks 0 to 2 are in no stage; start at 0.",
        ),
        (
            {"stages": stages_of((0, 2), (2, 6)), "exit_queries": 0},
            "stages[1].last: found 6, but the model has only 5 blocks.",
        ),
        (
            {"stages": stages_of((0, 0), (0, 5))},
            "stages[0].last: found 0 with first 0, expected a larger number;",
        ),
        ({"stages": stages_of((-1, 5))}, "stages[0].first: found -1, expected a whole number of at least 0."),
        (
            {"stages": with_last(role="npu")},
            "stages[2].role: found 'npu', expected one of zo, bp, frozen.",
        ),
        (
            {"stages": (replace(STAGES[0], role="bp"), *STAGES[1:]), "exit_queries": 0},
            "stages[1].role: found frozen behind a bp stage, but gradients cannot cross a forward-only stage;",
        ),
        (
            {"stages": (replace(STAGES[0], role="bp"), replace(STAGES[1], role="zo"), STAGES[2])},
            "stages[1].role: found zo behind a bp stage, but gradients cannot cross a forward-only stage;",
        ),
        (
            {"stages": with_last(dtype="int8")},
            "stages[2].dtype: found 'int8', expected one of None, float32, bfloat16, float16.",
        ),
        (
            {"stages": with_last(device="")},
            "stages[2].device: found '', expected a name such as",
        ),
        *(
            (
                {"stages": with_last(name=name)},
                f"stages[2].name: found {name!r}, expected the name of one of the cluster's devices.",
            )
            for name in ("", 3)
        ),
        *(
            (
                {"stages": with_last(speed=speed)},
                f"stages[2].speed: found {speed!r}, expected a number above 0.",
            )
            for speed in (0, -1.0, float("nan"), float("inf"), "fast", True)
        ),
        (
            {"stages": (replace(STAGES[0], role="frozen"), *STAGES[1:])},
            "exit_queries: found 1 without a zo stage to exit from;",
        ),
        (
            {"stages": with_last(executor="openvino")},
            "stages[2].executor: found openvino on a bp stage, but an inference runtime does not back-propagate;",
        ),
        (
            {"stages": with_last(executor="tensorrt")},
            "stages[2].executor: found 'tensorrt', expected one of torch, openvino, onnxruntime.",
        ),
        (
            {"stages": (replace(STAGES[0], weights="int8"), *STAGES[1:])},
            "stages[0].weights: found int8 with the executor torch,",
        ),
        (
            {"stages": (replace(STAGES[0], executor="openvino", weights="int4"), *STAGES[1:])},
            "stages[0].weights: found 'int4', expected one of None, int8.",
        ),
        (
            {"stages": (Stage(first=0, last=PLAN.blocks, wire="int4"),)},
            "stages[0].wire: found 'int4', expected one of None, bfloat16, float16, int8.",
        ),
        (
            {"stages": (Stage(first=0, last=PLAN.blocks, wire="int8"),), "exit_queries": 0},
            "stages[0].wire: found int8 on the last stage, which sends no hidden states;",
        ),
        ({"replicas": 0}, "replicas: found 0, expected a whole number of at least 1."),
        ({"estimator": "spsa"}, "estimator: found 'spsa', expected one of loss, boundary, adjoint."),
        ({"queries_per_forward": 0}, "queries_per_forward: found 0, expected a whole number of at least 1."),
        (
            {"queries_per_forward": 2},
            "queries_per_forward: found 2 with the estimator loss, but only with boundary",
        ),
        *(
            (
                {"estimator": estimator, "queries_per_forward": 1},
                f"estimator: found {estimator} with frozen behind the last zo stage,",
            )
            for estimator in ("boundary", "adjoint")
        ),
    ],
)
def test_a_plan_that_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        replace(PLAN, **change)

    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("roles", "options", "message"),
    [
        (["zo", "zo"], {"estimator": "boundary"}, "estimator: found boundary with no stage behind the last"),
        (
            ["zo", "frozen", "zo", "bp"],
            {"estimator": "boundary"},
            "stages[1].role: found frozen behind a zo stage, but the estimator boundary needs zo stages next to",
        ),
        (
            ["zo", "bp"],
            {"estimator": "adjoint", "exit_queries": 1},
            "exit_queries: found 1 with the estimator adjoint, which perturbs nothing; set it to 0.",
        ),
        (
            ["zo", "bp"],
            {"estimator": "adjoint", "queries_per_forward": 2},
            "queries_per_forward: found 2 with",
        ),
    ],
)
def test_an_estimator_that_cannot_have_what_it_needs_is_refused(
    roles: list[Role], options: dict[str, Any], message: str
) -> None:
    stages = tuple(Stage(first=index, last=index + 1, role=role) for index, role in enumerate(roles))

    with pytest.raises(PlanError) as error:
        Plan(blocks=len(roles), stages=stages, **options)

    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "roles", [["bp", "bp"], ["frozen", "bp"], ["frozen", "frozen", "zo", "zo", "bp"], ["frozen"]]
)
@pytest.mark.parametrize("estimator", ["boundary", "adjoint"])
def test_estimators_stand_behind_frozen_stages_and_do_not_matter_without_zo_stages(
    roles: list[Role], estimator: Estimator
) -> None:
    stages = tuple(Stage(first=index, last=index + 1, role=role) for index, role in enumerate(roles))

    assert Plan(blocks=len(roles), stages=stages, estimator=estimator).estimator == estimator


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (
            [(0, 8), (8, 16), (16, 23), (23, 29)],
            "stages[3].last: block 29 is in no stage; the model has 30 blocks.",
        ),
        ([(0, 8), (8, 16), (17, 23), (23, 30)], "stages[2].first: block 16 is in no stage; start at 16."),
        ([(1, 8), (8, 16), (16, 23), (23, 30)], "stages[0].first: block 0 is in no stage; start at 0."),
        # One missing and one doubled: the sum alone would look right.
        ([(0, 8), (7, 15), (15, 22), (22, 29)], "stages[1].first: block 7 is in two stages; start at 8."),
    ],
)
def test_a_split_that_misses_or_doubles_one_of_30_blocks_names_it(
    ranges: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(PlanError) as error:
        Plan(blocks=30, stages=stages_of(*ranges))

    assert str(error.value) == message


def test_a_saved_plan_is_one_that_a_person_can_read(tmp_path: Path) -> None:
    save_plan(PLAN, tmp_path / "plan.yaml")

    lines = (tmp_path / "plan.yaml").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "blocks: 5",
        "micro_batches: 2",
        "queries: 3",
        "exit_queries: 1",
        "estimator: loss",
        "queries_per_forward: 1",
        "schedule: 1f1b",
        "difference: forward",
        "exit_baseline: exit",
        "replicas: 1",
        "stages:",
        "- {first: 0, last: 2, role: zo, name: board-0, device: 'npu:0', dtype: float16, speed: 0.5}",
        "- {first: 2, last: 3, role: frozen}",
        "- {first: 3, last: 5, role: bp}",
    ]
    assert lines[0].startswith("#")


def test_a_hand_written_plan_with_comments_and_defaults(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "# two devices\n"
        "blocks: 30\n"
        "stages:  # in order\n"
        "  - {first: 0, last: 10, role: zo, speed: 2}  # the board by the window\n"
        "  - first: 10\n"
        "    last: 30\n"
    )

    assert load_plan(str(path)) == Plan(
        blocks=30, stages=(Stage(first=0, last=10, role="zo", speed=2.0), Stage(first=10, last=30))
    )


# Any text, and what YAML would read as something else unless it is quoted.
DEVICES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20) | st.sampled_from(
    ["null", "yes", "1e3", "12:30", "- a", "{a: b}", "# a", "a: b", "npu:0"]
)


EXECUTORS: list[ExecutorName] = ["torch", "openvino", "onnxruntime"]


@st.composite
def written_plans(draw: st.DrawFn) -> Plan:
    """Draw a legal plan with any value in every field."""
    plan = draw(plans(schedule=draw(st.sampled_from(["hybridop", "gpipe", "1f1b"]))))
    stages = tuple(
        replace(
            stage,
            name=draw(st.none() | DEVICES),
            dtype=draw(st.sampled_from([None, "float32", "bfloat16", "float16"])),
            executor=(executor := draw(st.sampled_from(EXECUTORS if stage.role != "bp" else ["torch"]))),
            device=draw(DEVICES) if executor == "torch" else "cpu",
            weights=draw(st.sampled_from([None, "int8"]))
            if stage.role != "bp" and executor != "torch"
            else None,
            speed=draw(st.floats(min_value=1e-12, max_value=1e15)),
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


@given(plan=written_plans())
@settings(deadline=None, max_examples=60)
def test_saving_and_loading_gives_the_same_plan(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.getbasetemp() / "plan.yaml"

    save_plan(plan, path)

    assert load_plan(path) == plan
    assert plan_from_dict(plan_to_dict(plan)) == plan


def test_a_plan_as_a_dictionary_holds_plain_values() -> None:
    values = plan_to_dict(PLAN)

    assert yaml.safe_load(yaml.safe_dump(values)) == values
    assert values["stages"][2] == {"first": 3, "last": 5, "role": "bp"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan: found NoneType, expected fields with values."),
        ("# only a remark", "plan: found NoneType, expected fields with values."),
        ("- 1", "plan: found list, expected fields with values."),
        ("30", "plan: found int, expected fields with values."),
        ("blocks: 2", "plan.stages: missing; it has no default, give it a value."),
        ("stages: [{first: 0, last: 2}]", "plan.blocks: missing;"),
        ("{blocks: 2, stages: 2}", "stages: found int, expected a list with one entry per stage."),
        ("{blocks: 2, stages: [2]}", "stages[0]: found int, expected fields with values."),
        ("{blocks: 2, stages: [{first: 0}]}", "stages[0].last: missing;"),
        (
            "{blocks: 2, querys: 3, stages: [{first: 0, last: 2}]}",
            "plan.querys: unknown field; did you mean queries?",
        ),
        (
            "{blocks: 2, stages: [{first: 0, last: 2, devise: cpu}]}",
            "stages[0].devise: unknown field; did you mean device?",
        ),
        (
            "{blocks: 2, 7: 3, stages: [{first: 0, last: 2}]}",
            "plan.7: unknown field; known fields: blocks, stages, micro_batches,",
        ),
        ("{blocks: 2, stages: [{first: 0, last: 2, role: []}]}", "stages[0].role: found [], expected one of"),
        (
            "{blocks: 2, stages: [{first: 0, last: two}]}",
            "stages[0].last: found 'two', expected a whole number",
        ),
        (
            "{blocks: 2, micro_batches: null, stages: [{first: 0, last: 2}]}",
            "micro_batches: found None, expected a whole number",
        ),
        ("{blocks: '2', stages: [{first: 0, last: 2}]}", "blocks: found '2', expected a whole number"),
        ("{blocks: 2, queries: yes, stages: [{first: 0, last: 2}]}", "queries: found True, expected a whole"),
        (
            "{blocks: 2, exit_queries: 1.0, stages: [{first: 0, last: 2}]}",
            "exit_queries: found 1.0, expected a whole number",
        ),
        ("{blocks: 2, schedule: 1, stages: [{first: 0, last: 2}]}", "schedule: found 1, expected one of"),
        ("{blocks: 2, stages: }", "stages: found NoneType, expected a list"),
        ("{blocks: 2, stages: [{first: no, last: 2}]}", "stages[0].first: found False, expected a whole"),
        ("{blocks: 2, stages: [{first: 0, last: 2, role: }]}", "stages[0].role: found None, expected one of"),
        (
            "{blocks: 2, stages: [{first: 0, last: 2, device: 0}]}",
            "stages[0].device: found 0, expected a name",
        ),
        (
            "{blocks: 2, stages: [{first: 0, last: 2, speed: fast}]}",
            "stages[0].speed: found 'fast', expected a number above 0.",
        ),
        (
            "{blocks: 2, stages: [{first: 0, last: 2, speed: null}]}",
            "stages[0].speed: found None, expected a number above 0.",
        ),
        (
            "{blocks: 2, stages: [{first: 0, last: 2, speed: .nan}]}",
            "stages[0].speed: found nan, expected a number above 0.",
        ),
    ],
)
def test_a_file_that_holds_no_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)

    with pytest.raises(PlanError) as error:
        load_plan(path)

    assert str(error.value).startswith(message)


def test_a_file_that_is_missing_or_no_yaml_is_refused_with_its_path(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("stages: [")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xfa")

    with pytest.raises(
        PlanError, match=r"^plan: cannot read .*absent\.yaml \(No such file or directory\); give"
    ):
        load_plan(tmp_path / "absent.yaml")
    for path in (broken, binary):
        with pytest.raises(PlanError, match=rf"^plan: .*{path.name} is not a YAML file \(.*\)\.$") as error:
            load_plan(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.mkdir [{folder}]",
        "{{blocks: 2, stages: !!python/object/apply:os.mkdir [{folder}]}}",
    ],
)
def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "made_by_the_file"
    path = tmp_path / "plan.yaml"
    path.write_text(text.format(folder=folder))

    with pytest.raises(PlanError, match=r"^plan: .*plan\.yaml is not a YAML file \(.*python/object"):
        load_plan(path)

    assert not folder.exists()
