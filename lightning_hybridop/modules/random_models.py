"""Tiny random language models of any number of blocks: they stand for large ones where only the pipeline matters."""

import re
import string
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, TokenizersBackend

from lightning_hybridop.modules.cached_folders import built_folder
from lightning_hybridop.modules.progress import without_progress_bars

_NAME = re.compile(r"random-(\d+)-blocks")


def random_blocks(name: str) -> int | None:
    """Return the number of blocks that a name such as `random-28-blocks` asks for; None for other names."""
    found = _NAME.fullmatch(name)
    return int(found.group(1)) if found else None


def random_model_folder(blocks: int) -> Path:
    """Return a folder with a random Llama of hidden size 32, always the same one, and a tokenizer of characters."""

    def build(folder: Path) -> None:
        characters = sorted(set(string.printable) - set(string.whitespace))
        names = ["<unk>", "<eos>", *characters]
        backend = Tokenizer(
            models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
        )
        TokenizersBackend(  # type: ignore[no-untyped-call]
            tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
        ).save_pretrained(folder)
        config = LlamaConfig(
            vocab_size=len(names),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=blocks,
            num_attention_heads=2,
            num_key_value_heads=1,
            pad_token_id=1,
            bos_token_id=1,
            eos_token_id=1,
        )
        with torch.random.fork_rng(devices=[]), without_progress_bars():
            torch.manual_seed(0)
            LlamaForCausalLM(config).save_pretrained(folder)

    return built_folder(f"random-{blocks}-blocks-transformers-{transformers.__version__}", build)
