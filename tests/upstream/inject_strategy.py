"""A pytest plugin that puts `HybridOPStrategy` into every Trainer that asks for no other strategy.

`python -m pytest -p inject_strategy <tests of Lightning>`, with this file's folder on PYTHONPATH; see README.md.
"""

from functools import wraps
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_hybridop import HybridOPStrategy

ONE_DEVICE = ("auto", 1, "1", [0])


def is_plain(arguments: dict[str, Any]) -> bool:
    """Tell whether a Trainer's arguments leave the strategy to Lightning and ask for one process on a CPU."""
    return (
        arguments.get("strategy", "auto") == "auto"
        and arguments.get("accelerator", "auto") in ("auto", "cpu")
        and arguments.get("devices", "auto") in ONE_DEVICE
        and arguments.get("num_nodes", 1) == 1
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Replace the Trainer's constructor before any test module is imported."""
    construct = Trainer.__init__

    @wraps(construct)
    def with_strategy(self: Trainer, *args: Any, **keywords: Any) -> None:
        # All of the Trainer's arguments have to be named.
        if is_plain(keywords):
            keywords["strategy"] = HybridOPStrategy()
        construct(self, *args, **keywords)

    Trainer.__init__ = with_strategy  # type: ignore[method-assign]
