import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.multirc import AnswerOption, MultiRCData, read_multirc
from lightning_hybridop.data.sources import DataError
from lightning_hybridop.modules.prompts import Prompt


def passage(text: str, *questions: tuple[str, list[tuple[str, int]]]) -> dict[str, Any]:
    return {
        "idx": 0,
        "passage": {
            "text": text,
            "questions": [
                {
                    "question": question,
                    "idx": 0,
                    "answers": [{"text": answer, "idx": 0, "label": label} for answer, label in answers],
                }
                for question, answers in questions
            ],
        },
    }


ROWS = [
    passage("one two", ("three", [("four", 0), ("five", 1)]), ("six", [("one", 1)])),
    passage("five six", ("three", [("two", 0)])),
]


def written(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_options_are_read_in_order_and_questions_numbered(tmp_path: Path) -> None:
    def option(text: str, question: str, answer: str, label: int, number: int) -> AnswerOption:
        return AnswerOption(
            passage=text, question=question, answer=answer, label=label, question_number=number
        )

    assert read_multirc(written(tmp_path, ROWS), split="train") == [
        option("one two", "three", "four", 0, 0),
        option("one two", "three", "five", 1, 0),
        option("one two", "six", "one", 1, 1),
        option("five six", "three", "two", 0, 2),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON (Expecting property name enclosed in double quotes, column 2), expected an object with the "
              "field 'passage'."),
        ("[1]", "found [1], expected an object with the field 'passage'."),
        ('{"text": 1}', "found the fields text, expected 'passage' among them."),
        (json.dumps(passage("a", ("b", [("c", 2)]))), "found the label 2, expected 0 (wrong) or 1 (right)."),
        (json.dumps({"passage": {"text": "a", "questions": {}}}), "found {} in the field 'questions', expected a list."),
    ],
)  # fmt: skip
def test_a_malformed_line_is_reported(line: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, ROWS)
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(DataError) as raised:
        read_multirc(path, split="train")
    assert str(raised.value) == f"{path}, line 4: {message}"


def test_files_that_are_empty_missing_or_no_text_are_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl: no questions; expected a passage with questions"):
        read_multirc(tmp_path / "empty.jsonl", split="train")
    (tmp_path / "latin.jsonl").write_bytes('{"passage": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl: not UTF-8 text"):
        read_multirc(tmp_path / "latin.jsonl", split="train")
    with pytest.raises(DataError) as raised:
        read_multirc("missing.jsonl", split="test")
    assert str(raised.value) == (
        "The MultiRC file missing.jsonl does not exist or is a folder: name an existing JSONL file in data.test."
    )


def test_a_hub_name_is_read_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, configuration: str, *, split: str) -> list[dict[str, Any]]:
        if (name, configuration) != ("owner/glue", "multirc"):
            raise FileNotFoundError(name)
        idx = {"paragraph": 0, "question": 7, "answer": 0}
        label = 1 if split == "validation" else -1
        return [{"paragraph": "p", "question": "q", "answer": "a", "idx": idx, "label": label}]

    datasets = ModuleType("datasets")
    datasets.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    assert read_multirc("owner/glue", split="test") == [
        AnswerOption(passage="p", question="q", answer="a", label=1, question_number=7)
    ]
    with pytest.raises(DataError, match="owner/glue, split train: found the label -1, expected 0 or 1"):
        read_multirc("owner/glue", split="train")
    with pytest.raises(DataError, match=r"columns paragraph, question, answer, idx and label .*data\.test"):
        read_multirc("owner/other", split="test")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"name a JSONL file in data.test or run `pip install datasets`"):
        read_multirc("owner/glue", split="test")


def test_training_passages_that_stand_in_the_test_file_are_dropped(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    test = [passage(" one  two ", ("six", [("one", 1), ("two", 0)]))]
    data = MultiRCData(
        train=written(tmp_path, ROWS), test=written(tmp_path, test, "test.jsonl"), tokenizer=tokenizer
    )
    train, held_out = data.splits()
    assert [option.passage for option in train] == ["five six"]
    assert len(held_out) == 2


def test_a_batch_holds_label_words_and_question_numbers(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = written(tmp_path, ROWS)
    other = written(tmp_path, [passage("four", ("two", [("one", 1)]))], "other.jsonl")
    tokenizer.add_tokens(["yes", "no"])
    data = MultiRCData(train=other, test=path, tokenizer=tokenizer, batch_size=4)
    data.setup("fit")
    (batch,) = data.val_dataloader()
    assert batch["question"].tolist() == [0, 0, 1, 2]
    assert tokenizer.convert_ids_to_tokens(batch["labels"][:, -1]) == ["no", "yes", "yes", "no"]
    assert (batch["labels"] != -100).sum() == 4
    shown = [token for token in tokenizer.convert_ids_to_tokens(batch["input_ids"][1]) if token != "<unk>"]
    assert [word for word in shown if word in {"one", "two", "three", "five", "yes"}] == [
        "one", "two", "three", "five", "yes", "yes"
    ]  # fmt: skip


def test_the_original_files(multirc_folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    train = read_multirc(multirc_folder / "train.jsonl", split="train")
    test = read_multirc(multirc_folder / "val.jsonl", split="test")
    assert Counter(option.label for option in train) == {0: 15218, 1: 12025}
    assert len(test) == 4848
    assert {option.question_number for option in test} == set(range(953))
    assert test[0].question.startswith("Would the mass of a baseball affect how much force")

    files = {"train": multirc_folder / "train.jsonl", "test": multirc_folder / "val.jsonl"}
    data = MultiRCData(
        **files, tokenizer=tokenizer, train_rows=50, held_out_questions=5, max_length=64, seed=1
    )
    chosen, held_out = data.splits()
    # Whole questions, and no passage of theirs to train on.
    numbers = {option.question_number for option in held_out}
    assert len(numbers) == 5
    assert held_out == [option for option in test if option.question_number in numbers]
    assert len(chosen) == 50
    assert len({option.passage for option in chosen}) > 30
    assert not {option.passage for option in chosen} & {option.passage for option in test}


def test_the_label_words_begin_with_different_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_tokens(["yes", "no"])
    no, yes = Prompt(label_words=("no", "yes")).label_tokens(tokenizer)
    assert no[0] != yes[0]
