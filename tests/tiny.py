"""Tiny language models, batches and LightningModules for tests."""

from typing import Any

import lightning
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 61


def tiny_llama(
    *, blocks: int = 6, dropout: float = 0.0, seed: int = 0, rank: int = 2, layers: list[int] | None = None
) -> nn.Module:
    """Return a random Llama of hidden size 16 with LoRA of this rank on q and v, both factors random."""
    bare = bare_llama(blocks=blocks, seed=seed)
    lora = LoraConfig(
        r=rank,
        target_modules=["q_proj", "v_proj"],
        lora_dropout=dropout,
        layers_to_transform=layers,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(bare, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model


def bare_llama(*, blocks: int = 6, seed: int = 0) -> LlamaForCausalLM:
    """Return the random Llama without an adapter; what draws numbers next goes on from `seed`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


class TinyModule(lightning.LightningModule):
    """A stock module: an HF model called once per step, no knowledge of pipelines."""

    def __init__(self, *, learning_rate: float = 1e-2, **model: Any) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.model = tiny_llama(**model)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.learning_rate)


class TokenRows(Dataset[dict[str, Tensor]]):
    """Random rows of tokens of one length; every token is a label."""

    def __init__(self, rows: int, length: int = 7, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, VOCABULARY, (rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()}


def loader(
    rows: int, *, batch_size: int = 8, shuffle: bool = False, length: int = 7
) -> DataLoader[dict[str, Tensor]]:
    """Return a loader over `TokenRows`."""
    return DataLoader(TokenRows(rows, length), batch_size=batch_size, shuffle=shuffle)
