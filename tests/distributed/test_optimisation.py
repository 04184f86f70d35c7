"""Whatever optimizes in one process optimizes a pipeline alike: optimizers, accumulation, clipping, hooks, averages."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn, optim

from lightning_hybridop import HybridOPMixin
from lightning_hybridop.planning.plan import Role
from tests.distributed.alone import Outcome, assert_close, learn, learn_together
from tests.distributed.runs import Job, block_of
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]

Make = Callable[[Iterable[Any]], optim.Optimizer]
BLOCKS = 2
MIXED = {"zo_stages": 1, "micro_batches": 2, "queries": 2, "seed": 5}
BACKWARD = {"micro_batches": 2}
TRAIN = partial(loader, 12, batch_size=4)


class Optimized(TinyModule):
    """Two blocks whose optimizer is made by `make` from all parameters, the frozen ones included."""

    def __init__(self, make: Make) -> None:
        super().__init__(blocks=BLOCKS)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


SGD = partial(optim.SGD, lr=0.3)


# Every optimizer of torch that steps once per gradient.

OPTIMIZERS: dict[str, Make] = {
    "SGD": SGD,
    "SGD with momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": partial(optim.Adam, lr=1e-2, weight_decay=0.01),
    "Adam, foreach": partial(optim.Adam, lr=1e-2, amsgrad=True, foreach=True),
    "Adam, fused": partial(optim.Adam, lr=1e-2, fused=True),
    "AdamW": partial(optim.AdamW, lr=1e-2, weight_decay=0.5),
    "AdamW, one at a time": partial(optim.AdamW, lr=1e-2, weight_decay=0.5, foreach=False),
    "AdamW, its rate a tensor": partial(optim.AdamW, lr=torch.tensor(1e-2), weight_decay=0.5),
    "RAdam": partial(optim.RAdam, lr=0.1),
    "NAdam": partial(optim.NAdam, lr=1e-2),
    "Adamax": partial(optim.Adamax, lr=1e-2),
    "Adagrad": partial(optim.Adagrad, lr=1e-2, lr_decay=0.1),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "RMSprop": partial(optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "Rprop": partial(optim.Rprop, lr=1e-2),
    "ASGD": partial(optim.ASGD, lr=0.1, t0=1),
    "Adafactor": partial(optim.Adafactor, lr=1e-2),
}


class OnlyAdapters(Optimized):
    """An optimizer that takes nothing but matrices is given the trainable parameters."""

    def configure_optimizers(self) -> Any:
        return self.make([p for p in self.parameters() if p.requires_grad])


# In float64, where a step that divides a gradient by its own size magnifies no rounding.
EXACT = {"precision": "64-true"}


def _optimizer_jobs(strategy: dict[str, Any]) -> list[Job]:
    jobs = [
        Job(strategy=strategy, module=partial(Optimized, make), train=TRAIN, trainer=EXACT)
        for make in OPTIMIZERS.values()
    ]
    muon = partial(optim.Muon, lr=1e-2)
    return [*jobs, Job(strategy=strategy, module=partial(OnlyAdapters, muon), train=TRAIN, trainer=EXACT)]


def test_every_optimizer_moves_a_pipeline_as_it_moves_one_process() -> None:
    backward, mixed = _optimizer_jobs(BACKWARD), _optimizer_jobs(MIXED)
    outcomes = learn_together([*backward, *mixed], 2)

    before = {name: p.detach() for name, p in TinyModule(blocks=BLOCKS).double().named_parameters()}
    for name, job, found in zip([*OPTIMIZERS, "Muon"], backward, outcomes, strict=False):
        expected = learn(job, alone=True)
        assert len(expected.gradients) == 3
        for outcome in found:
            assert outcome.losses == pytest.approx(expected.losses, abs=1e-6), name
            assert_close(outcome.parameters, expected.parameters, 1e-6)
        for parameter, value in expected.parameters.items():
            assert float((value - before[parameter]).abs().max()) > 1e-5, (name, parameter)

    # Behind a zo stage the gradients are other ones, and every optimizer does with them what it does alone.
    for name, job, found in zip([*OPTIMIZERS, "Muon"], mixed, outcomes[len(backward) :], strict=True):
        assert_close(found[0].parameters, _stepped_by_hand(job.module(), found[0]), 1e-9)
        for parameter, value in found[0].parameters.items():
            assert value.isfinite().all(), (name, parameter)
            assert not value.equal(before[parameter]), (name, parameter)
        assert_close(found[1].parameters, found[0].parameters, 0.0)

    # No optimizer moves what it has no gradient for, by weight decay or momentum, on any rank.
    for pipeline in outcomes:
        assert all(outcome.others for outcome in pipeline)
        for outcome in pipeline:
            assert_close(outcome.others, {name: before[name] for name in outcome.others}, 0.0)


def _stepped_by_hand(module: Any, outcome: Outcome) -> dict[str, Tensor]:
    """Return the parameters after an optimizer of torch's own stepped with the gradients of a run."""
    module.double()
    optimizer = module.configure_optimizers()
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for gradients in outcome.gradients:
        assert gradients.keys() == trainable.keys()
        for name, parameter in trainable.items():
            parameter.grad = gradients[name].clone()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in trainable.items()}


