"""`hybridop gradients` on a tiny random model."""

import csv
from pathlib import Path

import pytest

from lightning_hybridop.cli import main
from lightning_hybridop.planning.plan import even_plan, save_plan

TINY = ["model=hf", "model.name=random-3-blocks", "data.batch_size=4", "strategy.micro_batches=2"]


def rows_in(folder: Path) -> list[dict[str, str]]:
    with (folder / "gradients.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_estimator_is_compared_with_the_true_gradient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, plan = tmp_path / "out", tmp_path / "plan.yaml"
    save_plan(even_plan(blocks=3, stages=3, zo_stages=2), plan)

    assert main(["gradients", *TINY, "queries=[1,40]", f"plan={plan}", f"folder={folder}", "--plot"]) == 0

    printed = capsys.readouterr().out
    rows = rows_in(folder)
    names = [
        "loss, minibatch",
        "loss, microbatch",
        "boundary, minibatch",
        "boundary, microbatch",
        "boundary, row",
    ]
    assert [row["estimator"] for row in rows] == [name for name in names for _ in range(2)] + ["adjoint"]
    assert all(name in printed for name in (*names, "adjoint", "stage 0", "stage 1", "norm"))
    by_name = {(row["estimator"], int(row["queries"])): row for row in rows}
    exact = by_name["adjoint", 0]
    for column in ("cosine", "cosine_0", "cosine_1", "norm_ratio"):
        assert float(exact[column]) == pytest.approx(1.0, abs=1e-5)
    # A loss query runs all three blocks, one at the boundary the first two.
    assert float(by_name["loss, microbatch", 40]["forwards"]) == 41
    assert float(by_name["boundary, row", 40]["forwards"]) == pytest.approx(1 + 40 * 2 / 3)
    for name in ("loss, microbatch", "loss, minibatch"):
        at_boundary = by_name[name.replace("loss", "boundary"), 40]
        assert float(by_name[name, 40]["cosine"]) == pytest.approx(float(at_boundary["cosine"]), abs=0.02)
    # Estimates are far longer than the gradient, and less so with more directions.
    assert (
        float(by_name["boundary, row", 1]["norm_ratio"])
        > float(by_name["boundary, row", 40]["norm_ratio"])
        > 1.5
    )
    # Base hidden states to both later stages and back to the zo stages: to the last one at the boundary alone.
    crossed = {name: int(by_name[name, 40]["bytes"]) for name in ("loss, microbatch", "boundary, row")}
    base = int(exact["bytes"]) // 4
    assert crossed["loss, microbatch"] == base * 2 * 41
    assert crossed["boundary, row"] == base * (3 + 40)
    assert (folder / "gradients.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["queries=[]"], "queries: found an empty list, expected numbers such as [1, 3, 12]."),
        (["queries=[0]"], "queries: found 0, expected a whole number of at least 1."),
        (
            ["cluster=local_4bp", "model.name=random-4-blocks"],
            "The plan has no zo stage with a bp stage behind it",
        ),
        (["warm_up=-1"], "warm_up: found -1"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    overrides: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gradients", *TINY, *overrides, f"folder={tmp_path / 'out'}"]) == 1

    assert message in capsys.readouterr().err
