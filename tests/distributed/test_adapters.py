"""Every kind of adapter trains on two stages as in one process, and its folder loads in plain peft."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
)
from torch import Tensor, nn, optim
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from lightning_hybridop.callbacks import AdapterCheckpoint
from lightning_hybridop.refusals import refuse_adapters_across_stages, refuse_saved_copies_of_tied_weights
from tests.distributed.alone import Outcome, assert_close, learn, learn_together
from tests.distributed.runs import Job
from tests.tiny import VOCABULARY, TokenRows, loader

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
]

BLOCKS = 4


def llama(*, classifies: bool = False, tied: bool = False, biased: bool = False) -> nn.Module:
    """Return the same tiny Llama at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=BLOCKS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        attention_bias=biased,
        tie_word_embeddings=tied,
        num_labels=3,
    )
    return LlamaForSequenceClassification(config) if classifies else LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": BLOCKS, "n_head": 2, "n_positions": 64}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
            **sizes,
            **dropouts,
        )
    )
    model.loss_type = "ForCausalLM"
    return model


def moved_from_start(model: nn.Module) -> nn.Module:
    """Give adapters that start as the identity random values, as behind some training."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_B", "lora_embedding_A", "vera_lambda_b")):
                nn.init.normal_(parameter, std=0.1)
    return model


def adapted(config: Callable[[], Any], base: Callable[[], nn.Module] = llama) -> nn.Module:
    return moved_from_start(get_peft_model(base(), config()))  # type: ignore[arg-type]


def lora(**options: Any) -> LoraConfig:
    defaults: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**defaults, **options})


def frozen_a() -> nn.Module:
    model = adapted(lora)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    return model


def from_a_folder(folder: Path) -> nn.Module:
    return PeftModel.from_pretrained(llama(), folder, is_trainable=True)  # type: ignore[arg-type]


def one_of_two() -> nn.Module:
    model = get_peft_model(llama(), lora())  # type: ignore[arg-type]
    model.add_adapter("second", lora(r=3, target_modules=["q_proj", "down_proj"]))
    model.set_adapter("second")
    return moved_from_start(model)


def recomputed(base: Callable[[], nn.Module], *, reentrant: bool) -> nn.Module:
    model = base()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # type: ignore[operator]
    model.enable_input_require_grads()  # type: ignore[operator]
    return model


def bias_only() -> nn.Module:
    model = llama(biased=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


class Adapted(LightningModule):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class LabelledRows(TokenRows):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        return {**row, "labels": row["input_ids"].sum() % 3}


def labelled_loader() -> Any:
    return torch.utils.data.DataLoader(LabelledRows(8), batch_size=4)


ROWS = partial(loader, 8, batch_size=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How to make a model, and the base model that its folder is loaded upon; None where there is no folder."""

    make: Callable[[], nn.Module]
    base: Callable[[], nn.Module] | None = llama
    train: Callable[[], Any] = ROWS


def _lora(**options: Any) -> Case:
    return Case(make=partial(adapted, partial(lora, **options)))


CLASSIFIES = partial(llama, classifies=True)
MLP = ["gate_proj", "up_proj", "down_proj"]
CASES = {
    "LoRA with patterns": _lora(
        rank_pattern={"v_proj": 4, "layers.1.self_attn.q_proj": 1}, alpha_pattern={"v_proj": 5}
    ),
    "rsLoRA on every linear layer": _lora(use_rslora=True, r=4, target_modules="all-linear"),
    "DoRA": _lora(use_dora=True),
    "LoRA with a frozen A": Case(make=frozen_a),
    "LoRA on some blocks": _lora(layers_to_transform=[0, 3]),
    "LoRA with biases": Case(
        make=partial(adapted, partial(lora, lora_bias=True, bias="all"), partial(llama, biased=True)),
        base=partial(llama, biased=True),
    ),
    "LoRA on the embedding and the head": _lora(target_modules=["embed_tokens", "q_proj", "lm_head"]),
    "LoRA and a trained head": Case(
        make=partial(adapted, partial(lora, task_type="SEQ_CLS", modules_to_save=["score"]), CLASSIFIES),
        base=CLASSIFIES,
        train=labelled_loader,
    ),
    "LoRA and a trained embedding": _lora(modules_to_save=["embed_tokens"]),
    "LoRA from a folder": Case(make=from_a_folder),
    "one LoRA of two": Case(make=one_of_two),
    "LoRA, recomputed": Case(make=partial(recomputed, partial(adapted, lora), reentrant=False)),
    "LoRA, recomputed the old way": Case(make=partial(recomputed, partial(adapted, lora), reentrant=True)),
    "IA3": Case(
        make=partial(
            adapted,
            partial(
                IA3Config,
                target_modules=["k_proj", "v_proj", "down_proj"],
                feedforward_modules=["down_proj"],
                task_type="CAUSAL_LM",
            ),
        )
    ),
    "VeRA": Case(
        make=partial(
            adapted, partial(VeraConfig, r=4, target_modules=["q_proj"], d_initial=0.5, task_type="CAUSAL_LM")
        )
    ),
    "no adapter": Case(make=llama, base=None),
    "no adapter, GPT-2": Case(make=gpt2, base=None),
    "biases": Case(make=bias_only, base=None),
}


def _jobs(folder: Path, strategy: Mapping[str, Any]) -> list[Job]:
    return [
        Job(
            strategy=strategy,
            module=partial(Adapted, _filled(case.make, folder)),
            train=case.train,
            callbacks=partial(_callbacks, folder / name if case.base else None),
        )
        for name, case in CASES.items()
    ]


def _filled(make: Callable[..., nn.Module], folder: Path) -> Callable[[], nn.Module]:
    return partial(make, folder / "start") if make is from_a_folder else make


