"""The supported architectures, cut into three stages: what the split model computes is what the whole one does."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig

from tests.pipeline.by_hand import cut, evaluation_by_hand, split_gradients, unsplit_gradients

pytestmark = [
    # peft 0.21 asks a transformers 5.24 model by its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # peft's own conversion table for mixtures of experts, which linear targets do not use.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
    # GPT-2 stores transposed linear layers; peft notices and does the right thing.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]

VOCABULARY = 64
BLOCKS = 6
STAGES = ((0, 2), (2, 3), (3, 6))
CAUSAL, CLASSIFICATION = "causal", "classification"

SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    **SPECIAL_TOKENS,
}
DECODER = {**ENCODER, "num_key_value_heads": 2}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": BLOCKS,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **SPECIAL_TOKENS,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A tiny random member of an architecture, and what peft must leave alone in it."""

    config: str
    options: dict[str, Any]
    heads: tuple[str, ...] = (CAUSAL, CLASSIFICATION)
    exclude: list[str] = field(default_factory=list)

    def make_config(self) -> PretrainedConfig:
        """Return a configuration with special tokens inside the tiny vocabulary and no cache surprises."""
        return getattr(transformers, f"{self.config}Config")(**self.options)


FAMILIES = {
    "Llama": Family(config="Llama", options=DECODER),
    "Qwen2": Family(config="Qwen2", options=DECODER),
    "Qwen3": Family(config="Qwen3", options={**DECODER, "head_dim": 8}),
    "Mistral": Family(config="Mistral", options=DECODER),
    "Mixtral": Family(config="Mixtral", options={**DECODER, **EXPERTS}),
    "Gemma2": Family(config="Gemma2", options={**DECODER, "head_dim": 8}),
    "Gemma3": Family(config="Gemma3Text", options={**DECODER, "head_dim": 8}),
    "Phi": Family(config="Phi", options=DECODER),
    "Phi3": Family(config="Phi3", options=DECODER),
    "GPT-2": Family(config="GPT2", options=GPT),
    "GPT-J": Family(config="GPTJ", options={**GPT, "rotary_dim": 4}),
    "GPT-NeoX": Family(config="GPTNeoX", options=ENCODER),
    "OPT": Family(
        config="OPT",
        options={
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": BLOCKS,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            **SPECIAL_TOKENS,
        },
    ),
    "BERT": Family(config="Bert", options={**ENCODER, **NO_DROPOUT, "is_decoder": True}),
    "RoBERTa": Family(config="Roberta", options={**ENCODER, **NO_DROPOUT, "is_decoder": True}),
    "ELECTRA": Family(
        config="Electra", options={**ENCODER, **NO_DROPOUT, "embedding_size": 16, "is_decoder": True}
    ),
    "DistilBERT": Family(
        config="DistilBert",
        options={
            "vocab_size": VOCABULARY,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": BLOCKS,
            "n_heads": 4,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_classif_dropout": 0.0,
            "pad_token_id": 0,
        },
        heads=(CLASSIFICATION,),
        exclude=[
            "pre_classifier"
        ],  # peft trains it whole, as it matches "classifier", and cannot also adapt it
    ),
    "OLMo2": Family(config="Olmo2", options=DECODER),
    "SmolLM3": Family(config="SmolLM3", options=DECODER),
    "StarCoder2": Family(
        config="Starcoder2", options={**DECODER, "residual_dropout": 0.0, "embedding_dropout": 0.0}
    ),
    "StableLM": Family(config="StableLm", options=DECODER),
    "Granite": Family(config="Granite", options=DECODER, heads=(CAUSAL,)),
    "Cohere": Family(config="Cohere", options=DECODER, heads=(CAUSAL,)),
    "GLM": Family(config="Glm", options={**DECODER, "head_dim": 8}),
    "Nemotron": Family(config="Nemotron", options=DECODER),
    "GPT-OSS": Family(config="GptOss", options={**DECODER, **EXPERTS, "head_dim": 8}),
    "LFM2": Family(
        config="Lfm2",
        options={
            **DECODER,
            "block_ff_dim": 48,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 3,
        },
        heads=(CAUSAL,),
    ),
    # Its model asks every block for `attention_type`.
    "ModernBERT": Family(
        config="ModernBert",
        options={**ENCODER, "cls_token_id": 1, "sep_token_id": 2},
        heads=(CLASSIFICATION,),
    ),
    # Its model asks the embedding's weight for a device.
    "Llama4": Family(
        config="Llama4Text",
        options={**DECODER, **EXPERTS, "head_dim": 8, "intermediate_size_mlp": 48},
        heads=(CAUSAL,),
        exclude=["router"],  # peft takes it for a linear layer, but it returns a pair
    ),
    # Their blocks return tuples.
    "Bloom": Family(
        config="Bloom",
        options={
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "n_layer": BLOCKS,
            "n_head": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **SPECIAL_TOKENS,
        },
    ),
    "Falcon": Family(
        config="Falcon",
        options={
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": BLOCKS,
            "num_attention_heads": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            **SPECIAL_TOKENS,
        },
    ),
}

CASES = [(name, head) for name, family in FAMILIES.items() for head in family.heads]


def adapted_model(family: Family, head: str) -> nn.Module:
    """Return the family's model with LoRA on all linear layers, both factors random."""
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if head == CAUSAL else AutoModelForSequenceClassification
    lora = LoraConfig(
        r=2,
        target_modules="all-linear",
        exclude_modules=family.exclude or None,
        task_type="CAUSAL_LM" if head == CAUSAL else "SEQ_CLS",
    )
    model = get_peft_model(auto.from_config(family.make_config()), lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize(("name", "head"), CASES, ids=[f"{name}-{head}" for name, head in CASES])
def test_split_model_is_bit_identical_to_the_unsplit_one(name: str, head: str) -> None:
    model = adapted_model(FAMILIES[name], head)
    tokens = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    tokens = tokens * mask
    labels = tokens.masked_fill(mask == 0, -100) if head == CAUSAL else torch.tensor([0, 1])

    def step(model: nn.Module) -> Any:
        return model(input_ids=tokens, attention_mask=mask, labels=labels)

    whole = unsplit_gradients(model, step)
    stages = cut(model, STAGES)
    split = split_gradients(stages, step)

    # Evaluation: row by row through the blocks, all rows at once behind them.
    def row(number: int) -> Any:
        one = slice(number, number + 1)
        return lambda part: part(input_ids=tokens[one], attention_mask=mask[one], labels=labels[one])

    evaluated = evaluation_by_hand(stages, step, micro_batch_steps=[row(0), row(1)])
    real = mask.bool() if head == CAUSAL else torch.ones(2, dtype=torch.bool)  # padding may see what it likes
    torch.testing.assert_close(
        evaluated.logits[real], whole.output.logits[real].detach(), atol=1e-5, rtol=1e-5
    )
    assert float(evaluated.loss) == pytest.approx(float(whole.output.loss.detach()), abs=1e-5)

    assert torch.equal(split.output.logits, whole.output.logits)
    assert torch.equal(split.output.loss, whole.output.loss)
    assert split.gradients.keys() == whole.gradients.keys()
    different = [
        key for key, gradient in whole.gradients.items() if not torch.equal(split.gradients[key], gradient)
    ]
    assert different == []
    # The comparison says something only if every block and the head learn.
    learning = [key for key, gradient in whole.gradients.items() if gradient.count_nonzero() > 0]
    for block in range(BLOCKS):
        assert any(f".{block}." in key and "lora_" in key for key in learning)
    if head == CLASSIFICATION:
        assert any("modules_to_save" in key for key in learning)
