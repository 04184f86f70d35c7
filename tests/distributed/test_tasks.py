"""Every ready module in a pipeline, on tiny random models, against one process with Lightning's default strategy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import lightning
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)

from lightning_hybridop import HybridOPStrategy
from lightning_hybridop.modules.label_words import LabelWordClassifier
from lightning_hybridop.modules.sequence_classification import SequenceClassifier
from lightning_hybridop.modules.spans import SpanAnswerer
from lightning_hybridop.modules.texts import TextAnswerer
from lightning_hybridop.modules.token_classification import TokenClassifier
from tests.distributed.harness import run_ranks
from tests.distributed.runs import Watch, assert_gradients_close, merged, trainer_for

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    pytest.mark.slow,
    # The sets are too small for more workers, and for a log every 50 steps.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

VOCABULARY = 24
CLASSES = 3
ROWS, BATCH, LENGTH = 10, 4, 9
NO, YES = 5, 6


# Models: random heads and adapters, so that nothing is zero by chance.


def llama(kind: type[nn.Module], **options: Any) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        classifier_dropout=0.0,
        **options,
    )
    return kind(config)


def bert() -> BertForQuestionAnswering:
    return BertForQuestionAnswering(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def tokenizer() -> PreTrainedTokenizerBase:
    names = ["<pad>", "<eos>", "<unk>", "Topic", ":", "no", "yes", *(f"w{i}" for i in range(7, VOCABULARY))]
    backend = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return TokenizersBackend(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    )


def sequence_classifier() -> lightning.LightningModule:
    return SequenceClassifier(llama(LlamaForSequenceClassification, num_labels=CLASSES), classes=CLASSES)


def token_classifier() -> lightning.LightningModule:
    return TokenClassifier(llama(LlamaForTokenClassification, num_labels=CLASSES), classes=CLASSES)


def span_answerer() -> lightning.LightningModule:
    return SpanAnswerer(llama(LlamaForQuestionAnswering), longest_answer=4)


def bert_span_answerer() -> lightning.LightningModule:
    return SpanAnswerer(bert(), longest_answer=4, lora_targets=["query", "value"])


def text_answerer() -> lightning.LightningModule:
    return TextAnswerer(llama(LlamaForCausalLM), tokenizer(), generate=True, longest_answer=3)


def right_or_wrong() -> lightning.LightningModule:
    return LabelWordClassifier(
        llama(LlamaForCausalLM), tokenizer(), label_words=("no", "yes"), per_question=True
    )


def module_of(make: Callable[[], lightning.LightningModule]) -> lightning.LightningModule:
    """Return the same module each time."""
    torch.manual_seed(3)
    module = make()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                nn.init.normal_(parameter, std=0.3)
    return module


# Data: rows of different lengths, labels in some places only.


def tokens(side: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(7, VOCABULARY, (ROWS, LENGTH), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row in range(ROWS):
        padding = slice(LENGTH - row % 4, LENGTH) if side == "right" else slice(0, row % 4)
        input_ids[row, padding] = attention_mask[row, padding] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def classed_rows() -> dict[str, Any]:
    return tokens("left") | {"labels": torch.arange(ROWS) % CLASSES}


def classed_tokens() -> dict[str, Any]:
    batch = tokens("right")
    labels = (batch["input_ids"] + 1) % CLASSES
    # Row i has labels from its token 0, 1 or 2 on: the first token counts as any other.
    left_out = torch.arange(LENGTH) < (3 * torch.arange(ROWS)[:, None]) % 8
    return batch | {"labels": labels.masked_fill(left_out | (batch["attention_mask"] == 0), -100)}


def spans() -> dict[str, Any]:
    batch = tokens("right")
    # Two tokens of question, then one character of context per token.
    places = torch.arange(LENGTH)[None].expand(ROWS, LENGTH)
    outside = (places < 2) | (batch["attention_mask"] == 0)
    offsets = torch.stack([places - 2, places - 1], dim=-1).masked_fill(outside[..., None], -1)
    starts = 2 + torch.arange(ROWS) % 3
    ends = starts + torch.arange(ROWS) % 2
    cut = torch.arange(ROWS) % 5 == 4
    letters = ["abcdefg"] * ROWS
    return batch | {
        "offsets": offsets,
        "start_positions": starts.masked_fill(cut, -100),
        "end_positions": ends.masked_fill(cut, -100),
        "context": letters,
        "answers": [["abc", "d e"], ["b c d e f"]] * (ROWS // 2),
    }


def span_types() -> dict[str, Any]:
    batch = spans()
    return batch | {"token_type_ids": (batch["offsets"][..., 0] >= 0).long()}


def prompts() -> dict[str, Any]:
    batch = tokens("left")
    lengths = 1 + torch.arange(ROWS) % 4
    labelled = torch.arange(LENGTH) >= LENGTH - lengths[:, None]
    return batch | {
        "labels": batch["input_ids"].masked_fill(~labelled, -100),
        "answers": [["w9"]] * ROWS,
    }


def options() -> dict[str, Any]:
    batch = tokens("left")
    batch["input_ids"][:, -1] = torch.tensor([NO, YES, YES, NO, YES] * (ROWS // 5))
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, -1] = batch["input_ids"][:, -1]
    return batch | {"labels": labels, "question": torch.arange(ROWS) // 3}


def rows_of(columns: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    return {
        name: values[list(rows)] if isinstance(values, Tensor) else [values[row] for row in rows]
        for name, values in columns.items()
    }


def loader_of(columns: Callable[[], dict[str, Any]]) -> DataLoader[int]:
    """Return batches of 4, 4 and 2 rows."""
    return DataLoader(range(ROWS), batch_size=BATCH, collate_fn=partial(rows_of, columns()))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    module: Callable[[], lightning.LightningModule]
    columns: Callable[[], dict[str, Any]]
    scores: frozenset[str]


TASKS = {
    "sequence classification": Task(
        module=sequence_classifier, columns=classed_rows, scores=frozenset({"loss", "accuracy", "f1"})
    ),
    "token classification": Task(
        module=token_classifier, columns=classed_tokens, scores=frozenset({"loss", "accuracy", "f1"})
    ),
    "spans": Task(module=span_answerer, columns=spans, scores=frozenset({"loss", "exact_match", "f1"})),
    "spans with BERT": Task(
        module=bert_span_answerer, columns=span_types, scores=frozenset({"loss", "exact_match", "f1"})
    ),
    "texts": Task(module=text_answerer, columns=prompts, scores=frozenset({"loss", "exact_match", "f1"})),
    "right or wrong": Task(
        module=right_or_wrong,
        columns=options,
        scores=frozenset({"loss", "accuracy", "f1", "f1a", "exact_match"}),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    losses: list[float]
    first_gradients: dict[str, Tensor]
    metrics: dict[str, float]
    predictions: list[Any]
    parameters: dict[str, Tensor]


def trained(task: Task, zo_stages: int) -> Done:
    """Fit, validate and predict on this rank's stage."""
    strategy = HybridOPStrategy(zo_stages=zo_stages, micro_batches=3)
    watch = Watch()
    trainer = trainer_for(strategy, callbacks=[watch], num_sanity_val_steps=0)
    module = module_of(task.module)
    trainer.fit(module, loader_of(task.columns), loader_of(task.columns))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predictions = trainer.predict(module, loader_of(task.columns))
    return Done(
        losses=watch.losses,
        first_gradients=watch.gradients[0],
        metrics=metrics,
        predictions=list(predictions or []),
        parameters={name: value.clone() for name, value in strategy.trainable_state_dict().items()},
    )


