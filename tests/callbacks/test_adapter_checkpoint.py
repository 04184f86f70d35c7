import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from lightning_hybridop.callbacks import AdapterCheckpoint
from lightning_hybridop.callbacks.adapter_checkpoint import write_adapter

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning 2.6 on torch 2.13
    # peft 0.21 on transformers 5.24
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

Make = Callable[..., Any]
TOKENS = torch.arange(12).reshape(2, 6)


def base_model(kind: type[PreTrainedModel] = LlamaForCausalLM) -> PreTrainedModel:
    """Return the same tiny Llama at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        num_labels=3,
    )
    return kind(config)


def adapted(model: PreTrainedModel, task: TaskType | None = TaskType.CAUSAL_LM) -> PeftModel:
    model.name_or_path = "some/base-model"
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type=task)
    peft_model = get_peft_model(model, config)
    assert isinstance(peft_model, PeftModel)
    return peft_model


class Tuned(LightningModule):
    """A module that holds its PeftModel deep inside, under a name of its own."""

    def __init__(self, model: PeftModel) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleDict({"student": model})

    @property
    def model(self) -> PeftModel:
        model = self.inner["student"]
        assert isinstance(model, PeftModel)
        return model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=5.0)


@pytest.fixture
def tuned() -> Tuned:
    return Tuned(adapted(base_model()))


def trained_state(module: LightningModule) -> dict[str, Tensor]:
    """Return values for all trainable parameters that tell each of them apart."""
    parameters = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
    return {
        name: torch.full_like(value, 0.01 * (index + 1)) for index, (name, value) in enumerate(parameters)
    }


def loader() -> DataLoader[Tensor]:
    return DataLoader(TOKENS, batch_size=2)  # type: ignore[arg-type]


def test_plain_peft_reproduces_what_a_plain_strategy_trained(
    trainer: Make, tuned: Tuned, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "adapter"
    trainer(callbacks=[AdapterCheckpoint(folder)], max_epochs=2).fit(tuned, loader())
    tuned.eval()
    loaded = PeftModel.from_pretrained(base_model(), str(folder)).eval()
    expected, untouched = tuned.model(TOKENS).logits, base_model()(TOKENS).logits
    torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=0, atol=0)
    assert not torch.allclose(expected, untouched)


def test_a_pipeline_s_state_wins_and_is_written_inside_the_whole_model(
    trainer: Make, pipeline: Make, tuned: Tuned, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    state = trained_state(tuned)
    strategy = pipeline([()], state)
    trainer(strategy=strategy, callbacks=[AdapterCheckpoint(folder)]).fit(tuned, loader())
    assert strategy.events[-4:] == ["collect", "enter", "leave", "barrier"]

    loaded = PeftModel.from_pretrained(base_model(), str(folder))
    weights = {name: value for name, value in loaded.named_parameters() if "lora_" in name}
    assert len(weights) == 12
    for name, value in weights.items():
        torch.testing.assert_close(value, state[f"inner.student.{name}"], rtol=0, atol=0, check_device=False)


def test_released_blocks_may_be_on_meta_and_no_base_weight_is_written(tuned: Tuned, tmp_path: Path) -> None:
    for name, parameter in list(tuned.named_parameters()):
        if not parameter.requires_grad:
            owner, _, leaf = name.rpartition(".")
            meta = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
            setattr(tuned.get_submodule(owner), leaf, meta)
    write_adapter(tuned, trained_state(tuned), tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(weights) == 12
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in weights)
    assert all(value.count_nonzero() == value.numel() for value in weights.values())
    PeftModel.from_pretrained(base_model(), str(tmp_path / "adapter"))  # warnings are errors: no missing key


def test_adapters_of_a_frozen_stage_keep_their_values(tuned: Tuned, tmp_path: Path) -> None:
    state = {name: value for name, value in trained_state(tuned).items() if ".layers.0." not in name}
    own = {name: value.clone() for name, value in tuned.state_dict().items()}
    write_adapter(tuned, state, tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    frozen = "base_model.model.model.layers.0.self_attn.q_proj.lora_A"
    trained = frozen.replace("layers.0", "layers.1")
    torch.testing.assert_close(weights[f"{frozen}.weight"], own[f"inner.student.{frozen}.default.weight"])
    torch.testing.assert_close(weights[f"{trained}.weight"], state[f"inner.student.{trained}.default.weight"])
    assert len(weights) == 12


def test_a_classification_head_that_is_trained_is_written_too(tmp_path: Path) -> None:
    module = Tuned(adapted(base_model(LlamaForSequenceClassification), TaskType.SEQ_CLS))
    state = trained_state(module)
    write_adapter(module, state, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base_model(LlamaForSequenceClassification), str(tmp_path / "adapter"))
    head = "base_model.model.score.modules_to_save.default.weight"
    torch.testing.assert_close(dict(loaded.named_parameters())[head], state[f"inner.student.{head}"])


def test_the_configuration_is_ready_for_inference_and_the_running_one_unchanged(
    tuned: Tuned, tmp_path: Path
) -> None:
    write_adapter(tuned, {}, tmp_path / "adapter")
    content = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert content["inference_mode"] is True
    assert content["base_model_name_or_path"] == "some/base-model"
    assert (content["r"], content["lora_alpha"], content["task_type"]) == (2, 4, "CAUSAL_LM")
    assert tuned.model.peft_config["default"].inference_mode is False


def test_without_a_task_type_the_base_class_is_named(tmp_path: Path) -> None:
    write_adapter(Tuned(adapted(base_model(), None)), {}, tmp_path / "adapter")
    content = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert content["auto_mapping"]["base_model_class"] == "LlamaForCausalLM"


def test_an_adapter_under_another_name_loads_as_the_default_one(tmp_path: Path) -> None:
    model = adapted(base_model())
    model.add_adapter("second", LoraConfig(r=3, target_modules=["q_proj"], task_type=TaskType.CAUSAL_LM))
    model.set_adapter("second")
    write_adapter(Tuned(model), {}, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base_model(), str(tmp_path / "adapter"))
    shapes = {tuple(value.shape) for name, value in loaded.named_parameters() if "lora_A" in name}
    assert shapes == {(3, 16)}


def test_other_ranks_take_part_and_write_nothing(
    trainer: Make, pipeline: Make, tuned: Tuned, tmp_path: Path
) -> None:
    strategy = pipeline([()])
    strategy.rank_zero = False
    trainer(strategy=strategy, callbacks=[AdapterCheckpoint(tmp_path / "adapter")]).fit(tuned, loader())
    assert strategy.events[-4:] == ["collect", "enter", "leave", "barrier"]
    assert list(tmp_path.iterdir()) == []


def test_an_older_folder_is_replaced_whole(tuned: Tuned, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "stale.txt").write_text("old", encoding="utf-8")
    write_adapter(tuned, {}, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert list(tmp_path.iterdir()) == [folder]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_a_failure_leaves_the_older_folder_and_nothing_else(
    tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "adapter"
    write_adapter(tuned, {}, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def disk_full(*arguments: Any, **keywords: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(LoraConfig, "save_pretrained", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_adapter(tuned, trained_state(tuned), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


def test_adapters_without_values_are_refused(tuned: Tuned, tmp_path: Path) -> None:
    tuned.to("meta")
    with pytest.raises(ValueError, match=r"lora_A\.weight and 11 more have no values on rank 0"):
        write_adapter(tuned, {}, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_no_or_several_peft_models_are_refused_before_training(
    trainer: Make, loader: Make, line: LightningModule, tuned: Tuned, tmp_path: Path
) -> None:
    callback = AdapterCheckpoint(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"found 0 PeftModels in Line \(none\)"):
        trainer(callbacks=[callback]).fit(line, loader(2, 2))
    tuned.inner["teacher"] = adapted(base_model())
    with pytest.raises(ValueError, match=r"found 2 PeftModels in Tuned \(inner.student, inner.teacher\)"):
        trainer(callbacks=[callback]).fit(tuned, loader(2, 2))


def test_several_active_adapters_are_refused(tuned: Tuned, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type=TaskType.CAUSAL_LM)
    tuned.model.add_adapter("second", config)
    tuned.model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match=r"2 active adapters \(default, second\)"):
        write_adapter(tuned, {}, tmp_path / "adapter")
