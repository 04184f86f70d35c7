from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from lightning_hybridop.data.classification import (
    EncodedText,
    LabelledText,
    collate,
    encode,
)
from lightning_hybridop.data.split import row_loader
from lightning_hybridop.modules.answers import answer_loss
from lightning_hybridop.modules.label_words import LabelWordClassifier
from lightning_hybridop.modules.prompts import Batch, Prompt
from tests.modules.trainers import trainer

pytestmark = [
    # The steps are also called without a Trainer here.
    pytest.mark.filterwarnings("ignore:You are trying to `self.log:UserWarning"),
    # Lightning 2.6 with torch 2.13.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    # The sets are too small for more workers, and for a log every 50 steps.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

LABEL_WORDS = ("World", "Sports", "Science Fiction")
ROWS = (
    LabelledText(text="the bank", label=0),
    LabelledText(text="a team wins the law", label=1),
    LabelledText(text="chip", label=2),
    LabelledText(text="the the a a team loses", label=2),
    LabelledText(text="law wins", label=1),
)


def encoded(tokenizer: PreTrainedTokenizerBase) -> list[EncodedText]:
    return encode(ROWS, tokenizer=tokenizer, prompt=Prompt(label_words=LABEL_WORDS), max_length=12)


@pytest.fixture
def batch(tokenizer: PreTrainedTokenizerBase) -> Batch:
    return collate(encoded(tokenizer), padding_token=1)


@pytest.fixture
def module(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LabelWordClassifier:
    torch.manual_seed(1)
    classifier = LabelWordClassifier(model, tokenizer, label_words=LABEL_WORDS, learning_rate=0.01)
    for name, parameter in classifier.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return classifier


@pytest.fixture
def loader(tokenizer: PreTrainedTokenizerBase) -> DataLoader[EncodedText]:
    padded = partial(collate, padding_token=tokenizer.pad_token_id)
    return row_loader(encoded(tokenizer), padded, batch_size=2)


def test_loss_and_gradients_equal_those_of_the_models_own_labels(
    module: LabelWordClassifier, batch: Batch
) -> None:
    loss = module.training_step(batch, 0)
    loss.backward()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found = [parameter.grad.clone() for parameter in trained if parameter.grad is not None]
    assert len(found) == len(trained) == 4 * 2 * 2

    own_loss = module.model(**batch).loss
    expected = torch.autograd.grad(own_loss, trained)
    torch.testing.assert_close(loss, own_loss, atol=1e-6, rtol=0)
    for gradient, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-6, rtol=0)


def test_the_model_computes_logits_for_the_answer_only(module: LabelWordClassifier, batch: Batch) -> None:
    shapes = []
    module.model.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.logits.shape)))
    module.training_step(batch, 0)
    module.training_step({name: values[:2] for name, values in batch.items()}, 0)
    assert shapes == [(5, 3, 24), (2, 2, 24)]


def test_a_batch_without_label_tokens_has_loss_zero_and_no_nan() -> None:
    logits = torch.randn(2, 1, 24, requires_grad=True)
    loss = answer_loss(logits, torch.full((2, 7), -100))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_labels_before_the_end_count_as_well(module: LabelWordClassifier, batch: Batch) -> None:
    everywhere = batch | {"labels": batch["input_ids"]}
    torch.testing.assert_close(
        module.training_step(everywhere, 0), module.model(**everywhere).loss, atol=1e-6, rtol=0
    )


def test_prediction_is_the_likeliest_first_token(module: LabelWordClassifier, batch: Batch) -> None:
    module.eval()
    expected = []
    for row in range(len(ROWS)):
        # Without padding and without the answer, one row at a time.
        kept = (batch["attention_mask"][row] == 1) & (batch["labels"][row] == -100)
        logits = module.model(input_ids=batch["input_ids"][row, kept][None]).logits[0, -1]
        expected.append(int(logits[module.label_tokens].argmax()))
    assert len(set(expected)) > 1
    assert module.predict_step(batch, 0).tolist() == expected


def test_prediction_needs_no_labels(module: LabelWordClassifier, batch: Batch) -> None:
    with_answer = module.predict_step({name: values[:2] for name, values in batch.items()}, 0)
    prompts = {name: values[:2, :-1] for name, values in batch.items() if name != "labels"}
    assert torch.equal(module.predict_step(prompts, 0), with_answer)


