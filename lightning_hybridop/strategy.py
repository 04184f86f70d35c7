"""HybridOPStrategy: Lightning's hooks over the pipeline."""

import atexit
import math
import os
import signal
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybridop.accelerators import HybridOPAccelerator, default_role
from lightning_hybridop.accelerators.npu import load_npu
from lightning_hybridop.auto_plan import place_by_measuring
from lightning_hybridop.estimation.estimators import DEFAULT_EPSILON, RESOLUTION, Difference, Directions
from lightning_hybridop.module import HybridOPMixin
from lightning_hybridop.pipeline.anatomy import Anatomy, CutError, read_anatomy
from lightning_hybridop.pipeline.batches import (
    fingerprint,
    join_rows,
    label_count,
    row_count,
    shares,
    split_rows,
    token_shape,
)
from lightning_hybridop.pipeline.emulation import Emulation, Pace, PacedChannel
from lightning_hybridop.pipeline.engine import Engine, Steps
from lightning_hybridop.pipeline.exchange import (
    broadcast_json,
    check_same_batch,
    clock_offset,
    gather_numbers,
)
from lightning_hybridop.pipeline.gradients import clip_to_norm, scaled_learning_rates, square_of_norm
from lightning_hybridop.pipeline.learning import EstimatorSettings, MiniBatchResult, train_mini_batch
from lightning_hybridop.pipeline.measured import MiniBatchTimes
from lightning_hybridop.pipeline.ownership import (
    block_dtype,
    frozen_dtype,
    merge_optimizer_state,
    owned_parameters,
    synchronise,
)
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.pipeline.stand_ins import StandIn
from lightning_hybridop.pipeline.transport import Channel
from lightning_hybridop.placement import check_given_plan, place_evenly
from lightning_hybridop.planning.plan import Plan, Role, Stage, load_plan, save_plan
from lightning_hybridop.replay import LogRecorder, log_silenced, replay, share_metrics
from lightning_hybridop.sampling import seed_samplers
from lightning_hybridop.schedules.forward_only import forward_only
from lightning_hybridop.schedules.timeline import TimedAction, Timeline

