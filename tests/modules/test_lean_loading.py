import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    BloomConfig,
    GPTNeoXConfig,
    MixtralConfig,
    PreTrainedModel,
)

from lightning_hybridop.modules.language_models import LanguageModelError
from lightning_hybridop.modules.lean_loading import load_on_demand
from lightning_hybridop.pipeline import weights
from lightning_hybridop.pipeline.anatomy import read_anatomy
from lightning_hybridop.pipeline.ownership import frozen_dtype
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.pipeline.weights import AwaitedParameter, StoredTensor, WeightError, materialise
from tests.lean_models import SPECIAL_TOKENS, gpt2_config, llama_config, save_random
from tests.tiny import VOCABULARY

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    # peft 0.21 asks a transformers 5.24 model by its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj", "c_attn", "query_key_value"]}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    **SPECIAL_TOKENS,
}
CONFIGS = {
    "llama": llama_config(),
    "tied llama": llama_config(tied=True),
    "gpt2": gpt2_config(),
    # Its head is stored under another name than the model has for it.
    "gpt-neox": GPTNeoXConfig(**SMALL),
    # Its blocks return tuples.
    "bloom": BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=3, n_head=2, **SPECIAL_TOKENS),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_random(config, tmp_path_factory.mktemp("model")) for name, config in CONFIGS.items()}


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def assert_equal(found: nn.Module, expected: nn.Module) -> None:
    own, wanted = tensors(found), tensors(expected)
    assert own.keys() == wanted.keys()
    for name, value in wanted.items():
        assert own[name].dtype == value.dtype, name
        assert torch.equal(own[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_model_is_the_ordinarily_loaded_one_once_it_is_read(
    name: str, dtype: torch.dtype, folders: dict[str, Path]
) -> None:
    ordinary = AutoModelForCausalLM.from_pretrained(folders[name], dtype=dtype)

    lean = load_on_demand(folders[name], dtype=dtype)

    assert all(isinstance(parameter, AwaitedParameter) for parameter in lean.parameters())
    assert not any(buffer.is_meta for buffer in lean.buffers())
    assert read_anatomy(lean) == read_anatomy(ordinary)
    materialise(lean.parameters())
    assert_equal(lean, ordinary)
    assert lean.training == ordinary.training
    assert lean.config.to_dict() == ordinary.config.to_dict()
    assert lean.generation_config.to_dict() == ordinary.generation_config.to_dict()


@pytest.mark.parametrize("shard", ["12KB", "1GB"], ids=["several shards", "one file"])
def test_sharded_and_single_files_are_read_alike(shard: str, tmp_path: Path) -> None:
    folder = save_random(llama_config(), tmp_path, shard=shard)
    assert (len(list(folder.glob("*.safetensors"))) == 1) == (shard == "1GB")

    lean = load_on_demand(folder)
    materialise(lean.parameters())

    assert_equal(lean, AutoModelForCausalLM.from_pretrained(folder))


def adapted(model: PreTrainedModel, **options: Any) -> Any:
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(**LORA, **options))


@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_are_real_and_those_of_ordinary_loading(name: str, folders: dict[str, Path]) -> None:
    torch.manual_seed(3)
    ordinary = get_peft_model(AutoModelForCausalLM.from_pretrained(folders[name]), LoraConfig(**LORA))
    drawn = torch.rand(1)
    torch.manual_seed(3)

    lean = get_peft_model(load_on_demand(folders[name]), LoraConfig(**LORA))

    assert torch.equal(torch.rand(1), drawn)
    adapters = {key: value for key, value in lean.named_parameters() if "lora_" in key}
    assert adapters
    for key, value in adapters.items():
        assert not value.is_meta
        assert torch.equal(value, ordinary.get_parameter(key))
    materialise(lean.parameters())
    assert_equal(lean, ordinary)


def test_modules_to_save_are_copies_with_the_stored_values(folders: dict[str, Path]) -> None:
    ordinary = adapted(AutoModelForCausalLM.from_pretrained(folders["llama"]), modules_to_save=["lm_head"])

    lean = adapted(load_on_demand(folders["llama"]), modules_to_save=["lm_head"])
    materialise(lean.parameters())

    assert any("modules_to_save" in key for key in tensors(lean))
    assert_equal(lean, ordinary)
    head = lean.get_submodule("base_model.model.lm_head")
    assert head.modules_to_save["default"].weight is not head.original_module.weight


def test_a_saved_adapter_is_loaded_on_top(folders: dict[str, Path], tmp_path: Path) -> None:
    model = adapted(AutoModelForCausalLM.from_pretrained(folders["llama"]))
    for key, value in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(value)
    model.save_pretrained(tmp_path)

    lean = PeftModel.from_pretrained(load_on_demand(folders["llama"]), tmp_path)
    materialise(lean.parameters())

    assert_equal(lean, model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 5), (5, 6)])
