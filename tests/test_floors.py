"""The house stands: imports run only downwards, and heavy libraries stay above the floor that may use them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_hybridop

PACKAGE = "lightning_hybridop"

# From the ground up. Rooms in one line may not import each other unless NEIGHBOURS says so.
FLOORS = (
    ("planning",),
    ("schedules",),
    ("simulation",),
    ("reporting",),
    ("devices",),
    ("estimation",),
    ("pipeline",),
    ("module", "replay", "sampling"),
    ("strategy",),
    ("accelerators", "modules", "data", "callbacks"),
    ("__init__",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}

NEIGHBOURS = {
    # A DataModule builds its batches with the prompts that the LightningModules are trained on.
    ("data", "modules"),
    # The strategy gives a rank the device that the accelerators find, and registers them with itself.
    ("strategy", "accelerators"),
}

TORCH = {"torch", "torchmetrics", "transformers", "peft", "torch_npu", "safetensors"}
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
DISTRIBUTED = {"torch.distributed"}

FORBIDDEN = {
    **dict.fromkeys(("planning", "schedules", "simulation", "reporting"), TORCH | LIGHTNING),
    **dict.fromkeys(("devices", "estimation"), LIGHTNING | DISTRIBUTED),
    "pipeline": LIGHTNING,
    "module": LIGHTNING,
}

# Rooms that see less than what lies below them.
ONLY = {"reporting": {"planning", "schedules"}}


def room_of(path: Path) -> str:
    """Return the room of a file, given its path inside the package."""
    return path.parts[0].removesuffix(".py")


def imports(source: str) -> Iterator[str]:
    """Yield the dotted names of all modules that a file may import, wherever in the file it does.

    `from a import b` yields `a` and `a.b`, and using `torch.distributed` counts as importing it.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def violations(room: str, source: str) -> list[str]:
    """Return the imports that a file of `room` must not have."""
    found = []
    for name in imports(source):
        parts = name.split(".")
        if parts[0] == PACKAGE:
            if name == PACKAGE and room != "__init__":
                continue  # the bare package, yielded beside what is imported from it
            other = parts[1] if len(parts) > 1 else "__init__"
            if other == room or (room, other) in NEIGHBOURS:
                continue
            if HEIGHT[other] >= HEIGHT[room] or other not in ONLY.get(room, {other}):
                found.append(name)
        elif any(name == banned or name.startswith(banned + ".") for banned in FORBIDDEN.get(room, ())):
            found.append(name)
    return found
