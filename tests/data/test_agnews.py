import os
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.agnews import AGNewsData, read_agnews, without_texts_of
from lightning_hybridop.data.classification import LabelledText
from lightning_hybridop.data.sources import DataError

REPOSITORY = Path(__file__).parents[2]
AG_NEWS = Path(os.environ.get("HYBRIDOP_DATA", REPOSITORY / ".." / "shared" / "data")) / "ag_news"
requires_ag_news = pytest.mark.skipif(
    not AG_NEWS.is_dir(), reason="needs the AG News files; name their parent folder in HYBRIDOP_DATA"
)

HEADER = "class_index,title,description\n"
ROWS = '"3","Title, one","First\\line"\n"4","Two","He said ""no"""\n'


def written(folder: Path, text: str, name: str = "news.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("header", ["", HEADER, "Class Index,Title,Description\n", "\ufeff" + HEADER])
def test_both_forms_are_read(header: str, tmp_path: Path) -> None:
    assert read_agnews(written(tmp_path, header + ROWS), split="train") == [
        LabelledText(text="Title, one First line", label=2),
        LabelledText(text='Two He said "no"', label=3),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + '1,a,b\n2,"two\nlines",b\n1,a\n', ", line 5: found 2 columns, expected 3: class_index,title,description."),
        (HEADER + "1,a,b,c\n", ", line 2: found 4 columns, expected 3: class_index,title,description."),
        ("label,title,description\n1,a,b\n", ", line 1: found the columns 'label,title,description', expected "
         "'class_index,title,description' or no header."),
        ("1,a,b\n5,a,b\n", ", line 2: found the class '5', expected 1..4 (World, Sports, Business, Technology)."),
        (HEADER + "0,a,b\n", ", line 2: found the class '0', expected 1..4 (World, Sports, Business, Technology)."),
        ("1,a,b\nWorld,a,b\n", ", line 2: found the class 'World', expected 1..4 (World, Sports, Business, Technology)."),
        (HEADER, ": no rows; expected the columns class_index,title,description."),
        ("", ": no rows; expected the columns class_index,title,description."),
    ],
)  # fmt: skip
def test_a_malformed_file_is_reported_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DataError) as raised:
        read_agnews(path, split="train")
    assert str(raised.value) == f"{path}{message}"


def test_broken_quotes_and_other_encodings_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"news\.csv, line 2: not valid CSV"):
        read_agnews(written(tmp_path, '1,a,b\n1,"a"b,c\n'), split="train")
    (tmp_path / "latin.csv").write_bytes("1,caf\u00e9,b\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.csv: not UTF-8 text"):
        read_agnews(tmp_path / "latin.csv", split="train")


@pytest.mark.parametrize("source", ["missing.csv", "./missing", "/no/such/file", Path("missing")])
def test_a_missing_file_is_named(source: str | Path) -> None:
    with pytest.raises(DataError) as raised:
        read_agnews(source, split="test")
    assert str(raised.value) == (
        f"The AG News file {source} does not exist or is a folder: name an existing CSV file in data.test."
    )


def test_a_hub_name_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"owner/news is not a file.*`pip install datasets`"):
        read_agnews("owner/news", split="train")


def test_a_hub_name_is_read_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, *, split: str) -> list[dict[str, object]]:
        if name != "owner/news":
            raise FileNotFoundError(name)
        return [{"text": f"the {split} split", "label": 3 if split == "train" else 4}]

    datasets = ModuleType("datasets")
    datasets.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    assert read_agnews("owner/news", split="train") == [LabelledText(text="the train split", label=3)]
    with pytest.raises(DataError, match=r"owner/news, split test: found the label 4, expected 0\.\.3"):
        read_agnews("owner/news", split="test")
    with pytest.raises(
        DataError, match="owner/other is neither a file nor a data set of the Hugging Face hub"
    ):
        read_agnews("owner/other", split="test")


def test_training_rows_that_stand_in_the_test_file_are_dropped(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    words = ("one", "two", "three", "four", "five", "six")
    train = written(tmp_path, HEADER + "".join(f"{1 + i % 4},{word},six\n" for i, word in enumerate(words)))
    test = written(tmp_path, "4,One,  SIX\n1,four,six\n2,six,one\n3,two,two\n", name="test.csv")
    data = AGNewsData(train=train, test=test, tokenizer=tokenizer, held_out_rows=2, batch_size=2)
    data.setup("fit")
    texts = {tokenizer.decode(row.prompt[0]) for row in data.train_set}
    # Also those of the test file's rows that are not among the held-out ones.
    assert texts == {"two", "three", "five", "six"}
    assert [tokenizer.decode(row.answer) for row in data.held_out_set] == ["World", "Sports"]


@requires_ag_news
def test_the_original_files(tokenizer: PreTrainedTokenizerBase) -> None:
    train = read_agnews(AG_NEWS / "train_subset.csv", split="train")
    test = read_agnews(AG_NEWS / "test.csv", split="test")
    assert Counter(row.label for row in train) == dict.fromkeys(range(4), 5000)
    assert Counter(row.label for row in test) == dict.fromkeys(range(4), 1900)
    assert test[0].text.startswith("Fears for T N pension after talks Unions representing workers")
    assert not any("\\" in row.text for row in test)

    assert len(without_texts_of(test, train)) == 19_999

    data = AGNewsData(
        train=AG_NEWS / "train_subset.csv",
        test=AG_NEWS / "test.csv",
        tokenizer=tokenizer,
        train_rows=400,
        held_out_rows=100,
        max_length=40,
        seed=1,
    )
    data.setup("fit")
    # The file is sorted by class, the training rows are not.
    found = Counter(row.answer[0] for row in data.train_set)
    assert found.total() == 400
    assert len(found) == 4
    assert min(found.values()) > 60
    assert list(Counter(row.answer[0] for row in data.held_out_set).values()) == [25, 25, 25, 25]
    batch = next(iter(data.val_dataloader()))
    assert batch["input_ids"].shape[0] == 8
    assert batch["input_ids"].shape[1] <= 40
