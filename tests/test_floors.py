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
    ("devices",),
    ("estimation",),
    ("pipeline",),
    ("trainers",),
    (
        "mirror",
        "module",
        "replay",
        "sampling",
        "loaders",
        "checkpoints",
        "summary",
        "writers",
        "accelerators",
    ),
    ("placement", "auto_plan", "configurations", "refusals", "averaging", "assembly"),
    ("updates",),
    ("strategy",),
    ("reporting", "metrics"),
    ("modules", "data", "callbacks"),
    ("__init__",),
    ("commands",),
    ("cli", "recipes"),
    ("__main__",),
)
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}

NEIGHBOURS = {
    # A DataModule builds its batches with the prompts that the LightningModules are trained on.
    ("data", "modules"),
}

TORCH = {"torch", "torchmetrics", "transformers", "peft", "torch_npu", "safetensors"}
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
DISTRIBUTED = {"torch.distributed"}

FORBIDDEN = {
    **dict.fromkeys(("planning", "schedules", "simulation", "reporting"), TORCH | LIGHTNING),
    **dict.fromkeys(("devices", "estimation"), LIGHTNING | DISTRIBUTED),
    **dict.fromkeys(("pipeline", "module", "sampling"), LIGHTNING),
}

# Rooms that see less than what lies below them.
ONLY = {"reporting": {"planning", "schedules", "simulation"}}


def imports(source: str) -> Iterator[str]:
    """Yield the dotted name of everything that a file may import, wherever in the file it does.

    `from a import b` yields `a.b`; using `torch.distributed` counts as importing it.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import, which the style forbids, would have no module here and fail.
            assert node.module is not None
            assert node.level == 0
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def room_of(dotted: str) -> str:
    """Return the room that a name inside the package belongs to; public names belong to `__init__`."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in HEIGHT else "__init__"


def violations(room: str, source: str) -> list[str]:
    """Return the imports that a file of `room` must not have."""
    found = []
    for name in imports(source):
        if name.split(".")[0] == PACKAGE:
            other = room_of(name)
            if other == room or (room, other) in NEIGHBOURS:
                continue
            if HEIGHT[other] >= HEIGHT[room] or other not in ONLY.get(room, {other}):
                found.append(name)
        elif any(name == banned or name.startswith(banned + ".") for banned in FORBIDDEN.get(room, ())):
            found.append(name)
    return found


ROOT = Path(lightning_hybridop.__file__).parent
# In a checkout the recipes stand beside the package, once installed inside it.
FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))} | {
    f"recipes/{path.name}": path for path in sorted((ROOT.parent / "recipes").glob("*.py"))
}


def room_of_file(name: str) -> str:
    """Return the room of a file, given its path inside the package."""
    return Path(name).parts[0].removesuffix(".py")


@pytest.mark.parametrize("name", FILES)
def test_every_file_stands_on_a_floor_and_imports_only_downwards(name: str) -> None:
    room = room_of_file(name)

    assert room in HEIGHT, f"{room} stands on no floor; add it to FLOORS in {Path(__file__).name}"
    assert violations(room, FILES[name].read_text(encoding="utf-8")) == []


def test_every_exception_is_needed() -> None:
    edges = {
        (room_of_file(name), room_of(imported))
        for name, path in FILES.items()
        for imported in imports(path.read_text(encoding="utf-8"))
        if imported.split(".")[0] == PACKAGE
    }

    assert edges >= NEIGHBOURS


def test_no_two_rooms_import_each_other() -> None:
    # Downwards alone gives no cycle; the exceptions must not bring one back.
    assert not {(upper, lower) for lower, upper in NEIGHBOURS} & NEIGHBOURS
    for room, other in NEIGHBOURS:
        for name, path in FILES.items():
            if room_of_file(name) == other:
                assert not any(
                    imported.split(".")[0] == PACKAGE and room_of(imported) == room
                    for imported in imports(path.read_text(encoding="utf-8"))
                )


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("planning", "import torch"),
        ("planning", "from lightning_hybridop.schedules.actions import Action"),
        ("schedules", "def late():\n    import lightning.pytorch"),
        ("schedules", "from lightning_hybridop import strategy"),
        ("schedules", "from lightning_hybridop import Plan"),
        ("reporting", "from torch import Tensor"),
        ("reporting", "from lightning_hybridop.devices import library"),
        ("estimation", "import torch.distributed as dist"),
        ("estimation", "from torch import distributed"),
        ("estimation", "import torch\ntorch.distributed.barrier()"),
        ("estimation", "from lightning_hybridop.pipeline.engine import Engine"),
        ("pipeline", "from lightning.pytorch import Trainer"),
        ("pipeline", "from lightning_hybridop.strategy import HybridOPStrategy"),
        ("pipeline", "from lightning_hybridop.reporting.gantt import draw_timeline"),
        ("sampling", "import lightning.pytorch as L"),
        ("accelerators", "from lightning_hybridop.strategy import HybridOPStrategy"),
        ("strategy", "from lightning_hybridop.reporting import run_summary"),
        ("callbacks", "import lightning_hybridop.cli"),
        ("commands", "import lightning_hybridop.recipes.fit"),
        ("modules", "from lightning_hybridop.data.agnews import AGNews"),
    ],
)
def test_a_wrong_import_is_found(room: str, source: str) -> None:
    assert len(violations(room, source)) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("pipeline", "import torch.distributed as dist"),
        ("estimation", "import torch"),
        ("schedules", "from lightning_hybridop.planning.plan import Plan"),
        ("planning", "import lightning_hybridop.planning.plan"),
        ("strategy", "from lightning_hybridop.accelerators import default_role\nimport lightning"),
        ("callbacks", "from lightning_hybridop.reporting.gantt import draw_timeline"),
        ("cli", "from lightning_hybridop import Plan"),
        ("recipes", "from lightning_hybridop.commands.parts import run_plan"),
    ],
)
def test_a_right_import_is_let_through(room: str, source: str) -> None:
    assert violations(room, source) == []
