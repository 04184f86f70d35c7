"""What of a run's configuration must be the same on all ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lightning_hybridop.planning.plan import Plan, plan_to_dict

OF_TRAINER = (
    "accumulate_grad_batches",
    "max_epochs",
    "max_steps",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
)
"""Settings of a Trainer that decide what a step is and when something else than a step comes."""


def configuration_facts(
    *, plan: Plan | None, options: Mapping[str, Any], module: LightningModule
) -> dict[str, str]:
    """Return the options of a run as named facts: the given plan's, the strategy's, the Trainer's, the module's.

    Left out is what may differ between hosts: what was predicted or measured, and paths.
    """
    facts: dict[str, str] = {}
    if plan is not None:
        values = plan_to_dict(plan)
        for name in ("predicted", "measured"):
            values.pop(name, None)
        stages = values.pop("stages")
        facts |= {f"the plan's {name}": str(value) for name, value in values.items()}
        facts["the plan's number of stages"] = str(len(stages))
        facts |= {f"the plan's stage {index}": str(stage) for index, stage in enumerate(stages)}
    facts |= {f"the strategy's {name}": str(value) for name, value in options.items()}
    trainer = module.trainer
    facts |= {f"the Trainer's {name}": str(getattr(trainer, name)) for name in OF_TRAINER}
    return facts | {
        f"the module's {name}": str(value)
        for name, value in module.hparams.items()
        if _is_plain(value) and not is_path(value)
    }


def _is_plain(value: Any) -> bool:
    """Tell whether a value is made of texts and numbers alone, whose text is the same on every host."""
    if isinstance(value, Mapping):
        return all(_is_plain(part) and not is_path(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return all(_is_plain(part) and not is_path(part) for part in value)
    return value is None or isinstance(value, (str, int, float, bool))


def is_path(value: Any) -> bool:
    """Tell whether a text names a file or folder of this host."""
    if not isinstance(value, str) or ("/" not in value and "\\" not in value):
        return False
    try:
        return Path(value).exists()
    except OSError:
        return False