def _callbacks(folder: Path | None) -> list[Any]:
    return [] if folder is None else [AdapterCheckpoint(folder)]


# Masks differ between micro-batches, so no single process draws them; keeping activations does.
DROPPING = partial(adapted, partial(lora, lora_dropout=0.5))
MASKED = {
    "kept": DROPPING,
    "recomputed": partial(recomputed, DROPPING, reentrant=False),
    "recomputed the old way": partial(recomputed, DROPPING, reentrant=True),
}

Runs = tuple[Path, dict[str, tuple[list[Outcome], list[Outcome]]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every case on two bp stages and on a zo stage with a bp stage behind it."""
    folder = tmp_path_factory.mktemp("adapters")
    adapted(lora).save_pretrained(folder / "start")  # type: ignore[operator]
    mixed: dict[str, Any] = {"zo_stages": 1, "micro_batches": 2, "epsilon": 0.0625}
    masked = [
        Job(strategy=strategy, module=partial(Adapted, make), train=partial(loader, 8, batch_size=4))
        for strategy in ({"micro_batches": 2}, mixed)
        for make in MASKED.values()
    ]
    # The jobs with a zo stage come first: the folders that are looked at are those of two bp stages.
    jobs = [*_jobs(folder, mixed), *_jobs(folder, {"micro_batches": 2}), *masked]
    outcomes = learn_together(jobs, 2)
    count = len(CASES)
    both = dict(zip(CASES, zip(outcomes[count:], outcomes[:count], strict=False), strict=False))
    masks = outcomes[2 * count :]
    return folder, both | dict(zip(MASKED, zip(masks, masks[len(MASKED) :], strict=False), strict=False))


@pytest.mark.parametrize("name", CASES)
def test_two_stages_train_an_adapter_as_one_process_does(name: str, runs: Runs) -> None:
    folder, outcomes = runs
    case = CASES[name]
    module = partial(Adapted, _filled(case.make, folder))
    expected = learn(Job(strategy={}, module=module, train=case.train), alone=True)

    for outcome in outcomes[name][0]:
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-6)
        for found, gradients in zip(outcome.gradients, expected.gradients, strict=True):
            assert_close(found, gradients, 1e-6)
        assert_close(outcome.parameters, expected.parameters, 1e-6)
    assert all(gradient.any() for gradient in expected.gradients[0].values())


@pytest.mark.parametrize("name", CASES)
def test_behind_a_zo_stage_every_part_of_an_adapter_moves(name: str, runs: Runs) -> None:
    folder, outcomes = runs
    module = Adapted(_filled(CASES[name].make, folder))
    before = {n: p for n, p in module.named_parameters() if p.requires_grad}
    first, second = outcomes[name][1]

    assert first.parameters.keys() == before.keys()
    for parameter, value in first.parameters.items():
        assert value.isfinite().all(), parameter
        assert not value.equal(before[parameter]), parameter
    assert_close(second.parameters, first.parameters, 0.0)
    # The stages behind have the gradient of the loss, whatever stands in front.
    expected = learn(Job(strategy={}, module=lambda: module, train=CASES[name].train), alone=True)
    for parameter, gradient in first.gradients[0].items():
        if _is_on_the_last_stage(parameter):
            torch.testing.assert_close(gradient, expected.gradients[0][parameter], atol=1e-6, rtol=0.0)


def _is_on_the_last_stage(name: str) -> bool:
    return any(f".{blocks}.{index}." in name for blocks in ("layers", "h") for index in (2, 3))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.base])
def test_the_folder_of_an_adapter_makes_plain_peft_the_trained_model(name: str, runs: Runs) -> None:
    folder, outcomes = runs
    case = CASES[name]
    assert case.base is not None
    loaded = PeftModel.from_pretrained(case.base(), folder / name).eval()  # type: ignore[arg-type]
    trained = Adapted(_filled(case.make, folder))
    _, unexpected = trained.load_state_dict(outcomes[name][0][0].parameters, strict=False)
    assert not unexpected
    model = trained.model.eval()
    rows = next(iter(case.train()))
    del rows["labels"]
    with torch.no_grad():
        assert loaded(**rows).logits.equal(model(**rows).logits)
        assert not loaded(**rows).logits.equal(
            Adapted(_filled(case.make, folder)).model.eval()(**rows).logits
        )


def test_an_adapter_that_is_not_active_is_left_alone_and_kept(runs: Runs) -> None:
    folder, outcomes = runs
    before = {n: p for n, p in one_of_two().named_parameters() if ".default." in n}
    assert before
    for stages in outcomes["one LoRA of two"]:
        for outcome in stages:
            assert not any(".default." in parameter for parameter in outcome.parameters)

    loaded = PeftModel.from_pretrained(llama(), folder / "one LoRA of two", adapter_name="second")  # type: ignore[arg-type]
    loaded.load_adapter(folder / "one LoRA of two" / "default", adapter_name="default")
    after = dict(loaded.named_parameters())
    for name, value in before.items():
        assert after[name].equal(value), name


def test_masks_are_the_same_when_activations_are_recomputed(runs: Runs) -> None:
    _, outcomes = runs
    for layout in (0, 1):
        kept = outcomes["kept"][layout][0]
        for name in list(MASKED)[1:]:
            for found, expected in zip(outcomes[name][layout][0].gradients, kept.gradients, strict=True):
                assert_close(found, expected, 1e-7)
        unmasked = outcomes["LoRA, recomputed"][layout][0]
        assert kept.losses[0] != pytest.approx(unmasked.losses[0], abs=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_what_trains_is_not_refused(name: str, runs: Runs) -> None:
    module = Adapted(_filled(CASES[name].make, runs[0]))
    refuse_adapters_across_stages(module)
    refuse_saved_copies_of_tied_weights(module)