AUTO = "auto"
"""The plan that the processes make themselves."""


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class HybridOPStrategy(ParallelStrategy):
    """Fine-tunes one model over devices that back-propagate and devices that can only run forward.

    Args:
        plan: a `Plan` or the path of a plan's YAML file. Without one, the blocks are spread evenly over the
            processes, and the options below fill in the rest. With `"auto"` every process measures itself, and the
            blocks are laid out by speed and memory; the plan is saved as `plan.yaml` in the Trainer's root folder.
        stages: number of stages of the even plan; default: the number of processes that the Trainer has.
        zo_stages: how many of them, from the head, are `zo`; default: those whose device cannot back-propagate.
        micro_batches: M, the number of row-slices of a mini-batch; None lets `plan="auto"` choose.
        queries: Q, perturbed forwards per micro-batch.
        exit_queries: Q', early-exit forwards per micro-batch.
        schedule: `"hybridop"`, `"gpipe"` or `"1f1b"`.
        difference: `"forward"` or `"central"` difference quotient.
        exit_baseline: what exit losses are compared with: the unperturbed `"exit"` loss, or the `"full"` model's.
        epsilon: size of the perturbation; default: by the zo stages' dtype.
        directions: `"microbatch"` draws Q directions for each micro-batch, `"minibatch"` Q for all of them.
        zo_lr_scale: factor on the learning rate of zo stages.
        seed: of directions, dropout and samplers; default: that of `seed_everything`, else 0.
        timeout: seconds after which a silent neighbour ends the run.
        blocks: name of the model's list of transformer blocks, if it is not its longest `nn.ModuleList`.
        mini_batch: rows, and tokens of each, that `plan="auto"` plans for.
        emulation: times that the stages of a given plan keep to, in the place of other devices.

    Raises:
        PlanError: the plan or an option is not valid.
        ValueError: `epsilon` or `timeout` is not positive.
    """

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        *,
        stages: int | None = None,
        zo_stages: int | None = None,
        micro_batches: int | None = 4,
        queries: int = 1,
        exit_queries: int = 0,
        schedule: str = "hybridop",
        difference: Difference = "forward",
        exit_baseline: str = "exit",
        epsilon: float | None = None,
        directions: Directions = "microbatch",
        zo_lr_scale: float = 1.0,
        seed: int | None = None,
        timeout: float = 60.0,
        blocks: str | None = None,
        mini_batch: tuple[int, int] = (8, 128),
        emulation: Emulation | None = None,
        **parallel_arguments: Any,
    ) -> None:
        super().__init__(**parallel_arguments)
        for name, value in (("epsilon", epsilon), ("timeout", timeout), ("zo_lr_scale", zo_lr_scale)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, expected a number above 0.")
        if directions not in ("microbatch", "minibatch"):
            raise ValueError(f"directions is {directions!r}, expected 'microbatch' or 'minibatch'.")
        self._plans_itself = plan == AUTO
        if isinstance(plan, (str, Path)):
            plan = None if self._plans_itself else load_plan(plan)
        self._given_plan = plan
        self._stages = stages
        self._zo_stages = zo_stages
        self._plan_options: dict[str, Any] = {
            "micro_batches": micro_batches,
            "queries": queries,
            "exit_queries": exit_queries,
            "schedule": schedule,
            "difference": difference,
            "exit_baseline": exit_baseline,
        }
        # Checked here, so that a bad option is refused before any process is started or any model loaded.
        checked = {**self._plan_options}
        if self._plans_itself and micro_batches is None:
            del checked["micro_batches"]
        Plan(blocks=1, stages=(Stage(first=0, last=1, role="zo"),), **checked)
        pair = isinstance(mini_batch, (tuple, list)) and len(mini_batch) == 2
        if not pair or not all(isinstance(number, int) and number > 0 for number in mini_batch):
            raise ValueError(f"mini_batch is {mini_batch}, expected a number of rows and a number of tokens.")
        self._mini_batch = mini_batch
        self._epsilon = epsilon
        self._directions: Directions = directions
        self._zo_lr_scale = zo_lr_scale
        self._seed = seed
        self._timeout = timedelta(seconds=timeout)
        self._blocks = blocks
        self._emulation = emulation
        self._num_nodes = 1
        self._inside_step = False
        self._plan: Plan | None = None
        self._engine: Engine | None = None
        self._zo_dtypes: list[str] = []
        self._owned: tuple[dict[str, torch.nn.Parameter], ...] = ()
        self._rank_of_stage: list[int] = []
        self._result: MiniBatchResult | None = None
        self._stash: Mapping[str, Tensor] = {}
        self._times = MiniBatchTimes()

    # Who and where: ranks, stages, devices.

    @property
    def plan(self) -> Plan:
        """The plan that runs; known after the Trainer's setup."""
        if self._plan is None and not self.pipelined and self._given_plan is not None:
            return self._given_plan
        if self._plan is None:
            raise RuntimeError(
                "The plan is made in the Trainer's setup; read it from a hook such as on_fit_start."
            )
        return self._plan

    @property
    def stage_index(self) -> int:
        """This rank's stage."""
        return self._rank_of_stage.index(self.global_rank) if self._rank_of_stage else 0

    @property
    def role(self) -> Role:
        """The role of this rank's stage."""
        return self.plan.stages[self.stage_index].role

    @property
    def pipelined(self) -> bool:
        """False for a single bp stage, which trains as plain Lightning does."""
        return self.world_size > 1 or self._only_stage_is_zo

    @property
    def _only_stage_is_zo(self) -> bool:
        if self._given_plan is not None:
            return self._given_plan.stages[0].role == "zo"
        return bool(self._zo_stages)

    @property
    @override
    def root_device(self) -> torch.device:
        """The device of Lightning's own collectives: one that Gloo can broadcast from."""
        return torch.device("cpu") if self.pipelined else self.compute_device

    @property
    def compute_device(self) -> torch.device:
        """The device that this rank's stage computes on."""
        if self._given_plan is not None and self.global_rank < len(self._given_plan.stages):
            name = self._given_plan.stages[self.global_rank].device
            if name.startswith("npu"):
                load_npu()  # torch does not know the device type before
            return torch.device(name)
        if isinstance(self.accelerator, HybridOPAccelerator):
            return self.accelerator.compute_device(self.local_rank)
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of this host's processes: one per stage that the plan puts here."""
        stages = len(self._given_plan.stages) if self._given_plan is not None else self._stages
        if stages is not None:
            return max(1, stages // self._num_nodes)
        return len(self.parallel_devices or [None])

    @property
    def is_distributed(self) -> bool:
        """False: every rank reads every batch, so Lightning must not shard the samplers."""
        return False

    @property
    def seed(self) -> int:
        """The seed of directions, dropout masks and samplers."""
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self._seed is None else self._seed

    def set_world_ranks(self) -> None:
        """Tell the environment and both of Lightning's rank-zero guards which rank this is."""
        assert self.cluster_environment is not None
        if isinstance(self.cluster_environment, LightningEnvironment):
            # Only this environment has to be told; the others know their ranks from whoever started them.
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for guard in (rank_zero_only, fabric_rank_zero_only):
            guard.rank = self.global_rank  # type: ignore[attr-defined]  # an attribute of the decorator function

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if isinstance(self.cluster_environment, LightningEnvironment) and self.num_processes > 1:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        """End the processes that this one started, which would otherwise wait for it until their timeout."""
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            # Not SIGTERM: Lightning defers that one to the end of a batch, which such a process never reaches.
            self._launcher.kill(signal.SIGKILL)
            for process in self._launcher.procs:
                process.wait()

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None and self.cluster_environment is not None
        self.set_world_ranks()
        self.accelerator.setup_device(self.compute_device)
        if not self.pipelined:
            return
        # Before the interpreter takes itself apart: Gloo's threads end the process with an abort if they outlive it.
        atexit.register(_leave_process_group)
        try:
            _init_dist_connection(self.cluster_environment, "gloo", timeout=self._timeout)
        except RuntimeError as error:
            if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
                raise RuntimeError(
                    f"Port {self.cluster_environment.main_port} on {self.cluster_environment.main_address} is in use; "
                    "set MASTER_PORT to a free port, or leave it unset."
                ) from error
            raise

    # Setup: plan, cut, engine.

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        if not self.pipelined:
            super().setup(trainer)
            return
        self._refuse_what_cannot_work(trainer, self.lightning_module)
        # Lightning advises to average logged values over ranks; here every rank replays the same ones.
        warnings.filterwarnings("ignore", message=r".*sync_dist=True\)` when logging on epoch level")
        self.accelerator.setup(trainer)
        if isinstance(self.precision_plugin, MixedPrecision):
            # Lightning derives the device of autocast from the accelerator's name and does not know ours.
            self.precision_plugin.device = self.compute_device.type
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        if self._engine is None or self._engine.model.module is not self.lightning_module:
            self._cut(self.lightning_module)
        share_metrics(
            self.lightning_module,
            owner=self._is_last_stage,
            inside_step=lambda: self._inside_step,
            broadcast=partial(self.broadcast, src=self._rank_of_stage[-1]),
        )
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self._times = MiniBatchTimes()
            self._save_own_plan()
            if not self._owned or not any(self._owned):
                raise ValueError(
                    "The model has no trainable parameter; add a LoRA adapter or unfreeze something."
                )
            with self.whole_model():
                # Every rank's optimizer lists all trainable parameters in the order of the unsplit model and steps
                # those that have a gradient: its own. That keeps checkpoints independent of the split.
                self._setup_one_optimizer(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip_by_role_norm  # type: ignore[method-assign]

    def _cut(self, module: LightningModule) -> None:
        if any(isinstance(child, StandIn) for child in module.modules()):
            raise CutError(
                "This module has been cut by another HybridOPStrategy; build a new module for a new Trainer."
            )
        anatomy = read_anatomy(module, blocks_name=self._blocks)
        plan = self._place(anatomy)
        stage = plan.stages[self.stage_index]
        self._plan = plan
        self._owned = owned_parameters(module, anatomy, tuple(stage.last for stage in plan.stages))
        if plan.exit_queries and plan.exit_stage != len(plan.stages) - 1:
            trained_behind = [name for name in self._owned[-1] if anatomy.is_behind(name)]
            if trained_behind:
                raise CutError(
                    f"exit_queries is {plan.exit_queries}, but {trained_behind[0]} behind the blocks is trained on the "
                    "last stage, so an early exit would use a stale copy; freeze it or set exit_queries=0."
                )
        if stage.dtype is not None:
            frozen_dtype(module, getattr(torch, stage.dtype))
        model = StageModel(
            module,
            anatomy,
            first=stage.first,
            last=stage.last,
            keep_behind=plan.exit_queries > 0 and self.stage_index == plan.exit_stage,
        )
        own_dtype = block_dtype(module.get_submodule(f"{anatomy.blocks_name}.{stage.first}"))
        dtypes: list[torch.dtype] = self._gather_in_stage_order(own_dtype)
        self._zo_dtypes = [str(dtypes[index]).removeprefix("torch.") for index in plan.zo_stages]
        parameters = self._owned[self.stage_index]
        names = {name for name, _ in self._hooks.zo_parameters()} if self._hooks else set(parameters)
        neighbours = [
            index for index in (self.stage_index - 1, self.stage_index + 1) if 0 <= index < len(plan.stages)
        ]
        self._engine = Engine(
            model=model,
            plan=plan,
            stage=self.stage_index,
            parameters=parameters,
            zo_parameters={k: p for k, p in parameters.items() if k in names} if stage.role == "zo" else {},
            channels={index: self._channel(index) for index in neighbours},
            width=anatomy.width,
            boundary_dtypes=dtypes,
            device=self.compute_device,
            clock_offset=clock_offset(),
            pace=None if self._emulation is None else Pace(self._emulation, self.stage_index),
        )

    def _channel(self, neighbour: int) -> Channel | PacedChannel:
        rank = self._rank_of_stage[neighbour]
        channel = Channel(
            peer=rank,
            description=f"Stage {self.stage_index} waited: stage {neighbour} (rank {rank})",
            timeout=self._timeout,
        )
        if self._emulation is None:
            return channel
        link = self._emulation.links[min(neighbour, self.stage_index)]
        return PacedChannel(channel, link, self._emulation.time_scale)

    def _place(self, anatomy: Anatomy) -> Plan:
        """Return the plan, having decided which rank is which stage."""
        self._rank_of_stage = list(range(self.world_size))
        if self._given_plan is not None:
            check_given_plan(self._given_plan, anatomy, ranks=self.world_size)
            return self._given_plan
        if self._plans_itself and self.world_size > 1:
            return self._place_by_measuring(anatomy)
        devices: list[str] = self._gather_in_stage_order(str(self.compute_device))
        plan, self._rank_of_stage = place_evenly(
            anatomy, devices=devices, zo_stages=self._zo_stages, options=self._plan_options
        )
        return plan

    def _place_by_measuring(self, anatomy: Anatomy) -> Plan:
        assert self.lightning_module is not None
        forward_only = default_role(str(self.compute_device)) == "zo"
        if self._zo_stages is not None:
            forward_only = self.global_rank < self._zo_stages
        plan, self._rank_of_stage = place_by_measuring(
            self.lightning_module,
            anatomy,
            device=self.compute_device,
            forward_only=forward_only,
            local_rank=self.local_rank,
            # torchrun says how many there are; a launcher of Lightning starts those of the plan.
            processes_here=int(os.environ.get("LOCAL_WORLD_SIZE", self.num_processes)),
            mini_batch=self._mini_batch,
            options=self._plan_options,
        )
        return plan

    def _gather_in_stage_order(self, value: Any) -> list[Any]:
        gathered: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(gathered, value)
        return [gathered[rank] for rank in self._rank_of_stage]

    def _refuse_what_cannot_work(self, trainer: Trainer, module: LightningModule) -> None:
        if (
            isinstance(self.precision_plugin, MixedPrecision)
            and self.precision_plugin.precision == "16-mixed"
        ):
            raise ValueError(
                "precision='16-mixed' needs a loss scaler, which a pipeline with estimated gradients cannot share; "
                "pass precision='bf16-mixed' or '32-true'."
            )
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            raise ValueError(
                "The module optimizes manually (automatic_optimization=False), but a pipelined step installs its own "
                "gradients; use automatic optimization, or a single stage."
            )
        compiled = [name for name, child in module.named_modules() if hasattr(child, "_orig_mod")]
        if compiled:
            raise ValueError(
                f"{compiled[0] or type(module).__name__} is compiled, and a compiled model cannot be cut into stages; "
                "pass the module without torch.compile."
            )

    def _setup_one_optimizer(self, trainer: Trainer) -> None:
        try:
            self.setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            # Lightning advises manual optimization here, which a pipeline refuses as well.
            raise ValueError(
                "configure_optimizers returned several optimizers, but a pipeline steps one; use one optimizer with "
                "parameter groups."
            ) from error
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise ValueError(
                "LBFGS evaluates the loss several times per step, which a pipeline cannot; use Adam or SGD."
            )

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.compute_device)

    @property
    def _is_last_stage(self) -> bool:
        return self.stage_index == len(self.plan.stages) - 1

    # The training step: run and stash, then install.

    @override
    def training_step(self, batch: Any, batch_idx: int, *arguments: Any) -> STEP_OUTPUT:
        if not self.pipelined:
            return super().training_step(batch, batch_idx, *arguments)
        module, engine = self._module_and_engine()
        trainer = module.trainer
        micro_batches, weights, token_shapes = self._sliced(batch)
        recorder = LogRecorder()

        def step(micro_batch: int, loss: Callable[..., Any], logging: AbstractContextManager[None]) -> Any:
            rows = self._on_device(micro_batches[micro_batch])
            with logging, self.precision_plugin.train_step_context():
                return loss(rows, batch_idx, *arguments)

        def base(micro_batch: int) -> Any:
            logging = recorder.recording(
                module, weight=weights[micro_batch], rows=row_count(micro_batches[micro_batch])
            )
            return step(micro_batch, module.training_step, logging)

        exit_loss = self._hooks.early_exit_loss if self._hooks else module.training_step
        with self._in_step():
            self._result = train_mini_batch(
                engine,
                weights=weights,
                token_shapes=token_shapes,
                steps=Steps(
                    base=base,
                    perturbed=lambda m: step(m, module.training_step, log_silenced(module)),
                    early_exit=lambda m: step(m, exit_loss, log_silenced(module)),
                ),
                settings=self._estimator_settings(),
                step=trainer.fit_loop.total_batch_idx,
                rank_of_stage=self._rank_of_stage,
                report=lambda: recorder.entries(module),
            )
        self._stash = self._result.gradients
        self._times.add(self._result.timeline)
        replay(module, self._result.report, owns_metrics=self._is_last_stage)
        return torch.tensor(self._result.loss, device=self.root_device)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if not self.pipelined:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module, engine = self._module_and_engine()
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        share = 1.0 / module.trainer.accumulate_grad_batches
        for name, gradient in self._stash.items():
            parameter = engine.parameters[name]
            installed = gradient * share
            parameter.grad = installed if parameter.grad is None else parameter.grad + installed
        self._stash = {}
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if not self.pipelined:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        with scaled_learning_rates(optimizer, self._learning_rate_scale()):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _learning_rate_scale(self) -> float:
        chosen = self._hooks.learning_rate_scale(self.role) if self._hooks else None
        if chosen is not None:
            return chosen
        return self._zo_lr_scale if self.role == "zo" else 1.0

    def _clip_by_role_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the global norm over all stages of this rank's role: estimates are far longer than gradients."""
        chosen = self._hooks.gradient_clip_val(self.role) if self._hooks else None
        limit = float(clip_val if chosen is None else chosen)
        gradients = [p.grad for p in self.precision_plugin.main_params(optimizer) if p.grad is not None]
        squares = gather_numbers([square_of_norm(gradients)], self._rank_of_stage)
        same_role = [
            square
            for (square,), stage in zip(squares, self.plan.stages, strict=True)
            if stage.role == self.role
        ]
        clip_to_norm(gradients, limit=limit, norm=math.fsum(same_role) ** 0.5)

    def _estimator_settings(self) -> EstimatorSettings:
        dtypes = self._zo_dtypes or ["float32"]
        return EstimatorSettings(
            seed=self.seed,
            epsilon=self._epsilon or max(DEFAULT_EPSILON[dtype] for dtype in dtypes),
            directions=self._directions,
            resolution=max(RESOLUTION[dtype] for dtype in dtypes),
        )

    # Validation, test and prediction: forward-only pipelines.

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if not self.pipelined:
            return super().validation_step(*args, **kwargs)
        self._evaluate("validation_step", self.precision_plugin.val_step_context, *args)
        return None

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if not self.pipelined:
            return super().test_step(*args, **kwargs)
        self._evaluate("test_step", self.precision_plugin.test_step_context, *args)
        return None

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.pipelined:
            return super().predict_step(*args, **kwargs)
        outputs = self._evaluate("predict_step", self.precision_plugin.predict_step_context, *args)
        return self.broadcast(
            join_rows(outputs) if self._is_last_stage else None, src=self._rank_of_stage[-1]
        )

    def _evaluate(
        self, hook: str, context: Callable[[], AbstractContextManager[None]], batch: Any, *arguments: Any
    ) -> list[Any]:
        """Run one of the module's evaluation steps micro-batch by micro-batch; only the last stage has outputs."""
        module, engine = self._module_and_engine()
        micro_batches, weights, token_shapes = self._sliced(batch)
        recorder = LogRecorder()

        def step(micro_batch: int) -> Any:
            rows = self._on_device(micro_batches[micro_batch])
            logging = recorder.recording(module, weight=weights[micro_batch], rows=row_count(rows))
            with logging, context():
                return getattr(module, hook)(rows, *arguments)

        with self._in_step():
            actions = forward_only(replace(self.plan, micro_batches=len(micro_batches)))[self.stage_index]
            outputs = engine.evaluate(actions, step=step, token_shapes=token_shapes)
        entries = broadcast_json(recorder.entries(module), source=self._rank_of_stage[-1])
        replay(module, entries, owns_metrics=self._is_last_stage)
        return outputs

    # What both share.

    @property
    def _hooks(self) -> HybridOPMixin | None:
        """The module's own decisions, if it makes any."""
        module: object = self.lightning_module
        return module if isinstance(module, HybridOPMixin) else None

    def _module_and_engine(self) -> tuple[LightningModule, Engine]:
        assert self.lightning_module is not None and self._engine is not None
        return self.lightning_module, self._engine

    def _sliced(self, batch: Any) -> tuple[list[Any], list[float], list[tuple[int, int]]]:
        """Return the micro-batches of a batch that all ranks agree on, their weights and token shapes."""
        if self.world_size > 1:
            stages = [self._rank_of_stage.index(rank) for rank in range(self.world_size)]
            check_same_batch(fingerprint(batch), stages_of_ranks=stages)
        micro_batches = split_rows(batch, self.plan.micro_batches)
        weights = shares([self._micro_batch_weight(rows) for rows in micro_batches])
        return micro_batches, weights, [token_shape(rows) for rows in micro_batches]

    def _micro_batch_weight(self, rows: Any) -> float:
        chosen = self._hooks.micro_batch_weight(rows) if self._hooks else None
        return label_count(rows, shifted=self._loss_is_shifted) if chosen is None else chosen

    @property
    def _loss_is_shifted(self) -> bool:
        """Whether labels stand one position behind their prediction, as in Hugging Face's causal language models."""
        assert self.lightning_module is not None
        kinds = {getattr(child, "loss_type", "") for child in self.lightning_module.modules()} - {""}
        return bool(kinds & {None, "ForCausalLM"})

    def _on_device(self, rows: Any) -> Any:
        assert self.lightning_module is not None
        if self.compute_device == self.root_device:
            return rows
        return self.lightning_module.transfer_batch_to_device(rows, self.compute_device, 0)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        self._inside_step = True
        try:
            yield
        finally:
            self._inside_step = False

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.pipelined:
            seed_samplers(dataloader, self.seed)
        return dataloader

    # What a run measured.

    @property
    def last_result(self) -> MiniBatchResult | None:
        """The latest training mini-batch: loss, gradients, directional derivatives, this stage's timeline."""
        return self._result

    def gather_timeline(self) -> Timeline:
        """Return all stages' actions of the latest training mini-batch, in seconds on rank 0's clock. Collective."""
        if self._result is None:
            return ()
        times = [number for timed in self._result.timeline for number in (timed.start, timed.end)]
        gathered = gather_numbers(times, self._rank_of_stage)
        return tuple(
            TimedAction(
                stage=stage, action=action, start=gathered[stage][2 * i], end=gathered[stage][2 * i + 1]
            )
            for stage, actions in enumerate(self._result.actions)
            for i, action in enumerate(actions)
        )

    # Checkpoints: one ordinary file with global names, whatever the split.

    @contextmanager
    def whole_model(self) -> Generator[None]:
        """Inside the block the module has all its blocks again; frozen weights of other stages lie on `meta`."""
        if self._engine is None:
            yield
            return
        with self._engine.model.whole():
            yield

    def trainable_state_dict(self) -> dict[str, Tensor]:
        """Return all stages' trainable parameters under the unsplit model's names, on every rank. Collective."""
        if self._engine is None:
            assert self.lightning_module is not None
            named = self.lightning_module.named_parameters()
            return {name: parameter.detach() for name, parameter in named if parameter.requires_grad}
        if self.world_size > 1:
            synchronise(self._owned, self._rank_of_stage)
        return {name: parameter.detach() for owned in self._owned for name, parameter in owned.items()}

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.trainable_state_dict() if self.pipelined else super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if self.world_size == 1:
            return state
        return merge_optimizer_state(state, optimizer, self._owned, self._rank_of_stage)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        if self.world_size == 1:
            return super().load_checkpoint(checkpoint_path, weights_only)
        # Edge hosts share no disk: rank 0 reads the file for all.
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only) if self.is_global_zero else None
        loaded: dict[str, Any] = self.broadcast(checkpoint)
        return loaded

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        state = checkpoint["state_dict"]
        if not self.pipelined:
            # A pipeline's checkpoint holds what was trained; the frozen rest is loaded already.
            frozen = {name for name, p in self.lightning_module.named_parameters() if not p.requires_grad}
            names = self.lightning_module.state_dict().keys()
            complete = state.keys() <= names and names - state.keys() <= frozen
            super().load_model_state_dict(checkpoint, strict and not complete)
            return
        with self.whole_model():
            trainable = {n: p for n, p in self.lightning_module.named_parameters() if p.requires_grad}
            missing = sorted(trainable.keys() - state.keys())
            if missing and strict:
                raise KeyError(
                    f"The checkpoint lacks {len(missing)} trainable parameters, the first being {missing[0]}; it was "
                    "made with another adapter configuration."
                )
            with torch.no_grad():
                for name in trainable.keys() & state.keys():
                    trainable[name].copy_(state[name])

    @override
    def on_train_end(self) -> None:
        if self.pipelined:
            self.trainable_state_dict()
            self._plan = replace(self.plan, measured=self._times.gather(self._rank_of_stage))
            self._save_own_plan()

    def _save_own_plan(self) -> None:
        """Write the plan that `plan="auto"` made where the Trainer writes everything, on rank 0."""
        assert self.lightning_module is not None
        if self._plans_itself and self.is_global_zero:
            folder = Path(self.lightning_module.trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            save_plan(self.plan, folder / "plan.yaml")

    @override
    def teardown(self) -> None:
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        super().teardown()

    # Collectives over the world.

    @override
    def barrier(self, name: str | None = None) -> None:
        if self.world_size > 1 and dist.is_initialized():
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.world_size == 1 or not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks stacked along a new first dimension."""
        if self.world_size == 1:
            return super().all_gather(tensor, group, sync_grads)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor.contiguous(), group=group)
        return torch.stack(gathered)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the tensor itself: inside one pipeline every rank already has the same value."""
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.world_size == 1:
            return decision
        votes = torch.tensor([int(decision)])
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)
