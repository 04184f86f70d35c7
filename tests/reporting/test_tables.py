import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from lightning_hybridop.planning.plan import Figures, Plan
from lightning_hybridop.reporting.tables import Change, plan_table, prediction_lines, run_summary


def rows(table: RenderableType) -> list[list[str]]:
    """Return the cells of what a terminal of 100 columns would show, words of one cell kept together."""
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(table)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()]
        for line in output.splitlines()
        if line.strip()
    ]


def test_run_summary_shows_what_was_learnt_and_every_stage(plan: Plan) -> None:
    shown = rows(
        run_summary(
            plan=plan,
            loss=Change(before=1.5, after=0.25),
            scores={"accuracy": Change(before=0.612, after=0.82), "F1a": Change(before=None, after=0.8)},
            samples_per_second=6.54321,
            comu_ti=(0.6, 0.7),
            peak_memory_mib=(1234.4, 900),
            sent_mib=(0.125, 2),
        )
    )
    for expected in (
        ["training loss", "1.5000", "0.2500", "-1.2500"],
        ["accuracy", "0.612", "0.820", "+0.208"],
        ["F1a", "–", "0.800", "–"],
        ["samples / s", "6.54"],
        ["0", "zo", "0-1", "60.0%", "1,234", "0.12"],
        ["1", "bp", "2", "70.0%", "900", "2.00"],
        ["all stages", "65.0%", "2.12"],
    ):
        assert expected in shown


def test_what_was_not_measured_is_a_dash_or_left_out(plan: Plan) -> None:
    shown = rows(run_summary(plan=plan, loss=Change(before=None, after=0.25)))
    assert ["training loss", "–", "0.2500", "–"] in shown
    assert ["0", "zo", "0-1", "–", "–"] in shown
    assert not any("accuracy" in row or "F1a" in row or "all stages" in row for row in shown)


def test_values_that_do_not_match_the_stages_are_refused(plan: Plan) -> None:
    with pytest.raises(ValueError, match="comu_ti has 3 values, expected 2"):
        run_summary(plan=plan, loss=Change(before=1, after=1), comu_ti=(0.1, 0.2, 0.3))


def test_plan_table_shows_every_field_of_a_stage(plan: Plan) -> None:
    shown = rows(plan_table(plan))
    assert ["0", "zo", "0-1", "npu:0", "as loaded", "1"] in shown
    assert ["1", "bp", "2", "cpu", "bfloat16", "1"] in shown
    sending = dataclasses.replace(plan.stages[0], wire="int8")
    shown = rows(plan_table(dataclasses.replace(plan, stages=(sending, *plan.stages[1:]))))
    assert ["0", "zo", "0-1", "npu:0", "as loaded · sends int8", "1"] in shown
    assert "schedule hybridop · M = 1 · Q = 1 · Q' = 1 · forward difference" in " ".join(
        cell for row in shown for cell in row
    )


def test_plan_table_names_the_estimator_and_inference_runtimes(plan: Plan) -> None:
    first = dataclasses.replace(plan.stages[0], device="cpu", executor="openvino", weights="int8")
    stages = (first, *plan.stages[1:])

    def text(**changes: Any) -> str:
        shown = rows(plan_table(dataclasses.replace(plan, stages=stages, **changes)))
        return " ".join(cell for row in shown for cell in row)

    assert "cpu · openvino int8" in text()
    assert "Q = 1 · estimator boundary · Q' = 1 · forward difference" in text(estimator="boundary")
    assert text(estimator="adjoint", exit_queries=0).endswith("M = 1 · estimator adjoint")


def test_a_prediction_stands_beside_what_was_measured(plan: Plan) -> None:
    predicted = Figures(iteration_seconds=2.0, comu_ti=0.5, memory_mib=(1.0, 2.0))
    measured = Figures(iteration_seconds=2.1, comu_ti=0.45, memory_mib=(3.0, 4.0))

    assert prediction_lines(plan) == []
    assert prediction_lines(dataclasses.replace(plan, predicted=predicted)) == []
    assert prediction_lines(dataclasses.replace(plan, predicted=predicted, measured=measured)) == [
        "iteration: predicted 2.000 s, measured 2.100 s (+5.0%) · Comu_ti: predicted 50.0%, measured 45.0%"
    ]