# Groups of parameters.


class Decayed(TinyModule):
    """Adapters decay fast, norms do not, and have a rate of their own."""

    def __init__(self) -> None:
        super().__init__(blocks=BLOCKS)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("norm" in name or "lora" in name)

    def configure_optimizers(self) -> optim.Optimizer:
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        matrices = [p for _, p in trained if p.ndim > 1]
        vectors = [p for _, p in trained if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 2.0}, {"params": vectors, "lr": 1e-3}]
        return optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


# Accumulation.


def _accumulating(**trainer: Any) -> Job:
    """Return a job of five mini-batches per epoch, so that a window of two or three is cut short."""
    return Job(
        strategy=BACKWARD,
        module=partial(Optimized, SGD),
        train=partial(loader, 20, batch_size=4),
        trainer={"max_epochs": 2, **trainer},
    )


ACCUMULATIONS = {
    "windows of two": _accumulating(accumulate_grad_batches=2),
    "windows of three": _accumulating(accumulate_grad_batches=3),
    "a window longer than the epoch": _accumulating(accumulate_grad_batches=7),
}


def _windows_that_change() -> list[Callback]:
    return [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]


SCHEDULED = Job(
    strategy=BACKWARD,
    module=partial(Optimized, SGD),
    train=partial(loader, 20, batch_size=4),
    trainer={"max_epochs": 3},
    callbacks=_windows_that_change,
)


# Clipping.


class ClipsItself(Optimized):
    """The user's own clipping, through torch and over all the parameters of the module."""

    def configure_gradient_clipping(
        self,
        optimizer: optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.02)


