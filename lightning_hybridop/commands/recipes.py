"""Finds the recipes: flat scripts that stand outside the package in a checkout and inside it once installed."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_hybridop.commands.configuration import shipped_folder

Recipe = Callable[[DictConfig, Path], Any]


def load_recipe(name: str) -> Recipe:
    """Return the function `name` of the recipe `recipes/<name>.py`; it takes a configuration and a run folder."""
    # Not a plain import: an editable installation knows only the folders below the package's own.
    qualified = f"lightning_hybridop.recipes.{name}"
    if qualified not in sys.modules:
        specification = importlib.util.spec_from_file_location(
            qualified, shipped_folder("recipes") / f"{name}.py"
        )
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        sys.modules[qualified] = module
    recipe: Recipe = getattr(sys.modules[qualified], name)
    return recipe
