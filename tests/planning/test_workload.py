"""The workload's formulas against real transformers and peft models, and against what torch counts and keeps."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gpt2 import GPT2Config
from transformers.models.llama import LlamaConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.qwen2 import Qwen2Config

from lightning_hybridop.planning.workload import (
    Adapter,
    Architecture,
    Workload,
    WorkloadError,
    architecture_from_config,
    workload_from_dict,
)

SHIPPED = Path(__file__).parents[2] / "conf" / "workload"
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **TOKENS,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama with wide heads": LlamaConfig(**SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": GPT2Config(vocab_size=97, n_embd=64, n_layer=3, n_head=4, n_positions=128, **TOKENS),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, attn_implementation="eager"),
}
LORA = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"} | {
    name: f"{name}_proj" for name in ("gate", "up", "down")
}
LLAMA = architecture_from_config(CONFIGS["llama"].to_dict(), name="llama")


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


# Parameters.


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = architecture_from_config(config.to_dict(), name=name)
    (body,) = (child for key, child in model.named_children() if key != "lm_head")
    blocks = blocks_of(model)
    embeddings = sum(count(module) for module in body.children() if isinstance(module, nn.Embedding))
    last_norm = count(body) - count(blocks) - embeddings

    assert sizes.blocks == len(blocks)
    assert sizes.block_parameters == count(blocks[0])
    assert sizes.embedding_parameters == embeddings
    assert sizes.head_parameters == last_norm + model.get_output_embeddings().weight.numel()
    assert sizes.parameters == count(model)
    workload = Workload(architecture=sizes, adapter=Adapter(targets=()), dtype="float16", rows=4, length=8)
    assert workload.block(1).parameter_bytes == 2 * count(blocks[0])
    assert workload.embedding(1).parameter_bytes == 2 * embeddings
    assert workload.head(1).parameter_bytes == 2 * sizes.head_parameters


@pytest.mark.parametrize(
    ("name", "parameters", "trained"),
    [
        # LoRA of rank 8 on q and v: 8 (in + out) of each, in every block.
        ("llama3_2_3b", 3_212_749_824, 28 * 8 * ((3072 + 3072) + (3072 + 1024))),
        ("llama3_1_8b", 8_030_261_248, 32 * 8 * ((4096 + 4096) + (4096 + 1024))),
        ("smollm2_135m", 134_515_008, 30 * 8 * ((576 + 576) + (576 + 192))),
    ],
)
def test_shipped_workloads_have_the_published_sizes(name: str, parameters: int, trained: int) -> None:
    workload = workload_from_dict(yaml.safe_load((SHIPPED / f"{name}.yaml").read_text()))
    sizes = workload.architecture

    assert sizes.parameters == parameters
    assert sizes.blocks * workload.block(1).trainable_parameters == trained


def test_every_shipped_workload_is_checked() -> None:
    assert {path.stem for path in SHIPPED.glob("*.yaml")} == {"llama3_2_3b", "llama3_1_8b", "smollm2_135m"}


@pytest.mark.parametrize("targets", [("q", "v"), ("q", "k", "v", "o", "gate", "up", "down"), ("down",)])
def test_trainable_parameters_are_those_of_peft(targets: tuple[str, ...]) -> None:
    lora = LoraConfig(r=5, target_modules=[LORA[name] for name in targets], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_config(CONFIGS["llama"]), lora)
    workload = Workload(architecture=LLAMA, adapter=Adapter(rank=5, targets=targets))

    trainable, _ = model.get_nb_trainable_parameters()
    assert LLAMA.blocks * workload.block(1).trainable_parameters == trainable
    # A weight, its gradient and two moments of Adam, in float32.
    assert LLAMA.blocks * workload.block(1).trained_bytes == 16 * trainable


# FLOPs.

ROWS, LENGTH = 3, 32


def counted_flops(config: PretrainedConfig, adapter: Adapter) -> tuple[float, float]:
    """Return the forward FLOPs of the second block and of the head, as torch counts them."""
    # A copy: the choice of attention is left in the configuration.
    model: nn.Module = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager")
    if adapter.targets:
        lora = LoraConfig(
            r=adapter.rank, target_modules=[LORA[name] for name in adapter.targets], task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, lora)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(input_ids=torch.zeros(ROWS, LENGTH, dtype=torch.long), use_cache=False)
    per_module = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    (block,) = (value for name, value in per_module.items() if name.endswith(".layers.1"))
    (head,) = (value for name, value in per_module.items() if name.endswith("lm_head"))
    return block, head


@pytest.mark.parametrize("name", ["llama", "llama with wide heads", "qwen2", "gemma2"])
@pytest.mark.parametrize("targets", [(), ("q", "v"), ("q", "k", "v", "o", "gate", "up", "down")])
def test_forward_flops_are_those_that_torch_counts(name: str, targets: tuple[str, ...]) -> None:
    adapter = Adapter(rank=4, targets=targets)
    sizes = architecture_from_config(CONFIGS[name].to_dict())
    workload = Workload(architecture=sizes, adapter=adapter, rows=ROWS, length=LENGTH)

    block, head = counted_flops(CONFIGS[name], adapter)
    assert workload.block(ROWS).forward_flops == block
    assert workload.head(ROWS).forward_flops == head
    assert workload.embedding(ROWS).forward_flops == 0


def test_a_token_passes_only_its_active_experts() -> None:
    sizes = architecture_from_config(CONFIGS["mixtral"].to_dict())
    dense = replace(sizes, experts=1, active_experts=1)

    def flops(architecture: Architecture) -> float:
        workload = Workload(architecture=architecture, rows=1, length=1)
        return workload.block(1).forward_flops

    router = 2 * 64 * 4
    assert flops(sizes) == flops(dense) + router + 2 * 3 * 64 * 160
    assert flops(sizes) == flops(replace(sizes, experts=8)) - router


def test_costs_grow_with_rows_and_length_as_they_must() -> None:
    workload = Workload(architecture=LLAMA, rows=8, length=16)
    longer = replace(workload, length=32)
    per_length = 4 * 64  # scores and values: two per element of q and of v, and token

    assert workload.block(8).forward_flops == 8 * workload.block(1).forward_flops
    assert workload.block(1).parameter_bytes == workload.block(8).parameter_bytes
    assert longer.block(1).forward_flops - 2 * workload.block(1).forward_flops == 32 * 16 * per_length
    assert workload.block(2).output_bytes == 2 * 16 * 64 * 2
    assert replace(workload, dtype="float32").block(2).output_bytes == 2 * 16 * 64 * 4
    assert workload.embedding(2).output_bytes == workload.block(2).output_bytes


@pytest.mark.parametrize(("rows", "choices"), [(1, (1,)), (8, (1, 2, 4, 8)), (12, (1, 2, 3, 4, 6, 12))])
def test_micro_batch_choices_divide_the_rows(rows: int, choices: tuple[int, ...]) -> None:
    assert Workload(architecture=LLAMA, rows=rows).micro_batch_choices() == choices


# Activations.


def kept_bytes(targets: tuple[str, ...], dtype: torch.dtype, *, padded: bool) -> float:
    """Return the bytes per token that the second block of a Llama with LoRA really keeps for its backward.

    Storages count once; parameters and what all blocks share (rotary tables, mask) do not count.
    """
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=[LORA[name] for name in targets], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=dtype), lora)
    model.enable_input_require_grads()
    block = blocks_of(model)[1]
    kept: dict[int, int] = {}
    excluded = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    contexts: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def begin(_module: nn.Module, _arguments: Any, named: dict[str, Any]) -> None:
        shared = (leaf for leaf in tree_leaves(named) if isinstance(leaf, torch.Tensor))
        excluded.update(tensor.untyped_storage().data_ptr() for tensor in shared)
        contexts.append(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        contexts[0].__enter__()

    block.register_forward_pre_hook(begin, with_kwargs=True)
    block.register_forward_hook(lambda *_: contexts[0].__exit__(None, None, None))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    if padded:
        mask[0, :5] = 0
    output = model(input_ids=torch.zeros_like(mask), attention_mask=mask, use_cache=False)
    assert output.logits.requires_grad
    return sum(kept.values()) / (ROWS * LENGTH)


def estimate(targets: tuple[str, ...], dtype: str) -> float:
    workload = Workload(
        architecture=LLAMA, adapter=Adapter(rank=4, targets=targets), rows=ROWS, length=LENGTH, dtype=dtype
    )
    return workload.block(ROWS).activation_bytes / (ROWS * LENGTH)


EVERY_TARGET = ("q", "k", "v", "o", "gate", "up", "down")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("targets", [("q", "v"), ("gate",), EVERY_TARGET])
def test_activation_bytes_of_a_padded_batch_are_those_that_torch_keeps(
    targets: tuple[str, ...], dtype: str
) -> None:
    real = kept_bytes(targets, getattr(torch, dtype), padded=True)

    assert estimate(targets, dtype) == real


def test_activation_bytes_without_padding_are_overestimated_by_little() -> None:
    real = kept_bytes(("q", "v"), torch.float32, padded=False)

    # Key and value heads are not repeated then, and there is no mask.
    assert 1.0 < estimate(("q", "v"), "float32") / real < 1.2


def test_measured_activations_replace_the_estimate() -> None:
    workload = Workload(architecture=LLAMA, rows=4, length=16, dtype="float16", activation_elements=100.0)

    assert workload.block(2).activation_bytes == 2 * 16 * 100 * 2


# Bad input.

ARCHITECTURE: dict[str, Any] = {
    "name": "tiny",
    "blocks": 3,
    "hidden": 64,
    "heads": 4,
    "key_value_heads": 2,
    "head_size": 16,
    "intermediate": 160,
    "vocabulary": 97,
}


def test_a_workload_from_plain_containers() -> None:
    values = {
        "architecture": {**ARCHITECTURE, "biases": ["q"]},
        "adapter": {"rank": 2, "targets": ["q"]},
        "rows": 2,
    }

    assert workload_from_dict(values) == Workload(
        architecture=Architecture(**ARCHITECTURE, biases=("q",)),
        adapter=Adapter(rank=2, targets=("q",)),
        rows=2,
    )
    assert workload_from_dict({"architecture": ARCHITECTURE, "adapter": None}).adapter == Adapter()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (
                {"architecture": {**ARCHITECTURE, name: value}},
                f"architecture.{name}: found {value!r}, expected a whole number of at least 1.",
            )
            for name in ("blocks", "hidden", "heads", "key_value_heads", "head_size", "intermediate")
            for value in (0, -1, 1.5, "8", True, None)
        ),
        (
            {"architecture": {**ARCHITECTURE, "vocabulary": 0}},
            "architecture.vocabulary: found 0, expected a whole number of at least 1.",
        ),
        (
            {"architecture": {**ARCHITECTURE, "experts": 0}},
            "architecture.experts: found 0, expected a whole number of at least 1.",
        ),
        (
            {"architecture": {**ARCHITECTURE, "norms": -1}},
            "architecture.norms: found -1, expected a whole number of at least 0.",
        ),
        (
            {"architecture": {**ARCHITECTURE, "gated": "no"}},
            "architecture.gated: found 'no', expected true or false.",
        ),
        (
            {"architecture": {**ARCHITECTURE, "key_value_heads": 3}},
            "architecture.key_value_heads: found 3, expected a divisor of the 4 heads.",
        ),
        (
            {"architecture": {**ARCHITECTURE, "active_experts": 2}},
            "architecture.active_experts: found 2, expected at most the 1 experts.",
        ),
        (
            {"architecture": {**ARCHITECTURE, "gated": False, "biases": ["gate"]}},
            "architecture.biases: tiny has no projection gate; choose from q, k, v, o, up, down.",
        ),
        (
            {"architecture": {**ARCHITECTURE, "biases": "q"}},
            "architecture.biases: found 'q', expected a list of projections.",
        ),
        (
            {"architecture": {**ARCHITECTURE, "layers": 3}},
            "architecture.layers: unknown field; known fields: name, blocks, hidden,",
        ),
        (
            {"architecture": {**ARCHITECTURE, "hiden": 3}},
            "architecture.hiden: unknown field; did you mean hidden?",
        ),
        ({"architecture": {"name": "tiny"}}, "architecture.blocks: missing; it has no default"),
        ({"architecture": None}, "architecture: found NoneType, expected fields with values."),
        ({"adapter": {"rank": 0}}, "adapter.rank: found 0, expected a whole number of at least 1."),
        ({"adapter": {"target": ["q"]}}, "adapter.target: unknown field; did you mean targets?"),
        ({"adapter": {"targets": "q"}}, "adapter.targets: found 'q', expected a list of projections."),
        (
            {"adapter": {"targets": ["q_proj"]}},
            "adapter.targets: tiny has no projection q_proj; choose from q, k, v, o, up, down, gate.",
        ),
        (
            {"adapter": {"targets": ["q", "q"]}},
            "adapter.targets: q is named twice; name each projection once.",
        ),
        ({"rows": 0}, "rows: found 0, expected a whole number of at least 1."),
        ({"length": 1.5}, "length: found 1.5, expected a whole number of at least 1."),
        (
            {"dtype": "float8"},
            "dtype: found 'float8', expected one of float32, bfloat16, float16, int8.",
        ),
        ({"activation_elements": -1}, "activation_elements: found -1, expected a number above 0."),
        ({"row": 2}, "workload.row: unknown field; did you mean rows?"),
    ],
)
def test_a_bad_workload_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        workload_from_dict({"architecture": ARCHITECTURE, **change})

    assert str(error.value).startswith(message)


@pytest.mark.parametrize("values", [None, [], "llama"])
def test_what_is_no_workload_is_refused(values: Any) -> None:
    with pytest.raises(WorkloadError, match=r"^workload: found \w+, expected fields with values\.$"):
        workload_from_dict(values)


def test_a_configuration_that_lacks_a_size_or_has_one_for_each_block_is_refused() -> None:
    config = CONFIGS["llama"].to_dict()
    with pytest.raises(
        WorkloadError, match=r"^tiny: its configuration has no vocab_size; plan for it with measured"
    ):
        architecture_from_config({**config, "vocab_size": None}, name="tiny")
    with pytest.raises(WorkloadError, match=r"^tiny: its configuration has intermediate_size \[8, 16\], exp"):
        architecture_from_config({**config, "intermediate_size": [8, 16]}, name="tiny")


def test_a_configuration_with_a_language_model_inside() -> None:
    assert architecture_from_config({"text_config": CONFIGS["llama"].to_dict()}, name="llama") == LLAMA