class ClipsLater(Optimized):
    """The user's own clipping, through Lightning, from the second step on."""

    def configure_gradient_clipping(
        self,
        optimizer: optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if self.global_step > 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")


def _clipped(module: Any = Optimized, **trainer: Any) -> Job:
    return Job(strategy=BACKWARD, module=partial(module, SGD), train=TRAIN, trainer=trainer)


CLIPPINGS = {
    "by norm": _clipped(gradient_clip_val=0.02),
    "by value": _clipped(gradient_clip_val=1e-3, gradient_clip_algorithm="value"),
    "by the user, in torch": _clipped(ClipsItself),
    "by the user, in Lightning": _clipped(ClipsLater),
    "of windows": _clipped(gradient_clip_val=0.02, accumulate_grad_batches=2),
}


# Hooks.


class Hooked(Optimized):
    """Overrides what a module may override between two batches, and notes what it sees."""

    def __init__(self, make: Make = SGD) -> None:
        super().__init__(make)
        self.notes: list[Any] = []

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx == 1:
            optimizer_closure()  # a batch that is looked at and not learned from
        else:
            optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.3 / (2 + self.global_step)

    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.notes.append(float(norms["grad_2.0_norm_total"]))
        if self.global_step == 1:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 0.5
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

    def on_after_backward(self) -> None:
        self.notes.append(float(grad_norm(self, norm_type="inf")["grad_inf_norm_total"]))

    def on_before_zero_grad(self, optimizer: optim.Optimizer) -> None:
        self.notes.append("zeroed")


class NeverNone(Optimized):
    """Zeroes gradients in place, as torch did once."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


ADAMW = partial(optim.AdamW, lr=1e-2, weight_decay=0.5)
HOOKS = {
    "hooks": Job(strategy=BACKWARD, module=Hooked, train=partial(loader, 16, batch_size=4)),
    "gradients that are zeroed in place": Job(
        strategy=BACKWARD,
        module=partial(NeverNone, partial(optim.SGD, lr=0.3, momentum=0.5, weight_decay=0.5)),
        train=TRAIN,
    ),
    "groups": Job(strategy=BACKWARD, module=Decayed, train=TRAIN),
}
CASES = {**ACCUMULATIONS, "windows that change": SCHEDULED, **CLIPPINGS, **HOOKS}


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Outcome, list[Outcome]]]:
    """Every case, in one process and on the two stages of a pipeline."""
    together = learn_together(list(CASES.values()), 2)
    return {
        name: (learn(job, alone=True), found)
        for (name, job), found in zip(CASES.items(), together, strict=True)
    }


def _untouched(job: Job) -> Outcome:
    return learn(Job(strategy={}, module=partial(Optimized, SGD), train=job.train), alone=True)


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_steps_as_one_process_does(
    case: str, pairs: dict[str, tuple[Outcome, list[Outcome]]]
) -> None:
    expected, found = pairs[case]

    for outcome in found:
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-6)
        assert len(outcome.gradients) == len(expected.gradients)
        for mine, gradients in zip(outcome.gradients, expected.gradients, strict=True):
            assert_close(mine, gradients, 1e-6)
        assert_close(outcome.parameters, expected.parameters, 1e-6)
        assert outcome.groups == expected.groups
        assert outcome.metrics == pytest.approx(expected.metrics, abs=1e-6)
        assert outcome.notes == (None if expected.notes is None else _approximately(expected.notes))


def _approximately(notes: list[Any]) -> list[Any]:
    return [note if isinstance(note, str) else pytest.approx(note, abs=1e-6) for note in notes]


def test_the_cases_above_show_something(pairs: dict[str, tuple[Outcome, list[Outcome]]]) -> None:
    steps = {name: len(expected.gradients) for name, (expected, _) in pairs.items()}
    assert [steps[name] for name in ACCUMULATIONS] == [6, 4, 2]
    assert steps["windows that change"] == 5 + 2 + 3

    plain = _untouched(CLIPPINGS["by norm"])
    for name in CLIPPINGS:
        expected, _ = pairs[name]
        moved = [float((expected.parameters[n] - value).abs().max()) for n, value in plain.parameters.items()]
        assert max(moved) > 1e-4, name
    hooked, (first, _) = pairs["hooks"]
    assert hooked.notes.count("zeroed") == 4
    assert {"grad_2.0_norm_total"} < first.metrics.keys()
    assert any("layers.1" in name for name in first.metrics)  # rank 0 knows the norms of the last stage


# Clipping of estimates, which are far longer than gradients.


class ClipsByRole(HybridOPMixin, Optimized):
    def gradient_clip_val(self, role: Role) -> float | None:
        return {"zo": 0.5, "bp": 0.01}.get(role)


class ClipsEstimates(HybridOPMixin, Optimized):
    def gradient_clip_val(self, role: Role) -> float | None:
        return 0.5 if role == "zo" else None


def _by_role(module: Any, **trainer: Any) -> Job:
    make = partial(optim.SGD, lr=1.0)
    train = partial(loader, 4, batch_size=4)
    return Job(strategy=MIXED, module=partial(module, make), train=train, trainer=trainer)


BY_VALUE = {"gradient_clip_algorithm": "value"}
BY_ROLE: dict[str, tuple[Job, dict[str, float | None]]] = {
    "norms of the module alone": (_by_role(ClipsByRole), {"zo": 0.5, "bp": 0.01}),
    "norms of the module and the Trainer": (
        _by_role(ClipsEstimates, gradient_clip_val=0.02),
        {"zo": 0.5, "bp": 0.02},
    ),
    "the norm of the module for one role": (_by_role(ClipsEstimates), {"zo": 0.5, "bp": None}),
    "values of the module": (_by_role(ClipsByRole, **BY_VALUE), {"zo": 0.5, "bp": 0.01}),
    "a value of the Trainer": (
        _by_role(Optimized, gradient_clip_val=1e-3, **BY_VALUE),
        {"zo": 1e-3, "bp": 1e-3},
    ),
    "a value of the module for one role": (_by_role(ClipsEstimates, **BY_VALUE), {"zo": 0.5, "bp": None}),
}


def test_each_role_is_clipped_by_the_limit_that_its_module_or_trainer_gives() -> None:
    jobs = [job for job, _ in BY_ROLE.values()]
    before = {n: p.detach() for n, p in Optimized(SGD).named_parameters() if p.requires_grad}
    for (name, (job, limits)), (run, other) in zip(BY_ROLE.items(), learn_together(jobs, 2), strict=True):
        assert_close(other.parameters, run.parameters, 0.0)
        for role, limit in limits.items():
            gradients = {n: g for n, g in run.gradients[0].items() if (block_of(n) == 0) == (role == "zo")}
            norm = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
            for parameter, gradient in gradients.items():
                if limit is None:
                    step = gradient
                elif "gradient_clip_algorithm" in job.trainer:
                    step = gradient.clamp(-limit, limit)
                else:
                    assert norm > limit, name
                    step = gradient * limit / (norm + 1e-6)
                found = before[parameter] - run.parameters[parameter]
                torch.testing.assert_close(found, step, atol=1e-6, rtol=1e-5, msg=f"{name}: {parameter}")
        if "gradient_clip_algorithm" in job.trainer and limits["bp"] is not None:
            largest = max(float(g.abs().max()) for g in run.gradients[0].values())
            assert largest > limits["bp"]
