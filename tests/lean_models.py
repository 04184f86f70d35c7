"""Folders with tiny random language models in several shards, and LightningModules that load them in any way."""

from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from lightning_hybridop.modules.lean_loading import load_on_demand
from tests.tiny import VOCABULARY

Loading = Literal["ordinary", "lean"]
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHARD = "12KB"
TARGETS = ["q_proj", "v_proj", "c_attn"]
"""Those of Llama and those of GPT-2."""


def llama_config(*, blocks: int = 6, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        **SPECIAL_TOKENS,
    )


def gpt2_config() -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=6,
        n_head=2,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **SPECIAL_TOKENS,
    )


def save_random(config: Any, folder: Path, *, shard: str = SHARD) -> Path:
    """Save a random causal language model, in several shards unless `shard` is large."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size=shard)
    return folder


class FolderModule(lightning.LightningModule):
    """A stock module around a model in a folder, with LoRA; `loading` is the one line that differs."""

    def __init__(
        self,
        folder: str,
        *,
        loading: Loading,
        late: bool = False,
        unfrozen: str = "nothing",
        **lora: Any,
    ) -> None:
        super().__init__()
        self.folder, self.loading, self.unfrozen, self.lora = folder, loading, unfrozen, lora
        self.model: nn.Module | None = None
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(0)
        self.model = get_peft_model(
            self.loaded(),
            LoraConfig(r=2, target_modules=TARGETS, task_type="CAUSAL_LM", **self.lora),
        ).train()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.1)
                parameter.requires_grad_(parameter.requires_grad or self.unfrozen in name)

    def loaded(self) -> PreTrainedModel:
        if self.loading == "lean":
            return load_on_demand(self.folder)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        return model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(**batch, use_cache=False).loss
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert self.model is not None
        loss = self.model(**batch, use_cache=False).loss
        self.log("val_loss", loss, batch_size=len(batch["input_ids"]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)
