import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_hybridop.mirror import AttributeWatch, apply_changes, attributes_kept


class Collects(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.per_loader: list[list[Any]] = [[], []]
        self.by_name: dict[str, list[Any]] = defaultdict(list)
        self.counts: list[Any] = [0, 0, torch.zeros(2)]
        self.seen = 0
        self.total: Any = 0.0
        self.best = {"loss": 9.0, "old": 1.0}
        self.names: set[str] = set()
        self.layer = torch.nn.Linear(1, 1)


def append(module: Any) -> None:
    module.outputs.append(torch.tensor(1.0))
    module.outputs.append({"loss": 2.0})


def append_inside(module: Any) -> None:
    module.per_loader[1].append("b")
    module.by_name["x"].append(1)


def count(module: Any) -> None:
    module.seen += 3
    module.total += torch.tensor(0.5)


def change_dict(module: Any) -> None:
    module.best["loss"] = 1.0
    module.best["new"] = (1, 2)
    del module.best["old"]


def replace(module: Any) -> None:
    module.outputs = ["fresh"]
    module.names.add("a")
    module.last = torch.arange(3)


def clear(module: Any) -> None:
    module.outputs.clear()
    module.per_loader[0].clear()


def count_in_lists(module: Any) -> None:
    module.counts[1] += 1
    module.counts[2] = torch.ones(2)


def move_window(module: Any) -> None:
    module.outputs.append("new")
    module.outputs.pop(0)


def refill(module: Any) -> None:
    module.outputs.clear()
    module.outputs += ["other", "things", "altogether"]


STEPS = [
    append,
    append_inside,
    count,
    change_dict,
    replace,
    clear,
    append,
    count,
    count_in_lists,
    move_window,
    refill,
]


def state(module: LightningModule) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if not name.startswith("_")}


@pytest.mark.parametrize("inference", [False, True])
def test_another_rank_ends_up_with_the_same_attributes_step_by_step(inference: bool) -> None:
    own, other = Collects(), Collects()
    for step in STEPS:
        watch = AttributeWatch(own)
        with torch.inference_mode(inference):
            step(own)
            changes = watch.changes()

        if "outputs" in changes:
            # What the other rank's step did before it was unwound, once per micro-batch, is overruled.
            other.outputs.append("extra")
        apply_changes(other, pickle.loads(pickle.dumps(changes)))
        assert repr(state(other)) == repr(state(own))


@pytest.mark.parametrize("step", STEPS)
def test_only_what_changed_travels(step: Callable[[Any], None]) -> None:
    module = Collects()
    module.outputs = list(range(1000))
    watch = AttributeWatch(module)
    assert watch.changes() == {}

    step(module)

    assert set(watch.changes()) <= {
        "outputs",
        "counts",
        "per_loader",
        "by_name",
        "seen",
        "total",
        "best",
        "names",
        "last",
    }
    if step is append:
        assert len(pickle.dumps(watch.changes())) < 1000
    assert set(AttributeWatch(module).changes()) == set()


def test_a_tensor_changed_in_place_travels() -> None:
    module = Collects()
    for inference in (False, True):
        with torch.inference_mode(inference):
            module.total = torch.zeros(2)
            watch = AttributeWatch(module)
            assert watch.changes() == {}
            module.total += 1.0
            assert watch.changes()["total"][1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("step", STEPS)
def test_what_a_pass_does_to_attributes_can_be_undone(step: Callable[[Any], None]) -> None:
    module = Collects()
    append(module)
    append_inside(module)
    module.total = torch.zeros(2)
    before, outputs = repr(state(module)), module.outputs

    with attributes_kept(module):
        step(module)
        module.total += 1.0
        module.new = 3

    assert repr(state(module)) == before
    assert module.outputs is outputs


def test_private_attributes_and_unknown_objects_are_left_out() -> None:
    module = Collects()
    module._hidden = 0
    watch = AttributeWatch(module)

    module._hidden = 1
    module.anything = object()
    module.training = False

    assert watch.changes() == {}