def test_logged_scores_equal_those_computed_by_hand(
    module: LabelWordClassifier, loader: DataLoader[EncodedText], batch: Batch, tmp_path: Path
) -> None:
    predicted = module.eval().predict_step(batch, 0).tolist()
    target = [row.label for row in ROWS]
    f1 = []
    for label in range(len(LABEL_WORDS)):
        hits = sum(p == t == label for p, t in zip(predicted, target, strict=True))
        f1.append(2 * hits / (predicted.count(label) + target.count(label)))
    accuracy = sum(p == t for p, t in zip(predicted, target, strict=True)) / len(ROWS)

    (scores,) = trainer(tmp_path).validate(module, loader, verbose=False)
    assert set(scores) == {"val_loss", "val_accuracy", "val_f1"}
    assert scores["val_accuracy"] == pytest.approx(accuracy)
    assert scores["val_f1"] == pytest.approx(sum(f1) / len(f1))
    (scores,) = trainer(tmp_path).test(module, loader, verbose=False)
    assert set(scores) == {"test_loss", "test_accuracy", "test_f1"}
    assert scores["test_accuracy"] == pytest.approx(accuracy)


def test_a_plain_trainer_fits_it(
    module: LabelWordClassifier, loader: DataLoader[EncodedText], batch: Batch, tmp_path: Path
) -> None:
    frozen = {name: p.clone() for name, p in module.named_parameters() if not p.requires_grad}
    before = module.model(**batch).loss.item()
    run = trainer(tmp_path, epochs=10)
    run.fit(module, loader, loader)
    assert run.global_step == 30
    assert "train_loss" in run.logged_metrics
    assert module.model(**batch).loss.item() < 0.9 * before
    assert all(torch.equal(p, frozen[name]) for name, p in module.named_parameters() if name in frozen)


def test_a_checkpoint_loads_under_weights_only(
    module: LabelWordClassifier, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    fresh_model = LlamaForCausalLM(model.config)
    run = trainer(tmp_path)
    run.strategy.connect(module)
    run.save_checkpoint(tmp_path / "whole.ckpt")
    loaded = LabelWordClassifier.load_from_checkpoint(
        tmp_path / "whole.ckpt", model=fresh_model, tokenizer=tokenizer, weights_only=True
    )
    assert loaded.hparams == module.hparams
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in module.state_dict().items())
    assert loaded.hparams["label_words"] == list(LABEL_WORDS)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_warm_up_reaches_the_learning_rate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    module = LabelWordClassifier(
        model, tokenizer, label_words=LABEL_WORDS, learning_rate=0.8, warmup_steps=4, optimizer="adamw"
    )
    configured = module.configure_optimizers()
    assert isinstance(configured, dict)
    assert isinstance(configured["optimizer"], torch.optim.AdamW)
    scheduler = configured["lr_scheduler"]["scheduler"]  # type: ignore[typeddict-item, index]
    rates = []
    for _ in range(6):
        rates += scheduler.get_last_lr()
        scheduler.step()
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_a_label_of_no_class_is_refused(module: LabelWordClassifier, batch: Batch) -> None:
    batch["labels"][2, -2] = 9
    with pytest.raises(
        ValueError, match=r"Row 2 .* token 9, expected the first token of a label word, one of \[4, 5, 8\]"
    ):
        module.validation_step(batch, 0)


def test_bad_arguments_are_refused(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="optimizer is 'sgd', expected one of adam, adamw"):
        LabelWordClassifier(model, tokenizer, optimizer="sgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass tokenizer="):
        LabelWordClassifier(model)


def test_answers_to_questions_are_scored_per_answer_and_per_question(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    module = LabelWordClassifier(model, tokenizer, label_words=("World", "Sports"), per_question=True).eval()
    rows = [LabelledText(text=row.text, label=index % 2) for index, row in enumerate((*ROWS, *ROWS[:3]))]
    prompt = Prompt(label_words=("World", "Sports"))
    texts = encode(rows, tokenizer=tokenizer, prompt=prompt, max_length=12)
    question = torch.tensor([4, 4, 1, 0, 0, 0, 7, 7])
    batch = collate(texts, padding_token=1) | {"question": question}
    predicted = module.predict_step(batch, 0).tolist()
    target = [row.label for row in rows]
    assert 0 < sum(predicted) < len(predicted)
    hits = sum(p * t for p, t in zip(predicted, target, strict=True))
    wrong = {int(q) for q, p, t in zip(question, predicted, target, strict=True) if p != t}

    def part(rows: slice) -> Batch:
        return {name: values[rows] for name, values in batch.items()}

    # One question lies in both batches.
    parts = [part(slice(0, 4)), part(slice(4, 8))]
    (scores,) = trainer(tmp_path).validate(
        module,
        DataLoader(parts, batch_size=None),
        verbose=False,  # type: ignore[arg-type]
    )
    assert set(scores) == {"val_loss", "val_accuracy", "val_f1", "val_f1a", "val_exact_match"}
    assert scores["val_f1a"] == pytest.approx(2 * hits / (sum(predicted) + sum(target)))
    assert scores["val_exact_match"] == pytest.approx(1 - len(wrong) / 4)


def test_questions_need_two_label_words(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="two label words, wrong and right, but there are 3"):
        LabelWordClassifier(model, tokenizer, label_words=LABEL_WORDS, per_question=True)
