"""The engine on a pipeline of one stage, which needs no process group; more stages are tested in tests/distributed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import derive_seed
from lightning_hybridop.estimation.estimators import estimate
from lightning_hybridop.pipeline.anatomy import read_anatomy
from lightning_hybridop.pipeline.engine import Engine
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.pipeline.work import Perturbation, StageOutcome, StepError, Steps, loss_of
from lightning_hybridop.planning.plan import Plan, Role, Stage
from lightning_hybridop.schedules import build_schedule
from tests.tiny import VOCABULARY, tiny_llama

# peft 0.21 asks a transformers 5.24 model by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

MICRO_BATCHES = 2
# Both micro-batches have the same rows, so that what differs between them is dropout.
TOKENS_BT = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


@dataclass(slots=True)
class Run:
    """One stage that holds a whole model, and which micro-batches each of its steps saw."""

    model: nn.Module
    role: Role = "zo"
    options: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, list[int]] = field(default_factory=lambda: {"base": [], "perturbed": [], "exit": []})

    def engine(self) -> Engine:
        """Return an engine over the whole model."""
        anatomy = read_anatomy(self.model)
        plan = Plan(
            blocks=anatomy.blocks,
            stages=(Stage(first=0, last=anatomy.blocks, role=self.role),),
            micro_batches=MICRO_BATCHES,
            **self.options,
        )
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return Engine(
            model=StageModel(self.model, anatomy, first=0, last=anatomy.blocks),
            plan=plan,
            stage=0,
            parameters=parameters,
            zo_parameters=parameters if self.role == "zo" else {},
            channels={},
            width=anatomy.width,
            boundary_dtypes=[torch.float32],
            device=torch.device("cpu"),
            clock_offset=0.0,
        )

    def train(
        self, *, epsilon: float = 1e-3, step: int = 0, seed: int = 0, weights: Sequence[float] = (0.25, 0.75)
    ) -> StageOutcome:
        """Run one mini-batch."""
        engine = self.engine()
        return engine.train(
            build_schedule(engine.plan)[0],
            steps=Steps(
                base=self._step("base"),
                perturbed=lambda m, _: self._step("perturbed")(m),
                early_exit=self._step("exit"),
            ),
            token_shapes=[(2, 7)] * MICRO_BATCHES,
            weights=weights,
            perturbation=Perturbation(seed=seed, step=step, epsilon=epsilon, directions="microbatch"),
        )

    def _step(self, kind: str) -> Any:
        def run(micro_batch: int) -> Tensor:
            self.seen[kind].append(micro_batch)
            loss: Tensor = self.model(input_ids=TOKENS_BT, labels=TOKENS_BT).loss
            return loss

        return run


def dropping_llama() -> nn.Module:
    return tiny_llama(blocks=3, dropout=0.5).train()


def test_perturbed_and_exit_forwards_use_the_base_forwards_dropout() -> None:
    options = {"queries": 3, "exit_queries": 2}
    outcome = Run(dropping_llama(), options=options).train(epsilon=0.0)

    result = estimate(
        weights=[0.25, 0.75],
        base=outcome.base,
        perturbed=outcome.perturbed,
        exit_base=outcome.early_exit,
        exit_perturbed=outcome.early_exit,
        **options,
        epsilon=1e-3,  # what the losses would be divided by
        directions="microbatch",
        difference="forward",
        seed=0,
        step=0,
    )
    assert [g for _, g in result.derivatives] == [0.0] * (5 * MICRO_BATCHES)
    assert result.dropped == 0


def test_dropout_differs_between_micro_batches_steps_and_seeds() -> None:
    losses = set()
    for step, seed in ((0, 0), (1, 0), (0, 1)):
        losses.update(Run(dropping_llama()).train(step=step, seed=seed).base.values())

    assert len(losses) == 3 * MICRO_BATCHES
    assert set(Run(dropping_llama()).train().base.values()) < losses


def test_perturbation_changes_the_loss() -> None:
    outcome = Run(dropping_llama(), options={"queries": 2}).train(epsilon=1e-2)

    for (micro_batch, _, _), loss in outcome.perturbed.items():
        assert loss != outcome.base[micro_batch, None, 1]
    assert len(set(outcome.perturbed.values())) == 2 * MICRO_BATCHES


def test_mini_batch_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()

    Run(dropping_llama()).train()

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("difference", ["forward", "central"])
def test_every_use_of_the_step_is_counted_by_the_schedule(difference: str) -> None:
    run = Run(tiny_llama(blocks=2), options={"queries": 2, "exit_queries": 1, "difference": difference})

    outcome = run.train()

    signs = 2 if difference == "central" else 1
    baselines = 0 if difference == "central" else 1
    assert sorted(run.seen["base"]) == [0, 1]
    assert sorted(run.seen["perturbed"]) == sorted([0, 1] * 2 * signs)
    assert sorted(run.seen["exit"]) == sorted([0, 1] * (signs + baselines))
    assert len(outcome.perturbed) == 2 * 2 * signs
    assert len(outcome.early_exit) == 2 * (signs + baselines)
    assert len(outcome.timeline) == sum(map(len, run.seen.values()))
    assert all(timed.start <= timed.end for timed in outcome.timeline)


def test_zo_stage_builds_no_graph_and_makes_no_gradient() -> None:
    run = Run(tiny_llama(blocks=2))

    outcome = run.train()

    assert outcome.gradients == {}
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_gradients_of_a_bp_stage_are_the_weighted_losses() -> None:
    reference = tiny_llama(blocks=3)
    reference(input_ids=TOKENS_BT, labels=TOKENS_BT).loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    run = Run(tiny_llama(blocks=3), role="bp", options={"queries": 0})
    earlier = torch.ones(())
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            parameter.grad = earlier.expand_as(parameter).clone()

    outcome = run.train(weights=(0.25, 0.5))

    assert outcome.gradients.keys() == expected.keys()
    for name, gradient in outcome.gradients.items():
        torch.testing.assert_close(gradient, 0.75 * expected[name], atol=1e-7, rtol=1e-5)
    # What the parameters had accumulated before is back in its place.
    assert all(p.grad is None or (p.grad == 1).all() for p in run.model.parameters())
    assert sum(p.grad is not None for p in run.model.parameters()) == len(expected)


def test_micro_batch_of_weight_0_has_no_part_in_the_gradient() -> None:
    run = Run(tiny_llama(blocks=2), role="bp", options={"queries": 0})
    one = run.train(weights=(1.0, 0.0))
    reference = tiny_llama(blocks=2)
    reference(input_ids=TOKENS_BT, labels=TOKENS_BT).loss.backward()

    for name, gradient in one.gradients.items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, atol=1e-7, rtol=1e-5)


def test_gradients_are_put_back_when_a_step_fails() -> None:
    run = Run(tiny_llama(blocks=2), role="bp", options={"queries": 0})
    run.model.forward = lambda **_: pytest.fail("as a user's step may")
    parameter = next(p for p in run.model.parameters() if p.requires_grad)
    earlier = parameter.grad = torch.ones_like(parameter)

    with pytest.raises(pytest.fail.Exception):
        run.train()

    assert parameter.grad is earlier


def test_masks_are_a_function_of_seed_step_micro_batch_and_stage() -> None:
    run = Run(dropping_llama())
    outcome = run.train(step=4, seed=5)

    for micro_batch in range(MICRO_BATCHES):
        torch.manual_seed(derive_seed("dropout", 5, 4, micro_batch, 0))
        with torch.no_grad():
            loss = run.model(input_ids=TOKENS_BT, labels=TOKENS_BT).loss
        assert outcome.base[micro_batch, None, 1] == float(loss)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_loss_is_a_tensor_of_one_element_or_in_a_dict(shape: tuple[int, ...]) -> None:
    loss = torch.full(shape, 2.5)

    assert loss_of(loss).shape == ()
    assert loss_of({"loss": loss, "logits": None}) == 2.5


@pytest.mark.parametrize(
    "returned", [None, 1.0, {}, {"loss": None}, torch.zeros(2), (torch.zeros(()),)], ids=repr
)
def test_step_that_returns_no_loss_is_refused(returned: Any) -> None:
    with pytest.raises(
        StepError, match=f"training_step returned {type(returned).__name__}, expected a loss tensor"
    ):
        loss_of(returned)
