from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from lightning_hybridop.data.classification import EncodedText, collate
from lightning_hybridop.modules.texts import TextAnswerer, prompts_of
from tests.modules.trainers import trainer

pytestmark = [
    # The steps are also called without a Trainer here.
    pytest.mark.filterwarnings("ignore:You are trying to `self.log:UserWarning"),
    # The sets are too small for more workers, and for a log every 50 steps.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

# Prompts, answers with the end of text, accepted texts; words of the tokenizer's.
ROWS = (
    ([10, 11, 12], [4, 1], ["World"]),
    ([13], [5, 6, 1], ["Sports Business", "Sports"]),
    ([14, 15, 16, 17, 10], [7, 1], ["Technology"]),
    ([12, 13, 14, 15], [8, 9, 4, 1], ["Science Fiction World"]),
)


def batch_of(rows: Any = ROWS) -> dict[str, Any]:
    texts = [EncodedText(prompt=prompt, answer=answer) for prompt, answer, _ in rows]
    return {**collate(texts, padding_token=1), "answers": [accepted for _, _, accepted in rows]}


def loader() -> DataLoader[Any]:
    return DataLoader(ROWS, batch_size=3, collate_fn=batch_of)  # type: ignore[arg-type]


@pytest.fixture
def module(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> TextAnswerer:
    torch.manual_seed(1)
    answerer = TextAnswerer(
        model,
        tokenizer,
        longest_answer=5,
        generate=True,
        learning_rate=0.02,
        lora_targets=["q_proj", "v_proj", "down_proj", "up_proj"],
    )
    for name, parameter in answerer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return answerer


def test_loss_is_the_models_own(module: TextAnswerer) -> None:
    batch = batch_of()
    names = ("input_ids", "attention_mask", "labels")
    own = module.model(**{name: batch[name] for name in names}).loss
    torch.testing.assert_close(module.training_step(batch, 0), own, atol=1e-6, rtol=0)


def test_prompts_are_the_rows_without_their_answers() -> None:
    tokens, mask = prompts_of(batch_of(), padding_token=1)
    assert tokens.tolist() == [
        [1, 1, 10, 11, 12],
        [1, 1, 1, 1, 13],
        [14, 15, 16, 17, 10],
        [1, 12, 13, 14, 15],
    ]
    assert mask.sum(dim=-1).tolist() == [3, 1, 5, 4]
    assert torch.equal(mask == 1, mask.cumsum(dim=-1) > 0)


def test_rows_without_labels_are_prompts_as_they_are() -> None:
    batch = batch_of()
    batch["labels"][2] = -100
    tokens, mask = prompts_of(batch, padding_token=1)
    assert tokens[2, mask[2] == 1].tolist() == [14, 15, 16, 17, 10, 7, 1]
    assert tokens[0, mask[0] == 1].tolist() == [10, 11, 12]
    del batch["labels"]
    assert prompts_of(batch, padding_token=1)[0] is batch["input_ids"]


def test_written_answers_are_the_likeliest_tokens_one_by_one(
    module: TextAnswerer, tokenizer: PreTrainedTokenizerBase
) -> None:
    module.eval()
    expected = []
    for prompt, _, _ in ROWS:
        tokens = list(prompt)
        for _ in range(5):
            with torch.no_grad():
                tokens.append(int(module.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == tokenizer.eos_token_id:
                break
        expected.append(tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True).strip())
    assert module.predict_step(batch_of(), 0) == expected
    assert len(set(expected)) > 1


def test_it_learns_to_write_the_answers_and_to_stop(module: TextAnswerer, tmp_path: Path) -> None:
    (before,) = trainer(tmp_path).validate(module, loader(), verbose=False)
    assert set(before) == {"val_loss", "val_exact_match", "val_f1"}
    assert before["val_f1"] < 0.5
    trainer(tmp_path, epochs=60, check_val_every_n_epoch=60).fit(module, loader(), loader())
    (after,) = trainer(tmp_path).test(module, loader(), verbose=False)
    # The frozen random head leaves even the right tokens little probability.
    assert after["test_loss"] < 0.85 * before["val_loss"]
    assert (after["test_exact_match"], after["test_f1"]) == (1.0, 1.0)
    assert module.eval().predict_step(batch_of(), 0) == [accepted[0] for _, _, accepted in ROWS]


def test_the_loss_on_held_out_rows_is_the_mean_over_all_answer_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    module = TextAnswerer(model, tokenizer)
    loss = float(module.training_step(batch_of(), 0).detach())
    calls = []
    module.model.register_forward_hook(lambda *_: calls.append(1))
    (scores,) = trainer(tmp_path).validate(module, loader(), verbose=False)
    assert len(calls) == 2
    assert scores == pytest.approx({"val_loss": loss}, abs=1e-6)


def test_a_checkpoint_loads_under_weights_only(
    module: TextAnswerer, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    run = trainer(tmp_path)
    run.strategy.connect(module)
    run.save_checkpoint(tmp_path / "whole.ckpt")
    loaded = TextAnswerer.load_from_checkpoint(
        tmp_path / "whole.ckpt", model=LlamaForCausalLM(model.config), tokenizer=tokenizer, weights_only=True
    )
    assert loaded.hparams == module.hparams
    assert loaded.hparams["longest_answer"] == 5
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in module.state_dict().items())
