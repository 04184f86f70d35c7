import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.sources import DataError
from lightning_hybridop.data.squad import Question, SQuADData, articles_to_hold_out, read_squad


def article(title: str, context: str = "one two three", *questions: dict[str, Any]) -> dict[str, Any]:
    asked = questions or (question(),)
    return {"title": title, "paragraphs": [{"context": context, "qas": list(asked)}]}


def question(
    text: str = "six?", answers: tuple[tuple[str, int], ...] = (("two", 4), ("two three", 4))
) -> dict[str, Any]:
    return {
        "id": "q7",
        "question": text,
        "answers": [{"text": answer, "answer_start": start} for answer, start in answers],
    }


def written(folder: Path, *articles: Any, name: str = "rows.json") -> Path:
    path = folder / name
    path.write_text(json.dumps({"version": "1.1", "data": list(articles)}))
    return path


def test_questions_are_read_with_all_their_answers(tmp_path: Path) -> None:
    path = written(tmp_path, article("A"), article("B", "five six", question("one?", (("six", 5),))))
    assert read_squad(path, split="train") == [
        Question(
            title="A",
            context="one two three",
            question="six?",
            answers=(("two", 4), ("two three", 4)),
        ),
        Question(title="B", context="five six", question="one?", answers=(("six", 5),)),
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, ", article 2: found the fields none, expected 'title' among them."),
        (article("B", "one", question(answers=(("one", 1),))), ", article 2, question q7: found 'ne' at character 1 of "
         "the context, expected the answer 'one'."),
        (article("B", "one", question(answers=(("one", -1),))), ", article 2, question q7: found '' at character -1 "
         "of the context, expected the answer 'one'."),
        (article("B", "one", question(answers=())), ", article 2, question q7: no answer, expected at least one, as in "
         "SQuAD 1.1."),
        (article("B", "one", question(answers=(("", 0),))), ", article 2, question q7: found '' at character 0 of the "
         "context, expected the answer ''."),
        (article("B", "one", {"id": "x", "answers": []}), ", article 2, question x: found the fields id, answers, "
         "expected 'question' among them."),
    ],
)  # fmt: skip
def test_a_malformed_question_is_reported_with_its_place(wrong: Any, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, article("A"), wrong)
    with pytest.raises(DataError) as raised:
        read_squad(path, split="train")
    assert str(raised.value) == f"{path}{message}"


def test_files_that_are_no_json_empty_or_missing_are_reported(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{\n"data": [}')
    with pytest.raises(
        DataError, match=r"broken\.json, line 2: not valid JSON \(Expecting value\), expected"
    ):
        read_squad(tmp_path / "broken.json", split="train")
    with pytest.raises(DataError, match="no questions; expected articles of paragraphs"):
        read_squad(written(tmp_path), split="train")
    with pytest.raises(
        DataError, match=r"The SQuAD file missing\.json does not exist .* JSON file in data\.test"
    ):
        read_squad("missing.json", split="test")
    (tmp_path / "latin.json").write_bytes('{"data": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.json: not UTF-8 text"):
        read_squad(tmp_path / "latin.json", split="train")


def test_a_hub_name_is_read_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, *, split: str) -> list[dict[str, Any]]:
        start = 4 if split == "validation" else 5
        answers = {"text": ["two"], "answer_start": [start]}
        row = {"id": "q", "title": "A", "context": "one two", "question": "six?", "answers": answers}
        return [row] if name == "owner/squad" else [{"id": "q"}]

    datasets = ModuleType("datasets")
    datasets.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    assert read_squad("owner/squad", split="test") == [
        Question(title="A", context="one two", question="six?", answers=(("two", 4),))
    ]
    with pytest.raises(DataError, match="owner/squad, split train, question q: found 'wo' at character 5"):
        read_squad("owner/squad", split="train")
    with pytest.raises(DataError, match=r"owner/other is neither .* columns id, title, context"):
        read_squad("owner/other", split="test")


def test_held_out_articles_depend_on_the_seed_alone() -> None:
    titles = [f"t{i}" for i in range(20)] * 3
    chosen = articles_to_hold_out(titles, 4, seed=1)
    assert len(set(chosen)) == 4
    assert chosen == articles_to_hold_out(titles[::-1], 4, seed=1)
    assert chosen != articles_to_hold_out(titles, 4, seed=2)
    for count in (0, 20):
        with pytest.raises(DataError, match=f"held_out_articles={count}, but data.train has 20 articles"):
            articles_to_hold_out(titles, count, seed=1)


def test_articles_of_the_test_file_are_not_trained_on(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    train = written(tmp_path, article("A"), article("B"), article("C"))
    test = written(tmp_path, article("B"), article("D"), name="test.json")
    train_rows, held_out = SQuADData(train=train, test=test, tokenizer=tokenizer).splits()
    assert {row.title for row in train_rows} == {"A", "C"}
    assert {row.title for row in held_out} == {"B", "D"}


def test_batches_of_prompts_hold_the_first_answer_and_the_texts_of_all(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = written(tmp_path, article("A"), article("B", "five six", question("one?", (("six", 5),))))
    data = SQuADData(train=path, held_out_articles=1, tokenizer=tokenizer)
    data.setup("fit")
    (batch,) = [*data.train_dataloader()]
    (other,) = [*data.val_dataloader()]
    by_context = {str(found["answers"]): found for found in (batch, other)}
    found = by_context["[['two', 'two three']]"]
    assert tokenizer.convert_ids_to_tokens(found["labels"][0, -2:]) == ["two", "<eos>"]
    assert int((found["labels"] != -100).sum()) == 2
    assert tokenizer.convert_ids_to_tokens(found["input_ids"][0, :3]) == ["one", "two", "three"]


def test_batches_of_spans_hold_the_first_answers_place(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = written(tmp_path, article("A"), article("B"))
    data = SQuADData(train=path, held_out_articles=1, answers="span", tokenizer=tokenizer)
    data.setup("fit")
    (batch,) = data.val_dataloader()
    start = int(batch["start_positions"])
    assert tokenizer.convert_ids_to_tokens(batch["input_ids"][0, start].item()) == "two"
    assert batch["answers"] == [["two", "two three"]]


def test_another_form_of_answers_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="answers is 'spans', expected one of text, span"):
        SQuADData(train="a.json", answers="spans", tokenizer=tokenizer)  # type: ignore[arg-type]


def test_the_original_file_is_split_by_article(
    squad_folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = squad_folder / "dev-v1.1-rebuilt.json"
    data = SQuADData(train=path, tokenizer=tokenizer, held_out_articles=10)
    train, held_out = data.splits()
    assert len(train) + len(held_out) == 10_570
    assert len({row.title for row in train}) == 38
    assert len({row.title for row in held_out}) == 10
    assert not {row.context for row in train} & {row.context for row in held_out}
    assert len(read_squad(squad_folder / "xquad.en.json", split="test")) == 1190
