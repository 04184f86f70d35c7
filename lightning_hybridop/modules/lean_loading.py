"""Language models whose weights are read only where a stage of the pipeline needs them."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from lightning_hybridop.modules.language_models import LanguageModelError, readable, source_of
from lightning_hybridop.pipeline.random_state import random_state_kept
from lightning_hybridop.pipeline.weights import (
    StoredTensor,
    await_weights,
    parameters_on_meta,
    read,
    stored_tensors,
)


class AutoClass(Protocol):
    """One of transformers' `AutoModelFor...` classes."""

    def from_config(self, config: PretrainedConfig, *, dtype: torch.dtype) -> nn.Module:
        """Return a model of that configuration with random weights."""


def load_on_demand(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    auto_class: AutoClass = AutoModelForCausalLM,
    **configuration: Any,
) -> PreTrainedModel:
    """Return a language model in `dtype` whose weights stay in their files until a stage is known to need them.

    Used like `load_language_model`, in a LightningModule's `__init__` or `configure_model`; peft's adapters are made
    on top as usual and are real at once. `HybridOPStrategy` reads what its stage needs in the Trainer's setup;
    without it, `materialise(model.parameters())` from `lightning_hybridop.pipeline.weights` reads everything.

    Args:
        name_or_path: "smollm2", "random-<n>-blocks", a local folder or a Hugging Face hub id, with safetensors files.
        dtype: what the weights are cast to while they are read; a plan's stages may cast further.
        auto_class: which of transformers' `AutoModelFor...` classes builds the model.
        **configuration: fields of the model's configuration, such as `num_labels`.

    Raises:
        LanguageModelError: the model is not found, has no safetensors files, or stores its weights in another form
            than the model holds them in.
        WeightError: a file cannot be read, or a stored weight has another shape than the model's.
    """
    with readable(name_or_path):
        source = source_of(name_or_path)
        config = cast(PretrainedConfig, AutoConfig.from_pretrained(source, **configuration))
        files = _safetensors_files(source)
    _check_plainly_stored(config, name_or_path)
    stored = stored_tensors(files)
    # Buffers are computed. Nothing is drawn: initialisation finds the parameters on `meta`.
    with parameters_on_meta(), random_state_kept(torch.device("cpu")):
        model = cast(PreTrainedModel, auto_class.from_config(config, dtype=dtype))
    _check_dtype(model, dtype)
    stored = _under_the_models_names(model, stored, name_or_path)
    _draw_new_head(model, await_weights(model, stored), name_or_path)
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.copy_(read(stored[name], buffer.dtype))
    if model.can_generate():
        with suppress(OSError):  # without a file of its own the one made from the configuration stays
            model.generation_config = GenerationConfig.from_pretrained(source)
    return cast(PreTrainedModel, model.eval())  # type: ignore[no-untyped-call]


def _safetensors_files(source: str) -> list[Path]:
    """Return the files that hold a model's weights, fetching them if they are not here."""
    single = cached_file(source, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        return [Path(single)]
    index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise LanguageModelError(
            f"{source} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; load it the ordinary way and "
            "save it with save_pretrained, which writes them."
        )
    names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    folder = Path(source)
    if folder.is_dir():
        return [folder / name for name in names]
    return [Path(cast(str, cached_file(source, name))) for name in names]


def _check_plainly_stored(config: PretrainedConfig, name_or_path: str | Path) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise LanguageModelError(
            f"The weights of {name_or_path} are quantised, and only plain ones can be read on demand; load it the "
            "ordinary way."
        )


def _check_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if kept and dtype != torch.float32:
        raise LanguageModelError(
            f"{type(model).__name__} keeps {', '.join(sorted(kept))} in float32 whatever dtype it is loaded in, which "
            "is not done on demand; pass dtype=torch.float32, or load it the ordinary way."
        )


def _under_the_models_names(
    model: PreTrainedModel, stored: dict[str, StoredTensor], name_or_path: str | Path
) -> dict[str, StoredTensor]:
    """Return stored tensors by the names that they have in `model`, as transformers would rename them."""
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    own = model.state_dict()
    found = {}
    for key in sorted(stored):
        name, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if name not in own and key in own:
            name, converted = key, None
        if name not in own:
            # LlamaForQuestionAnswering and its like hold the model that they share with the others under another name.
            name = f"{model.base_model_prefix}.{name.partition('.')[2]}"
        if converted is not None and name in own:
            raise LanguageModelError(
                f"{name_or_path} stores {name} in another form than {type(model).__name__} holds it in ({key}), and "
                "only plain weights can be read on demand; load it the ordinary way."
            )
        found[name] = stored[key]
    return found


def _draw_new_head(model: PreTrainedModel, missing: list[str], name_or_path: str | Path) -> None:
    """Draw the weights of a head that the files lack, in the order in which transformers draws them."""
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        lacking = [attribute for attribute in own if f"{name}.{attribute}" in missing]
        if lacking and (name.startswith(f"{model.base_model_prefix}.") or module is output):
            raise LanguageModelError(
                f"{name_or_path} lacks the weight {name}.{lacking[0]} that {type(model).__name__} needs; fetch the "
                "model again, or take the architecture that its weights belong to."
            )
        for attribute in lacking:
            setattr(module, attribute, nn.Parameter(torch.empty_like(own[attribute], device="cpu")))
        if lacking:
            model._init_weights(module)  # type: ignore[no-untyped-call]
