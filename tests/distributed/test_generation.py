"""`model.generate` inside evaluation steps and hooks: token for token what one process generates."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightning_hybridop import HybridOPStrategy
from lightning_hybridop.modules.language_models import LanguageModelError, load_language_model
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.runs import lengths_loader
from tests.pipeline.test_families import FAMILIES
from tests.tiny import TinyModule

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

LOADER = partial(lengths_loader, 6, batch_size=4, side="left")


def tiny(family: str) -> nn.Module:
    torch.manual_seed(0)
    options = {"max_position_embeddings": 512, "n_positions": 512, "sliding_window": 8}
    config = FAMILIES[family].make_config()
    for name, value in options.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return get_peft_model(
        AutoModelForCausalLM.from_config(config),
        LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


class Writer(lightning.LightningModule):
    """Generates greedily, by sampling and with beams: in predict_step, behind a loss in validation_step, in a hook."""

    def __init__(self, model: Callable[[], nn.Module], new_tokens: int = 6) -> None:
        super().__init__()
        self.model = model()
        self.new_tokens = new_tokens

    def generate(self, batch: dict[str, Tensor], **options: Any) -> Tensor:
        tokens_BT = self.model.generate(
            input_ids=batch["input_ids"][:, -24:],
            attention_mask=batch["attention_mask"][:, -24:],
            max_new_tokens=self.new_tokens,
            **options,
        )
        assert isinstance(tokens_BT, Tensor)
        return tokens_BT

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        torch.manual_seed(batch_idx)
        return {
            "greedy": self.generate(batch, do_sample=False),
            "sampled": self.generate(batch, do_sample=True, top_k=0),
            "uncached": self.generate(batch, do_sample=False, use_cache=False),
            "beams": self.generate(batch, do_sample=False, num_beams=3),
        }

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("loss", self.model(**batch).loss)
        greedy_BT = self.generate(batch, do_sample=False)
        self.log("tokens", greedy_BT.float().sum(), reduce_fx="sum")
        self.log("second_loss", self.model(**batch).loss)

    def on_validation_epoch_end(self) -> None:
        self.in_hook = self.generate(next(iter(LOADER())), do_sample=False)


def write(model: Callable[[], nn.Module], new_tokens: int = 6) -> dict[str, Any]:
    """Return what a module generates: under the strategy where there are several ranks, else in one plain process."""
    module = Writer(model, new_tokens)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=HybridOPStrategy(micro_batches=2) if ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    predicted = trainer.predict(module, LOADER())
    (metrics,) = trainer.validate(module, LOADER(), verbose=False)
    return {"predicted": predicted, "metrics": metrics, "in hook": module.in_hook}


def write_each(families: list[str]) -> list[dict[str, Any]]:
    return [write(partial(tiny, family)) for family in families]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["in hook"].equal(expected["in hook"])
    assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)
    assert found["metrics"]["tokens"] == expected["metrics"]["tokens"]
    for ours, theirs in zip(found["predicted"], expected["predicted"], strict=True):
        for name, tokens_BT in theirs.items():
            assert ours[name].equal(tokens_BT), name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_generation_is_that_of_one_process_token_for_token(ranks: int) -> None:
    # Rotary positions; learned positions; a cache that keeps a window in every other layer; positions in the scores.
    families = ["Llama", "GPT-2", "Gemma2", "Bloom"]
    (expected,) = run_ranks(write_each, 1, families)
    for answers in run_ranks(write_each, ranks, families):
        for found, reference in zip(answers, expected, strict=True):
            assert_same(found, reference)


def smollm2() -> nn.Module:
    model, _ = load_language_model("smollm2")
    model.generation_config.pad_token_id = model.config.eos_token_id
    return model


@pytest.mark.slow
def test_smollm2_generates_the_same_on_two_stages() -> None:
    try:
        load_language_model("smollm2")
    except LanguageModelError as error:
        pytest.skip(str(error))
    (expected,) = run_ranks(write, 1, smollm2, 3)
    assert len({tuple(row) for row in expected["predicted"][0]["greedy"].tolist()}) == 4
    for found in run_ranks(write, 2, smollm2, 3):
        assert_same(found, expected)


class GeneratesWhileTraining(TinyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.model.generate(input_ids=batch["input_ids"], max_new_tokens=2)
        return super().training_step(batch, batch_idx)


class GeneratesStatically(TinyModule):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model.generate(
            input_ids=batch["input_ids"],
            max_new_tokens=2,
            cache_implementation="static",
            disable_compile=True,
        )


class DecodesByHand(TinyModule):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        first = self.model(input_ids=batch["input_ids"], use_cache=True)
        cache = next(value for value in first.values() if hasattr(value, "get_seq_length"))
        name = next(name for name, value in first.items() if value is cache)
        return self.model(input_ids=batch["input_ids"][:, -1:], **{name: cache}).logits


def _refused(module: Callable[[], lightning.LightningModule], method: str) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=HybridOPStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )
    getattr(trainer, method)(module(), LOADER())


@pytest.mark.parametrize(
    ("module", "method", "message"),
    [
        (GeneratesWhileTraining, "fit", r"training_step called generate\(\)"),
        (DecodesByHand, "predict", "The model was given the cache of its first call in this step"),
        (GeneratesStatically, "predict", r"generate\(\) uses a StaticCache, expected a DynamicCache"),
    ],
)
def test_generation_that_a_pipeline_cannot_follow_is_refused(
    module: Callable[[], lightning.LightningModule], method: str, message: str
) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(_refused, 2, module, method)
