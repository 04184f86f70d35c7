from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForQuestionAnswering, PreTrainedModel

from lightning_hybridop.data.spans import EncodedSpan, collate_spans
from lightning_hybridop.metrics.squad import exact_match, word_f1
from lightning_hybridop.modules.spans import SpanAnswerer, best_spans, span_loss
from tests.modules.trainers import trainer

pytestmark = [
    # The steps are also called without a Trainer here.
    pytest.mark.filterwarnings("ignore:You are trying to `self.log:UserWarning"),
    # The sets are too small for more workers, and for a log every 50 steps.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

CONTEXT = "aa bb cc dd ee"
WORDS = CONTEXT.split()


def bert() -> PreTrainedModel:
    torch.manual_seed(0)
    return BertForQuestionAnswering(
        BertConfig(
            vocab_size=24,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def answerer(**options: Any) -> SpanAnswerer:
    return SpanAnswerer(bert(), lora_targets=["query", "value"], **options)


def row(question: int, words: int, start: int, end: int) -> EncodedSpan:
    """A row of `question` tokens and the first `words` of the context, a token each that begins with its space."""
    offsets = [(max(3 * word - 1, 0), 3 * word + 2) for word in range(words)]
    return EncodedSpan(
        tokens=[*range(1, question + 1), *range(10, 10 + words)],
        token_types=[*[0] * question, *[1] * words],
        offsets=[*[(-1, -1)] * question, *offsets],
        start=start,
        end=end,
        context=CONTEXT,
        answers=(" ".join(WORDS[start - question : end - question + 1]), "bb cc"),
    )


ROWS = (row(2, 5, 3, 4), row(4, 5, 4, 4), row(1, 3, 3, 3), row(3, 4, 4, 6), row(2, 4, -100, -100))


def batch_of(rows: tuple[EncodedSpan, ...] = ROWS) -> dict[str, Any]:
    return collate_spans(rows, padding_token=0)


def loader() -> DataLoader[EncodedSpan]:
    return DataLoader(ROWS, batch_size=2, collate_fn=lambda rows: batch_of(tuple(rows)))  # type: ignore[arg-type]


@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 8),
    longest=st.integers(1, 9),
    seed=st.integers(0, 9999),
)
def test_best_spans_are_those_of_brute_force(rows: int, tokens: int, longest: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts, ends = torch.randn(2, rows, tokens, generator=generator)
    outside = torch.rand(rows, tokens, generator=generator) < 0.3
    outside[:, seed % tokens] = False
    starts, ends = starts.masked_fill(outside, -torch.inf), ends.masked_fill(outside, -torch.inf)
    firsts, lasts = best_spans(starts, ends, longest=longest)
    for index in range(rows):
        best = max(
            (float(starts[index, first] + ends[index, last]), first, last)
            for first in range(tokens)
            for last in range(first, min(first + longest, tokens))
        )
        assert (int(firsts[index]), int(lasts[index])) == best[1:]


def test_loss_is_the_models_own_where_every_token_is_context() -> None:
    everywhere = tuple(row(0, 5, start, 4) for start in (0, 2, 3))
    batch = batch_of(everywhere)
    module = answerer()
    loss = module.training_step(batch, 0)
    names = ("input_ids", "attention_mask", "token_type_ids", "start_positions", "end_positions")
    own = module.model(**{name: batch[name] for name in names}).loss
    torch.testing.assert_close(loss, own, atol=1e-6, rtol=0)


def test_only_tokens_of_the_context_compete() -> None:
    batch = batch_of()
    module = answerer()
    loss = module.training_step(batch, 0)
    terms: list[Tensor] = []
    for index, encoded in enumerate(ROWS[:-1]):
        # Each row alone, the question's tokens cut off its logits.
        question = encoded.offsets.count((-1, -1))
        names = ("input_ids", "attention_mask", "token_type_ids")
        length = len(encoded.tokens)
        output = module.model(**{name: batch[name][index : index + 1, :length] for name in names})
        for logits, place in ((output.start_logits, encoded.start), (output.end_logits, encoded.end)):
            terms.append(functional.cross_entropy(logits[:, question:], torch.tensor([place - question])))
    # The last row has no answer and counts as 0.
    torch.testing.assert_close(loss, torch.stack(terms).sum() / (2 * len(ROWS)), atol=1e-5, rtol=0)


@given(cut=st.integers(1, 5), seed=st.integers(0, 99))
def test_the_mean_over_slices_weighed_by_rows_is_the_loss_of_the_whole_batch(cut: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts, ends = torch.randn(2, 6, 7, generator=generator)
    places = torch.tensor([3, -100, 0, 6, -100, 2])
    whole = span_loss(starts, ends, places, places)
    parts = [
        span_loss(starts[rows], ends[rows], places[rows], places[rows]) * len(places[rows])
        for rows in (slice(0, cut), slice(cut, 6))
    ]
    torch.testing.assert_close(sum(parts) / 6, whole)


def test_predicted_texts_lie_in_the_context_and_are_scored(tmp_path: Path) -> None:
    module = answerer().eval()
    loss = float(module.training_step(batch_of(), 0).detach())
    predicted = module.predict_step(batch_of(), 0)
    assert all(text and text in CONTEXT and text == text.strip() for text in predicted)
    assert len(set(predicted)) > 1
    without = {name: values for name, values in batch_of().items() if "positions" not in name}
    assert module.predict_step({k: v for k, v in without.items() if k != "answers"}, 0) == predicted

    (scores,) = trainer(tmp_path).validate(module, loader(), verbose=False)
    expected = {
        f"val_{name}": sum(
            max(score(text, answer) for answer in encoded.answers)
            for text, encoded in zip(predicted, ROWS, strict=True)
        )
        / len(ROWS)
        for name, score in (("exact_match", exact_match), ("f1", word_f1))
    }
    assert scores == pytest.approx(expected | {"val_loss": loss}, abs=1e-6)
    (scores,) = trainer(tmp_path).test(module, loader(), verbose=False)
    assert set(scores) == {"test_loss", "test_exact_match", "test_f1"}


def test_an_answer_has_at_most_as_many_tokens_as_asked_for() -> None:
    predicted = answerer(longest_answer=1).eval().predict_step(batch_of(), 0)
    assert all(text in WORDS for text in predicted)


def test_a_plain_trainer_fits_it(tmp_path: Path) -> None:
    module = answerer(learning_rate=0.02)
    run = trainer(tmp_path, epochs=20)
    run.fit(module, loader(), loader())
    assert "train_loss" in run.logged_metrics
    assert float(run.logged_metrics["val_exact_match"]) >= 0.8
    # The only row whose tokens lack its answer may stay wrong.
    found = module.eval().predict_step(batch_of(), 0)[:-1]
    assert found == [encoded.answers[0] for encoded in ROWS[:-1]]


def test_a_checkpoint_loads_under_weights_only(tmp_path: Path) -> None:
    module = answerer(longest_answer=7)
    run = trainer(tmp_path)
    run.strategy.connect(module)
    run.save_checkpoint(tmp_path / "whole.ckpt")
    loaded = SpanAnswerer.load_from_checkpoint(tmp_path / "whole.ckpt", model=bert(), weights_only=True)
    assert loaded.hparams == module.hparams
    assert loaded.hparams["longest_answer"] == 7
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in module.state_dict().items())
