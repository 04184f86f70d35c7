"""What a pipeline cannot train is refused before anything is cut; what it can train is not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from peft import AdaLoraConfig, IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_hybridop import HybridOPStrategy, even_plan
from lightning_hybridop.pipeline.emulation import Emulation
from lightning_hybridop.planning.costs import LinkTimes, StageTimes
from lightning_hybridop.planning.plan import PlanError
from lightning_hybridop.refusals import refuse_adapters_across_stages, refuse_saved_copies_of_tied_weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings"),
    # peft 0.21 asks a transformers 5.24 model by its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def adapted(kind: Callable[..., Any], *, tied: bool = False, **options: Any) -> nn.Module:
    """Return a tiny Llama with one adapter, inside another module."""
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    model = get_peft_model(LlamaForCausalLM(config), kind(task_type="CAUSAL_LM", **options))
    return nn.ModuleDict({"student": model})


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "prompt tuning": (
        partial(adapted, PromptTuningConfig, num_virtual_tokens=3),
        "The adapter 'default' is a PROMPT_TUNING, which gives the model virtual tokens .* use an adapter inside",
    ),
    "prefix tuning": (
        partial(adapted, PrefixTuningConfig, num_virtual_tokens=3),
        "The adapter 'default' is a PREFIX_TUNING, which gives the model virtual tokens",
    ),
    "AdaLoRA": (
        partial(adapted, AdaLoraConfig, target_modules=["q_proj"], total_step=9, tinit=1, tfinal=1),
        "is an ADALORA, which adds a term over the adapters of all blocks to the loss .* rank_pattern",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_adapter_that_reaches_over_stages_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        refuse_adapters_across_stages(make())


@pytest.mark.parametrize("kind", [LoraConfig, IA3Config])
def test_an_adapter_inside_the_blocks_is_accepted(kind: Callable[..., Any]) -> None:
    options = {"feedforward_modules": []} if kind is IA3Config else {}
    refuse_adapters_across_stages(adapted(kind, target_modules=["q_proj"], **options))


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
def test_a_trained_copy_of_a_tied_weight_is_refused(saved: str) -> None:
    model = adapted(LoraConfig, tied=True, target_modules=["q_proj"], modules_to_save=[saved])
    with pytest.raises(
        ValueError, match=f"modules_to_save trains a copy of .*{saved}, whose weight is tied to"
    ):
        refuse_saved_copies_of_tied_weights(model)


@pytest.mark.parametrize("saved", ["lm_head", "embed_tokens"])
def test_a_trained_copy_of_a_weight_of_its_own_is_accepted(saved: str) -> None:
    options = {"target_modules": ["q_proj"], "modules_to_save": [saved]}
    refuse_saved_copies_of_tied_weights(adapted(LoraConfig, **options))


def test_replicas_of_a_pipeline_that_stands_for_another_are_refused() -> None:
    plan = even_plan(blocks=2, stages=2, replicas=2)
    times = Emulation(stages=(StageTimes(role="bp", forward=1.0),) * 2, links=(LinkTimes(),))
    with pytest.raises(ValueError, match="replicas is 2, but an emulation gives the times of one pipeline;"):
        HybridOPStrategy(plan, emulation=times)
    with pytest.raises(ValueError, match="replicas is 2, but plan='auto' lays out one pipeline;"):
        HybridOPStrategy("auto", replicas=2)


def test_options_that_a_plan_says_otherwise_are_refused() -> None:
    plan = even_plan(blocks=2, stages=2, wire="int8")
    HybridOPStrategy(plan, wire="int8")
    with pytest.raises(ValueError, match="wire is 'bfloat16', but the given plan says 'int8';"):
        HybridOPStrategy(plan, wire="bfloat16")
    with pytest.raises(ValueError, match="replicas is 3, but the given plan says 1;"):
        HybridOPStrategy(plan, replicas=3)
    with pytest.raises(PlanError, match="wire: found 'int4'"):
        HybridOPStrategy(wire="int4")  # type: ignore[arg-type]
