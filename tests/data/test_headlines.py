import hashlib
import math
from collections import Counter

import pytest
from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.headlines import HeadlinesData, headlines

TRAIN, HELD_OUT = headlines()


def test_there_are_enough_short_distinct_texts_and_no_text_is_in_both_splits() -> None:
    texts = [row.text for row in (*TRAIN, *HELD_OUT)]
    assert len(texts) == len(set(texts)) == 2000
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) >= 8
    assert max(lengths) <= 20


@pytest.mark.parametrize("rows", [TRAIN, HELD_OUT, HELD_OUT[:100]])
def test_the_classes_are_balanced(rows: list) -> None:
    assert {Counter(row.label for row in rows)[label] for label in range(4)} == {len(rows) // 4}


def test_the_texts_are_the_same_on_every_machine() -> None:
    lines = "".join(f"{row.label} {row.text}\n" for row in (*HELD_OUT, *TRAIN))
    assert (
        hashlib.sha256(lines.encode()).hexdigest()
        == "4fb18182ab0b0b42a229b2dfe041112bd93e4087789ae942281e82605c8bea96"
    )
    assert headlines(seed=1)[1][0] != HELD_OUT[0]


def test_more_training_rows_leave_the_held_out_rows_as_they_are() -> None:
    train, held_out = headlines(train_rows=1700)
    assert held_out == HELD_OUT
    assert train[:1600] == TRAIN


def test_no_single_word_gives_the_class_away() -> None:
    words = {word for row in TRAIN for word in words_of(row.text)}
    for word in words:
        containing = Counter(row.label for row in TRAIN if word in words_of(row.text))
        label, hits = containing.most_common(1)[0]
        # A word that is nearly always of one class may only mark a small part of that class.
        assert hits / containing.total() < 0.8 or hits / (len(TRAIN) / 4) < 0.1, (word, label)


def test_a_bag_of_words_is_not_enough() -> None:
    counts = [
        Counter(word for row in TRAIN if row.label == label for word in words_of(row.text))
        for label in range(4)
    ]

    def score(text: str, label: int) -> float:
        return sum(math.log((counts[label][word] + 1) / (len(TRAIN) / 4 + 2)) for word in words_of(text))

    right = sum(max(range(4), key=lambda label: score(row.text, label)) == row.label for row in HELD_OUT)
    assert 0.4 < right / len(HELD_OUT) < 0.85


def words_of(text: str) -> set[str]:
    return set(text.lower().replace(",", "").split())


def test_the_data_module_serves_left_padded_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    data = HeadlinesData(tokenizer=tokenizer, train_rows=10, held_out_rows=8, batch_size=4)
    data.prepare_data()
    data.setup("fit")
    assert [len(batch["labels"]) for batch in data.train_dataloader()] == [4, 4, 2]
    _, held_out = headlines(train_rows=10, held_out_rows=8)
    words = tokenizer.convert_ids_to_tokens(
        [int(row[-1]) for batch in data.val_dataloader() for row in batch["labels"]]
    )
    assert words == [("World", "Sports", "Business", "Technology")[row.label] for row in held_out]
    for loader in (data.test_dataloader(), data.predict_dataloader()):
        assert [len(batch["labels"]) for batch in loader] == [4, 4]
