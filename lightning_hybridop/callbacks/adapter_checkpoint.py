"""Writes the trained adapters as a folder that plain peft loads."""

import copy
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

if TYPE_CHECKING:
    from peft import PeftModel

WEIGHTS, CONFIGURATION = "adapter_model.safetensors", "adapter_config.json"


class AdapterCheckpoint(Callback):
    """At the end of training, write the adapters of all stages to `folder`, never the base model's weights.

    The folder holds `adapter_model.safetensors` and `adapter_config.json`, as peft writes them, and is loaded with
    `PeftModel.from_pretrained(base_model, folder)`. The module must hold exactly one PeftModel with one active
    adapter, under any attribute; its other adapters are written, as they are, to folders of their names inside it. The
    folder appears whole or not at all; one that is already there is replaced. With strategies that know nothing of
    stages the module's own state is written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a module whose adapter could not be written before any training is done."""
        find_adapter(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect the adapters on all ranks, then write them on rank 0."""
        strategy: Any = trainer.strategy
        pipelined = hasattr(strategy, "trainable_state_dict")
        state: dict[str, Tensor] = (
            strategy.trainable_state_dict() if pipelined else strategy.lightning_module_state_dict()
        )
        with strategy.whole_model() if pipelined else nullcontext():
            if trainer.is_global_zero:
                write_adapter(pl_module, state, self.folder)
        # Behind the barrier every rank of this host may load the folder.
        trainer.strategy.barrier("AdapterCheckpoint")


def find_adapter(module: LightningModule) -> tuple[str, "PeftModel", str]:
    """Return the module's one PeftModel: its attribute path, itself, and the name of its active adapter.

    Raises ValueError when there is none, are several, or several adapters are active.
    """
    from peft import PeftModel  # slow to import, and only runs that write an adapter need it

    found = [(name, child) for name, child in module.named_modules() if isinstance(child, PeftModel)]
    if len(found) != 1:
        names = ", ".join(name for name, _ in found) or "none"
        raise ValueError(
            f"AdapterCheckpoint found {len(found)} PeftModels in {type(module).__name__} ({names}), expected exactly "
            "one: hold the model that peft.get_peft_model returned as an attribute, or remove the callback."
        )
    name, model = found[0]
    adapters = model.active_adapters
    if len(adapters) != 1:
        raise ValueError(
            f"AdapterCheckpoint found {len(adapters)} active adapters ({', '.join(adapters)}), expected one: call "
            "set_adapter with the name of the one that is trained."
        )
    return name, model, adapters[0]


def write_adapter(module: LightningModule, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapters of the module's PeftModel to `folder`, with the values of `state` where it has them.

    The active adapter lies in `folder` itself, every other one in a folder of its name inside it.

    `state` uses the module's own parameter names; adapter weights that it lacks (those of `frozen` stages) are taken
    from the module. Raises ValueError when a value is known to neither.
    """
    name, model, active = find_adapter(module)
    weights = {adapter: _adapter_weights(name, model, adapter, state) for adapter in model.peft_config}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        for adapter in model.peft_config:
            _write_one(model, adapter, weights[adapter], new if adapter == active else new / adapter)
        if folder.exists():
            folder.rename(Path(temporary) / "old")
        new.rename(folder)


def _write_one(model: "PeftModel", adapter: str, weights: Mapping[str, Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    # The configuration of the running model stays as it is: inference_mode would stop training that goes on.
    config = copy.copy(model.peft_config[adapter])
    config.inference_mode = True
    base = model.get_base_model()
    automatic = None
    if config.task_type is None:
        automatic = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    folder.mkdir(exist_ok=True)
    save_file(dict(weights), folder / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(str(folder), auto_mapping_dict=automatic)
    # safetensors lets only the owner read its file, whatever the umask says; the two files belong together.
    shutil.copymode(folder / CONFIGURATION, folder / WEIGHTS)


def _adapter_weights(
    name: str, model: "PeftModel", adapter: str, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the adapter's tensors under the names of a PEFT folder, each its own contiguous copy on the CPU."""
    from peft import get_peft_model_state_dict

    prefix = f"{name}." if name else ""
    merged = model.state_dict()
    merged |= {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    # save_embedding_layers=False: "auto" may look the base model up on a hub and add base weights.
    chosen = get_peft_model_state_dict(model, merged, adapter, save_embedding_layers=False)
    missing = [key for key, value in chosen.items() if value.is_meta]
    if missing:
        raise ValueError(
            f"The adapter weight {missing[0]} and {len(missing) - 1} more have no values on rank 0, expected those of "
            "every stage: write the adapter inside strategy.whole_model() with strategy.trainable_state_dict()."
        )
    return {key: value.detach().to("cpu", copy=True).contiguous() for key, value in chosen.items()}