@pytest.mark.parametrize("name", ["llama", "tied llama"])
def test_a_stage_reads_its_own_weights_and_nothing_else(
    name: str,
    first: int,
    last: int,
    dtype: torch.dtype | None,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []
    fill = weights._fill

    def counting(file: Any, tensor: torch.Tensor, stored: StoredTensor) -> None:
        read.append(stored.key)
        fill(file, tensor, stored)

    monkeypatch.setattr(weights, "_fill", counting)
    model = adapted(load_on_demand(folders[name]))
    anatomy = read_anatomy(model)
    assert read == []
    if dtype is not None:
        frozen_dtype(model, dtype)

    stage = StageModel(model, anatomy, first=first, last=last)
    with stage.whole():
        size = materialise(model.parameters())

    names = [key for key, _ in AutoModelForCausalLM.from_config(CONFIGS[name]).named_parameters()]
    expected = {key for key in names if any(f".layers.{block}." in key for block in range(first, last))}
    if first == 0 or (last == 6 and name == "tied llama"):
        expected.add("model.embed_tokens.weight")
    if last == 6:
        expected |= {"model.norm.weight"} | {"lm_head.weight"} & set(names)
    assert sorted(read) == sorted(expected)
    own = [value for key, value in model.named_parameters() if "lora_" not in key]
    assert {value.dtype for value in own} == {dtype or torch.float32}
    assert size == sum(value.nbytes for value in own)
    with stage.whole():
        others = [
            value
            for key, value in model.named_parameters()
            if anatomy.block_of(key) is not None and not first <= (anatomy.block_of(key) or 0) < last
        ]
        assert all(value.is_meta == (not value.requires_grad) for value in others)


@pytest.mark.parametrize("auto_class", [AutoModelForSequenceClassification, AutoModelForQuestionAnswering])
def test_a_new_head_is_drawn_as_ordinary_loading_draws_it(auto_class: Any, folders: dict[str, Path]) -> None:
    torch.manual_seed(5)
    lean = load_on_demand(folders["gpt2"], auto_class=auto_class, num_labels=3)
    torch.manual_seed(5)
    ordinary = auto_class.from_pretrained(folders["gpt2"], num_labels=3)

    materialise(lean.parameters())

    assert_equal(lean, ordinary)


def test_a_head_that_names_its_model_otherwise_is_read(folders: dict[str, Path]) -> None:
    # LlamaForQuestionAnswering holds as `transformer` what the others hold as `model`.
    lean = load_on_demand(folders["llama"], auto_class=AutoModelForQuestionAnswering)
    materialise(lean.parameters())

    assert_equal(lean.transformer, AutoModelForCausalLM.from_pretrained(folders["llama"]).model)


def test_a_missing_weight_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    key = "model.layers.3.mlp.up_proj.weight"
    shard = folder / index["weight_map"][key]
    content = shard.read_bytes()
    # A name of the same length, so that nothing else moves.
    shard.write_bytes(content.replace(key.encode(), key.replace("up_proj", "xx_proj").encode()))

    with pytest.raises(LanguageModelError, match=rf"lacks the weight {key} that LlamaForCausalLM needs"):
        load_on_demand(folder)


def test_a_missing_shard_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()

    with pytest.raises(WeightError, match=rf"The file {shard.name} cannot be read"):
        load_on_demand(folder)


def test_a_configuration_of_another_size_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(
        WeightError, match=r"has the shape \[32, 16\] in .*, but the model expects \[48, 16\]"
    ):
        load_on_demand(folders["llama"], intermediate_size=48)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path)

    with pytest.raises(LanguageModelError, match=r"has neither model\.safetensors nor .*index\.json"):
        load_on_demand(tmp_path)


def test_weights_in_another_form_are_refused(tmp_path: Path) -> None:
    mixtral = MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1)
    save_random(mixtral, tmp_path)

    with pytest.raises(LanguageModelError, match=r"stores model\.layers\.0\.mlp\.experts.* in another form"):
        load_on_demand(tmp_path)


def test_quantised_weights_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq"}})
    )

    with pytest.raises(LanguageModelError, match="are quantised"):
        load_on_demand(folder)


def test_adapters_that_start_from_the_weights_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(WeightError, match=r"were asked for before they are read.*DoRA"):
        adapted(load_on_demand(folders["llama"]), use_dora=True)
