from functools import partial

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.classification import (
    EncodedText,
    LabelledText,
    balanced_subset,
    collate,
    collate_numbered,
    encode,
    encode_numbered,
)
from lightning_hybridop.data.headlines import HeadlinesData
from lightning_hybridop.data.sources import DataError
from lightning_hybridop.data.split import row_loader, shuffled
from lightning_hybridop.modules.prompts import CLASSES, Batch, Prompt


def rows_of(*labels: int) -> list[LabelledText]:
    return [LabelledText(text=f"row {index}", label=label) for index, label in enumerate(labels)]


def test_a_text_is_followed_by_the_prompts_end_and_its_label_word(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [LabelledText(text="one two", label=1), LabelledText(text="three", label=0)]
    prompt = Prompt(label_words=("World", "Sports six"))
    first, second = encode(rows, tokenizer=tokenizer, prompt=prompt, max_length=20)
    assert tokenizer.convert_ids_to_tokens(first.prompt) == ["one", "two", "Topic", ":"]
    assert tokenizer.convert_ids_to_tokens(first.answer) == ["Sports", "six"]
    assert tokenizer.convert_ids_to_tokens(second.prompt) == ["three", "Topic", ":"]
    assert tokenizer.convert_ids_to_tokens(second.answer) == ["World"]


def test_a_long_text_loses_its_end_and_nothing_else(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    rows = [LabelledText(text="one two three four five", label=2)]
    (row,) = encode(rows, tokenizer=tokenizer, prompt=Prompt(), max_length=7)
    assert tokenizer.convert_ids_to_tokens(row.prompt) == ["<eos>", "one", "two", "three", "Topic", ":"]
    assert tokenizer.convert_ids_to_tokens(row.answer) == ["Business"]


def test_a_length_without_room_for_a_text_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [LabelledText(text="one", label=0)]
    assert len(encode(rows, tokenizer=tokenizer, prompt=Prompt(), max_length=4)[0].prompt) == 3
    with pytest.raises(DataError, match=r"max_length=3 leaves no room .* take 3 tokens, so pass at least 4"):
        encode(rows, tokenizer=tokenizer, prompt=Prompt(), max_length=3)


def test_a_batch_is_padded_on_the_left_to_its_longest_row() -> None:
    batch = collate(
        [EncodedText(prompt=[5, 6, 7], answer=[8, 9]), EncodedText(prompt=[4], answer=[8])], padding_token=1
    )
    assert {values.dtype for values in batch.values()} == {torch.int64}
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [1, 1, 1, 4, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 8, 9], [-100, -100, -100, -100, 8]]


def test_labels_travel_with_their_texts_through_a_shuffling_loader_with_workers(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rows = [EncodedText(prompt=[100 + index] * (1 + index % 4), answer=[200 + index]) for index in range(18)]
    padded = partial(collate, padding_token=tokenizer.pad_token_id)
    loader = row_loader(rows, padded, batch_size=4, shuffle=True, num_workers=1)
    batches = list(loader)
    assert [len(batch["labels"]) for batch in batches] == [4, 4, 4, 4, 2]
    order = [int(row[-1]) - 200 for batch in batches for row in batch["labels"]]
    assert sorted(order) == list(range(18))
    assert order != sorted(order)
    for batch in batches:
        for text, mask, labels in zip(*batch.values(), strict=True):
            assert text[mask == 1].tolist()[:-1] == rows[int(labels[-1]) - 200].prompt


def test_the_order_depends_on_the_seed_alone() -> None:
    rows = rows_of(*range(50))
    assert shuffled(rows, seed=3) == shuffled(list(rows), seed=3)
    assert shuffled(rows, seed=3) != shuffled(rows, seed=4) != rows
    assert sorted(shuffled(rows, seed=3), key=lambda row: row.label) == rows


def test_a_balanced_subset_takes_the_first_rows_of_each_class_in_turn() -> None:
    rows = rows_of(1, 1, 0, 2, 3, 0, 1, 3, 2)
    subset = balanced_subset(rows, 6, classes=CLASSES)
    assert [row.text for row in subset] == ["row 2", "row 0", "row 3", "row 4", "row 5", "row 1"]


def test_a_class_with_too_few_rows_is_named() -> None:
    with pytest.raises(
        DataError, match="set of 6 rows needs 2 rows of the class Sports, but there are 1: ask for fewer rows"
    ):
        balanced_subset(rows_of(0, 0, 1, 2, 3), 6, classes=CLASSES)


def test_numbered_rows_are_texts_alone_with_one_label_each(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [LabelledText(text="one two three four", label=3), LabelledText(text="five", label=0)]
    encoded = encode_numbered(rows, tokenizer=tokenizer, max_length=3)
    batch = collate_numbered(encoded, padding_token=1)
    assert tokenizer.convert_ids_to_tokens(batch["input_ids"][0]) == ["one", "two", "three"]
    assert batch["input_ids"][1, :2].tolist() == [1, 1]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["labels"].tolist() == [3, 0]
    assert encode_numbered([], tokenizer=tokenizer, max_length=3) == []


def test_a_data_module_gives_words_or_numbers(tokenizer: PreTrainedTokenizerBase) -> None:
    def first(labels: str) -> Batch:
        data = HeadlinesData(
            tokenizer=tokenizer,
            train_rows=8,
            held_out_rows=4,
            labels=labels,  # type: ignore[arg-type]
        )
        data.setup("fit")
        return next(iter(data.val_dataloader()))

    words, numbers = first("word"), first("number")
    assert tokenizer.convert_ids_to_tokens(words["labels"][:, -1]) == list(CLASSES)
    assert numbers["labels"].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="labels is 'numbers', expected one of word, number"):
        first("numbers")