def trained_each(cases: Sequence[tuple[str, int]]) -> list[Done]:
    return [trained(TASKS[name], zo_stages) for name, zo_stages in cases]


CASES = [(name, zo_stages) for name in TASKS for zo_stages in (0, 1)]


@cache
def runs() -> dict[tuple[str, int], list[Done]]:
    by_rank = run_ranks(trained_each, 2, CASES)
    return {case: list(of_ranks) for case, of_ranks in zip(CASES, zip(*by_rank, strict=True), strict=True)}


# One process, Lightning's default strategy.


class Losses(lightning.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.losses.append(float(arguments[2]["loss"]))

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: object
    ) -> None:
        named = pl_module.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def plain_trainer(*callbacks: lightning.Callback) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("name", TASKS)
def test_two_bp_stages_train_as_one_process_does(name: str) -> None:
    task, done = TASKS[name], runs()[name, 0]
    module, seen = module_of(task.module), Losses()
    trainer = plain_trainer(seen)
    trainer.fit(module, loader_of(task.columns), loader_of(task.columns))

    assert done[0].losses == done[1].losses
    assert done[0].losses == pytest.approx(seen.losses, abs=2e-6)
    gradients = merged([rank.first_gradients for rank in done])
    assert any("modules_to_save" in name for name in gradients) == (name not in ("texts", "right or wrong"))
    assert_gradients_close(gradients, seen.gradients[0], 1e-6)
    # Adam turns rounding errors of small gradients into larger ones of the parameters, so the scores are less close.
    assert done[0].metrics == pytest.approx(
        {name: float(value) for name, value in trainer.callback_metrics.items()}, abs=1e-4
    )


@pytest.mark.parametrize("zo_stages", [0, 1])
@pytest.mark.parametrize("name", TASKS)
def test_every_rank_has_the_scores_that_one_process_finds(name: str, zo_stages: int) -> None:
    task, (first, last) = TASKS[name], runs()[name, zo_stages]
    assert first.metrics == last.metrics
    module = module_of(task.module)
    start = {key: value.clone() for key, value in module.state_dict().items()}
    module.load_state_dict(first.parameters, strict=False)
    # Both stages have learnt.
    moved = {key for key, value in first.parameters.items() if not torch.equal(value, start[key])}
    assert moved == first.parameters.keys()

    trainer = plain_trainer()
    (expected,) = trainer.validate(module, loader_of(task.columns), verbose=False)
    found = {key: value for key, value in first.metrics.items() if key.startswith("val_")}
    assert found.keys() == {f"val_{score}" for score in task.scores}
    assert found == pytest.approx(expected, abs=2e-6)
    predictions = trainer.predict(module, loader_of(task.columns))
    assert predictions is not None
    for mine, theirs in zip(first.predictions, predictions, strict=True):
        assert torch.equal(mine, theirs) if isinstance(theirs, Tensor) else mine == theirs


@pytest.mark.parametrize("name", TASKS)
def test_a_stage_in_front_that_estimates_leaves_the_first_loss_as_it_is(name: str) -> None:
    assert runs()[name, 1][1].losses[0] == pytest.approx(runs()[name, 0][1].losses[0], abs=2e-6)
