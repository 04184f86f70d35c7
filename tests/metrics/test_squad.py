import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.text import SQuAD

from lightning_hybridop.metrics import SpanExactMatch, SpanF1
from lightning_hybridop.metrics.squad import normal_form

WORDS = (
    "the",
    "A",
    "an",
    "Denver",
    "denver",
    "Broncos",
    "308",
    "(308)",
    "the-end",
    "über",
    "...",
    "U.S.",
    "“x”",
)
texts = st.lists(st.sampled_from(WORDS), max_size=5).map(" ".join) | st.text(max_size=12)


def scores(predicted: list[str], answers: list[list[str]], batch: int = 7) -> dict[str, float]:
    exact, f1 = SpanExactMatch(), SpanF1()
    for start in range(0, len(predicted), batch):
        for metric in (exact, f1):
            metric.update(predicted[start : start + batch], answers[start : start + batch])
    return {"exact_match": float(exact.compute()), "f1": float(f1.compute())}


def reference(predicted: list[str], answers: list[list[str]]) -> dict[str, float]:
    metric = SQuAD()
    metric.update(
        [{"prediction_text": text, "id": str(index)} for index, text in enumerate(predicted)],
        [
            {"answers": {"text": accepted, "answer_start": [0] * len(accepted)}, "id": str(index)}
            for index, accepted in enumerate(answers)
        ],
    )
    return {name: float(value) / 100 for name, value in metric.compute().items()}


@given(rows=st.lists(st.tuples(texts, st.lists(texts, min_size=1, max_size=3)), min_size=1, max_size=9))
def test_any_texts_score_as_in_torchmetrics(rows: list[tuple[str, list[str]]]) -> None:
    predicted, answers = [text for text, _ in rows], [accepted for _, accepted in rows]
    assert scores(predicted, answers, batch=4) == pytest.approx(reference(predicted, answers), abs=1e-6)


def test_real_questions_with_made_up_predictions_score_as_in_torchmetrics(data_folder: Path) -> None:
    path = data_folder / "squad" / "xquad.en.json"
    if not path.is_file():
        pytest.skip("needs squad/xquad.en.json; name its parent folder in HYBRIDOP_DATA")
    draws = random.Random(0)
    predicted, answers = [], []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                accepted = [answer["text"] for answer in question["answers"]]
                words = paragraph["context"].split()
                start = draws.randrange(len(words))
                made_up = (
                    accepted[0],
                    f"The {accepted[0].upper()}!",
                    f"{accepted[0]} {words[start]}",
                    " ".join(accepted[0].split()[1:]),
                    " ".join(words[start : start + 3]),
                    "",
                )
                predicted.append(draws.choice(made_up))
                answers.append([*accepted, words[0]])
    found = scores(predicted, answers)
    assert len(predicted) == 1190
    assert found == pytest.approx(reference(predicted, answers), abs=1e-6)
    assert 0.3 < found["exact_match"] < found["f1"] < 0.8


def test_the_normal_form_is_the_official_one() -> None:
    assert normal_form("  The U.S.\tArmy's \n an-other  a ") == "us armys another"
    # Not ASCII, so left as they are; words that merely begin with an article as well.
    assert normal_form("“Theodore”—then") == "“theodore”—then"


def test_the_best_answer_counts() -> None:
    found = scores(["in the year 1973"], [["October 1973", "the year 1973", "1974"]])
    assert found == pytest.approx({"exact_match": 0.0, "f1": 2 * (2 / 3) / (5 / 3)})


def test_predictions_without_their_answers_are_refused() -> None:
    with pytest.raises(ValueError):
        SpanF1().update(["one", "two"], [["one"]])
