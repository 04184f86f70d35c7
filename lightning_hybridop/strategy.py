"""HybridOPStrategy: Lightning's hooks over the pipeline."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.types import _PATH, _Stateful
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.memory import recursive_detach
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybridop.accelerators import HybridOPAccelerator, default_role
from lightning_hybridop.accelerators.npu import load_npu
from lightning_hybridop.assembly import Assembly, assemble, gather_in_order, stage_model
from lightning_hybridop.auto_plan import place_by_measuring
from lightning_hybridop.averaging import complete_averages, cut_averages
from lightning_hybridop.checkpoints import (
    WholeCheckpointIO,
    check_whole,
    code_refused,
    with_plain_hyper_parameters,
)
from lightning_hybridop.configurations import configuration_facts
from lightning_hybridop.devices.host import is_forward_only
from lightning_hybridop.estimation.directions import Distribution
from lightning_hybridop.estimation.estimators import (
    DEFAULT_EPSILON,
    RESOLUTION,
    Difference,
    Directions,
    running_mean,
)
from lightning_hybridop.estimation.scalar_log import StepSettings
from lightning_hybridop.loaders import (
    EvenLoader,
    ResumedLoader,
    batches_of_epoch,
    check_same_length,
    length_of,
    shared_loader,
)
from lightning_hybridop.mirror import AttributeWatch, apply_changes, attributes_kept
from lightning_hybridop.module import HybridOPMixin
from lightning_hybridop.pipeline import world
from lightning_hybridop.pipeline.agreement import check_facts, check_values, model_facts
from lightning_hybridop.pipeline.anatomy import Anatomy, CutError, read_anatomy
from lightning_hybridop.pipeline.batches import (
    fingerprint,
    join_outputs,
    label_count,
    loss_is_shifted,
    repeat_rows,
    row_count,
    shares,
    split_rows,
    token_shape,
)
from lightning_hybridop.pipeline.emulation import Emulation
from lightning_hybridop.pipeline.estimates import EstimatorSettings
from lightning_hybridop.pipeline.exchange import (
    broadcast_json,
    broadcast_nested,
    broadcast_object,
    check_same_batch,
    gather_json,
    gather_numbers,
)
from lightning_hybridop.pipeline.grouping import copies_that_fit
from lightning_hybridop.pipeline.interface import host_name
from lightning_hybridop.pipeline.learning import MiniBatchResult, train_mini_batch
from lightning_hybridop.pipeline.measured import MiniBatchTimes
from lightning_hybridop.pipeline.ownership import (
    check_updated_once,
    forget_absent_parameters,
    frozen_adapters,
    merge_optimizer_state,
    parameters_kept,
    synchronise,
)
from lightning_hybridop.pipeline.packing import can_be_packed
from lightning_hybridop.pipeline.raw_bytes import as_bytes
from lightning_hybridop.pipeline.replicas import Replicas, joined_on_first, renumbered, share_of, side_by_side
from lightning_hybridop.pipeline.stand_ins import StandIn
from lightning_hybridop.pipeline.weights import lacks_values, materialise
from lightning_hybridop.pipeline.work import Steps
from lightning_hybridop.placement import (
    check_given_plan,
    check_process_count,
    place_evenly,
    ranks_on_hosts,
)
from lightning_hybridop.planning.plan import Estimator, Plan, Role, WireName, even_plan, load_plan, save_plan
from lightning_hybridop.refusals import (
    refuse_adapters_across_stages,
    refuse_averages_on_runtimes,
    refuse_backward_on_npus,
    refuse_bfloat16_on_npus,
    refuse_compiled_modules,
    refuse_contradictions,
    refuse_lone_pipelines,
    refuse_manual_optimization,
    refuse_row_directions,
    refuse_saved_copies_of_tied_weights,
    refuse_scaled_losses,
)
from lightning_hybridop.replay import (
    LogRecorder,
    compute_together,
    merged_reports,
    outputs_are_read,
    replay,
    share_metrics,
)
from lightning_hybridop.sampling import seed_samplers
from lightning_hybridop.schedules.actions import Action
from lightning_hybridop.schedules.forward_only import forward_only
from lightning_hybridop.schedules.timeline import TimedAction, Timeline
from lightning_hybridop.summary import held_by_stage, held_table, show_whole_model
from lightning_hybridop.updates import Updates
from lightning_hybridop.writers import restore_writers, silence_writers

AUTO = "auto"
"""The plan that the processes make themselves."""


RUNNING_EXIT_LOSS = "hybridop_running_exit_loss"
"""Where a checkpoint keeps what exit losses are compared with."""


SECONDS_TO_END = 8.0
"""How long a failed script waits for the processes that it started to end by themselves."""


@contextmanager
def _without_trace(module: LightningModule, recorder: LogRecorder) -> Iterator[None]:
    """Inside the block a step logs and counts nothing, and leaves nothing in the module's attributes."""
    with recorder.silenced(), attributes_kept(module):
        yield


def _batches_processed(progress: Any) -> int:
    """Return how many batches a counter of Lightning's has seen through."""
    return int(progress.processed)


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
        estimator: how zo stages learn. `"loss"`, the paper's: from the loss of perturbed forwards through the whole
            pipeline. `"boundary"`: perturbed forwards end at the last zo stage, which takes inner products with the
            gradient that the first bp stage sends back. `"adjoint"`: no perturbation; the exact gradient, by
            back-propagation in inference operators where a stage's executor has it.
        difference: `"forward"` or `"central"` difference quotient, or `"antithetic"` pairs of queries.
        exit_baseline: what exit losses are compared with: the unperturbed `"exit"` loss, the `"full"` model's, or the
            `"running"` mean of exit losses, which costs no forward.
        wire: how hidden states travel from stage to stage: `"bfloat16"`, `"float16"` or `"int8"`; None: in the dtype that
            they have. Gradients then come back in bfloat16.
        replicas: how many pipelines of `stages` stages run side by side, each with M micro-batches of a mini-batch.
        epsilon: size of the perturbation; default: by the zo stages' dtype.
        directions: `"microbatch"` draws Q directions for each micro-batch, `"minibatch"` Q for all of them, `"row"` Q
            for each row (boundary estimator, LoRA).
        distribution: of a direction's elements, `"normal"` or `"rademacher"` (1 or -1).
        shrinkage: scale estimates down to where they are nearest to the gradient in mean square.
        queries_per_forward: how many queries of a micro-batch may ride in one forward (boundary estimator, LoRA).
        perturbation_memory: MiB that one such forward may take; fewer queries ride where they would take more.
        zo_lr_scale: factor on the learning rate of zo stages.
        seed: of directions, dropout and samplers; default: that of `seed_everything`, else 0.
        timeout: seconds that a message of another stage may take before the run ends.
        heartbeat: seconds without a sign of life after which a process counts as lost and the run ends.
        interface: the network interface that connects this host with the others; default: the one on the route to them.
        blocks: name of the model's list of transformer blocks, if it is not its longest `nn.ModuleList`.
        device: what this process computes on, where no plan says so; default: by the Trainer's accelerator.
        mini_batch: rows, and tokens of each, that `plan="auto"` plans for.
        emulation: times that the stages of a given plan keep to, in the place of other devices.
        data: `"same"` lets every process read the data and checks that all read the same; with `"broadcast"` rank 0
            reads and the others receive its batches.
        checkpoint_copies: let every host keep the checkpoints that rank 0 writes, so that a run can go on without that host.

    Raises:
        PlanError: the plan or an option is not valid.
        ValueError: `epsilon`, `timeout` or `heartbeat` is not positive.
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
        estimator: Estimator = "loss",
        difference: Difference = "forward",
        exit_baseline: str = "exit",
        wire: WireName | None = None,
        replicas: int = 1,
        epsilon: float | None = None,
        directions: Directions = "microbatch",
        distribution: Distribution = "normal",
        shrinkage: bool = False,
        queries_per_forward: int = 1,
        perturbation_memory: float = 512.0,
        zo_lr_scale: float = 1.0,
        seed: int | None = None,
        timeout: float = 60.0,
        heartbeat: float = 15.0,
        interface: str | None = None,
        blocks: str | None = None,
        device: str | None = None,
        mini_batch: tuple[int, int] = (8, 128),
        emulation: Emulation | None = None,
        data: Literal["same", "broadcast"] = "same",
        checkpoint_copies: bool = False,
        **parallel_arguments: Any,
    ) -> None:
        super().__init__(**parallel_arguments)
        for name, value in (
            ("epsilon", epsilon),
            ("timeout", timeout),
            ("heartbeat", heartbeat),
            ("zo_lr_scale", zo_lr_scale),
            ("perturbation_memory", perturbation_memory),
        ):
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, expected a number above 0.")
        for name, choice, choices in (
            ("directions", directions, get_args(Directions)),
            ("distribution", distribution, get_args(Distribution)),
            ("data", data, ("same", "broadcast")),
            ("shrinkage", shrinkage, (True, False)),
            ("checkpoint_copies", checkpoint_copies, (True, False)),
        ):
            if choice not in choices:
                expected = " or ".join([", ".join(map(repr, choices[:-1])), repr(choices[-1])])
                raise ValueError(f"{name} is {choice!r}, expected {expected}.")
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
            "estimator": estimator,
            "queries_per_forward": queries_per_forward,
            "difference": difference,
            "exit_baseline": exit_baseline,
            "wire": wire,
            "replicas": replicas,
        }
        # Checked here, so that a bad option is refused before any process is started or any model loaded.
        checked = {**self._plan_options}
        if self._plans_itself and micro_batches is None:
            del checked["micro_batches"]
        if plan is not None:
            refuse_contradictions(plan, self._plan_options)
        checked_plan = even_plan(blocks=2, stages=2, zo_stages=1, **checked)
        refuse_row_directions(checked_plan if plan is None else plan, directions)
        refuse_lone_pipelines(
            checked_plan if plan is None else plan,
            measures_itself=self._plans_itself,
            emulated=emulation is not None,
        )
        pair = isinstance(mini_batch, (tuple, list)) and len(mini_batch) == 2
        if not pair or not all(isinstance(number, int) and number > 0 for number in mini_batch):
            raise ValueError(f"mini_batch is {mini_batch}, expected a number of rows and a number of tokens.")
        self._mini_batch = mini_batch
        self._epsilon = epsilon
        self._directions: Directions = directions
        self._directions_in_use: Directions = directions
        self._distribution: Distribution = distribution
        self._shrinkage = shrinkage
        self._perturbation_memory = perturbation_memory
        self._running_exit_loss: float | None = None
        self._zo_lr_scale = zo_lr_scale
        self._seed = seed
        self._timeout = timedelta(seconds=timeout)
        self._heartbeat = heartbeat
        self._interface = interface
        self._blocks = blocks
        self._device = device
        self._emulation = emulation
        self._data = data
        self._checkpoint_copies = checkpoint_copies
        self._root_of_rank_0: str | None = None
        self._num_nodes = 1
        self._inside_step = False
        self._world: world.World | None = None
        self._has_met_again = False
        self._plan: Plan | None = None
        self._assembly: Assembly | None = None
        self._rank_of_stage: list[int] = []
        self._replicas = Replicas(ranks=((0,),))
        self._updates: Updates | None = None
        self._result: MiniBatchResult | None = None
        self._times = MiniBatchTimes()
        self.sent_mib: tuple[float, ...] = ()
        """The MiB that each stage sends to its neighbours in a mini-batch; known at the end of training."""

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
        if self._zo_stages is not None:
            return self._zo_stages > 0
        return default_role(str(self.compute_device)) == "zo"

    @property
    @override
    def root_device(self) -> torch.device:
        """The device of Lightning's own collectives: one that Gloo can broadcast from."""
        return torch.device("cpu") if self.pipelined else self.compute_device

    @property
    def compute_device(self) -> torch.device:
        """The device that this rank's stage computes on."""
        name = self._device
        if self._given_plan is not None:
            name = self._given_plan.stages[self.stage_index].device
        if name is not None:
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
        if isinstance(self.cluster_environment, TorchElasticEnvironment) and "LOCAL_WORLD_SIZE" in os.environ:
            return int(os.environ["LOCAL_WORLD_SIZE"])  # may be another number on each host
        if stages is not None:
            return max(1, stages * self._replica_count // self._num_nodes)
        return len(self.parallel_devices or [None])

    @property
    def _replica_count(self) -> int:
        """How many pipelines run side by side."""
        given = self._given_plan
        return int(self._plan_options["replicas"]) if given is None else given.replicas

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
    def setup_environment(self) -> None:
        assert self.accelerator is not None and self.cluster_environment is not None
        self.set_world_ranks()
        self._running_exit_loss = None  # a checkpoint may have one
        if not self.pipelined:
            self.accelerator.setup_device(self.compute_device)
            return
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        self._world = world.enter(
            rank=self.global_rank,
            size=self.world_size,
            timeout=self._timeout,
            patience=self._heartbeat,
            interface=self._interface,
        )
        self._has_met_again = False
        world.speak_once(self.global_rank, host_name(), speaks_for_host=self.local_rank == 0)
        if self.world_size > 1:
            check_facts(self._configuration_facts(), "configuration")
        self._find_stage()
        self.accelerator.setup_device(self.compute_device)

    # Failures: one process tells the others, and all of them end.

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes, cut the connections that they wait on, and end those that this one started."""
        super().on_exception(exception)
        if not self.pipelined:
            return
        processes: list[subprocess.Popen[bytes]] = []
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            # Lightning's observer of these would end this process before its error has been printed.
            processes = list(self._launcher.procs)
            self._launcher.procs.clear()
        if self._world is not None:
            self.first_failure(exception)
            self._abandon_messages()
            world.part(exception)
            self._has_met_again = False
        world.end_processes(processes, patience=SECONDS_TO_END)

    def first_failure(self, exception: BaseException) -> world.Failure | None:
        """Return which process's failure led to this one's, having told the others of it; None in a run without peers."""
        if self._world is not None and world.first_failure(exception) is None:
            self._abandon_messages()
            self._world.tell(exception, stage=self._stage_in_words)
        return world.first_failure(exception)

    def _meet_after_failure(self) -> None:
        """In a run that has failed, connect all processes anew, so that callbacks can still save what all hold."""
        module, error = self._lightning_module, sys.exception()
        if self._world is None or error is None or self._has_met_again:
            return
        if module is None or module._trainer is None:
            return
        if module.trainer.state.status == TrainerStatus.INTERRUPTED:
            self._has_met_again = True
            self._abandon_messages()
            self._world.meet_after(error, stage=self._stage_in_words, step=module.trainer.global_step)

    def _abandon_messages(self) -> None:
        if self._assembly is not None:
            self._assembly.calls.abandon()
            for channel in self._assembly.engine.channels.values():
                channel.abandon()

    @property
    def _stage_in_words(self) -> str:
        if self._plan is None:
            return "A process"
        stage = self._plan.stages[self.stage_index]
        which = f" of replica {self._replicas.index}" if self._plan.replicas > 1 else ""
        return f"Stage {self.stage_index}{which} ({stage.role}, blocks {stage.first} to {stage.last - 1})"

    # Setup: plan, cut, engine.

    def _find_stage(self) -> None:
        """Decide which rank is which stage of a given plan: one on the stage's host. Collective."""
        if self._given_plan is None:
            return
        check_process_count(self._given_plan, ranks=self.world_size)
        stages = len(self._given_plan.stages)
        wanted = [stage.host for stage in self._given_plan.stages]
        ranks = ranks_on_hosts(wanted, self._hosts(), replicas=self._given_plan.replicas)
        replicas = tuple(tuple(ranks[i : i + stages]) for i in range(0, len(ranks), stages))
        own = next(index for index, those in enumerate(replicas) if self.global_rank in those)
        self._replicas = Replicas(ranks=replicas, index=own)
        self._rank_of_stage = self._replicas.own

    def _hosts(self) -> list[str]:
        """Return the names of all ranks' hosts. Collective."""
        return gather_json(host_name()) if self.world_size > 1 else [host_name()]

    def _configuration_facts(self) -> dict[str, str]:
        """Return what of the options must be the same on every rank."""
        module = self.lightning_module
        assert module is not None
        options: dict[str, Any] = {
            **self._plan_options,
            "stages": self._stages,
            "zo_stages": self._zo_stages,
            "plan": "auto" if self._plans_itself else None,
            "epsilon": self._epsilon,
            "directions": self._directions,
            "distribution": self._distribution,
            "shrinkage": self._shrinkage,
            "perturbation_memory": self._perturbation_memory,
            "zo_lr_scale": self._zo_lr_scale,
            "seed": self.seed,
            "blocks": self._blocks,
            "mini_batch": self._mini_batch,
            "emulation": self._emulation,
            "data": self._data,
        }
        return configuration_facts(plan=self._given_plan, options=options, module=module)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        if self._given_plan is not None:
            check_process_count(self._given_plan, ranks=self.world_size)
        if not self.pipelined:
            if is_forward_only(self.compute_device):  # what is not pipelined back-propagates
                stage = None if self._given_plan is None else self._given_plan.stages[0]
                refuse_backward_on_npus(stage, "loss", self.compute_device)
            materialise(self.lightning_module.parameters())
            super().setup(trainer)
            return
        self._refuse_what_cannot_work(trainer, self.lightning_module)
        # Lightning advises to average logged values over ranks; here every rank replays the same ones.
        warnings.filterwarnings("ignore", message=r".*sync_dist=True\)` when logging on epoch level")
        # It cannot know that `process_dataloader` makes every loader go on where it stopped.
        warnings.filterwarnings("ignore", message=r".*your dataloader is not resumable")
        self.accelerator.setup(trainer)
        if type(self.checkpoint_io) is TorchCheckpointIO:
            self.checkpoint_io = WholeCheckpointIO()
        if isinstance(self.precision_plugin, MixedPrecision):
            # Lightning derives the device of autocast from the accelerator's name and does not know ours.
            self.precision_plugin.device = self.compute_device.type
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        if self._checkpoint_copies and self.world_size > 1:
            self._root_of_rank_0 = broadcast_json(str(Path(trainer.default_root_dir).resolve()), source=0)
        if self._assembly is None or self._assembly.engine.model.module is not self.lightning_module:
            self._cut(self.lightning_module)
        share_metrics(
            self.lightning_module,
            owner=self._ends_steps,
            inside_step=lambda: self._inside_step,
            broadcast=self._from_last_stage,
        )
        compute_together(trainer)
        self.model_to_device()
        if not self.is_global_zero:
            silence_writers(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._times = MiniBatchTimes()
            self._save_own_plan()
            self._setup_fitting(trainer)
        self.setup_precision_plugin()

    def _cut(self, module: LightningModule) -> None:
        if any(isinstance(child, StandIn) for child in module.modules()):
            raise CutError(
                "This module has been cut by another HybridOPStrategy; build a new module for a new Trainer."
            )
        if self.world_size > 1:
            check_facts(model_facts(module), "model")
            check_values(module)
        anatomy = read_anatomy(module, blocks_name=self._blocks)
        self._plan = self._place(anatomy)
        if self._given_plan is None:
            # Placed were the stages of the first replica.
            self._replicas = side_by_side(
                self._rank_of_stage, replicas=self._replica_count, rank=self.global_rank
            )
            self._rank_of_stage = self._replicas.own
        self._refuse_what_the_device_lacks(module, anatomy)
        self._assembly = assemble(
            module,
            anatomy,
            plan=self._plan,
            replicas=self._replicas,
            device=self.compute_device,
            autocast=torch.bfloat16 if isinstance(self.precision_plugin, MixedPrecision) else None,
            perturbable=None if self._hooks is None else {name for name, _ in self._hooks.zo_parameters()},
            emulation=self._emulation,
            timeout=self._timeout,
            notice=rank_zero_warn,
        )
        self._plan = self._assembly.engine.plan
        assert self._world is not None
        self._world.introduce(self._stage_in_words)
        refusal = self._assembly.grouping.refusal
        self._directions_in_use = self._directions
        if self._directions == "row" and self._plan.estimator == "boundary" and refusal is not None:
            self._directions_in_use = "microbatch"
            rank_zero_warn(f"{refusal} Each micro-batch has its own directions instead.")

    def _refuse_what_the_device_lacks(self, module: LightningModule, anatomy: Anatomy) -> None:
        """Refuse what this rank's device cannot compute; before there is a plan, what it could not in any stage."""
        stage = None if self._plan is None else self._plan.stages[self.stage_index]
        blocks = module.get_submodule(anatomy.blocks_name)
        if stage is not None:
            assert self._plan is not None
            refuse_backward_on_npus(stage, self._plan.estimator, self.compute_device)
            blocks = nn.ModuleList(list(blocks.children())[stage.first : stage.last])
        refuse_bfloat16_on_npus(blocks, stage, device=self.compute_device, precision=self.precision_plugin)

    def _place(self, anatomy: Anatomy) -> Plan:
        """Return the plan, having decided which rank is which stage."""
        if self.world_size % self._replica_count:
            raise ValueError(
                f"{self.world_size} processes run, which do not make {self._replica_count} replicas of one pipeline; start "
                "as many for each."
            )
        if self._given_plan is not None:
            check_given_plan(self._given_plan, anatomy, ranks=self.world_size)
            return self._given_plan
        self._rank_of_stage = list(range(self.world_size // self._replica_count))
        if self._plans_itself and self.world_size > 1:
            return self._place_by_measuring(anatomy)
        devices: list[str] = gather_in_order(str(self.compute_device), self._rank_of_stage)
        plan, self._rank_of_stage = place_evenly(
            anatomy,
            devices=devices,
            hosts=self._hosts()[: len(devices)],
            zo_stages=self._zo_stages,
            options=self._plan_options,
        )
        return plan

    def _place_by_measuring(self, anatomy: Anatomy) -> Plan:
        assert self.lightning_module is not None
        self._refuse_what_the_device_lacks(self.lightning_module, anatomy)
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

    def _refuse_what_cannot_work(self, trainer: Trainer, module: LightningModule) -> None:
        refuse_scaled_losses(self.precision_plugin)
        refuse_manual_optimization(trainer, module)
        refuse_compiled_modules(module)
        refuse_adapters_across_stages(module)
        refuse_saved_copies_of_tied_weights(module)

    def _setup_fitting(self, trainer: Trainer) -> None:
        module, assembly = self._module_and_assembly()
        anatomy = assembly.engine.model.anatomy
        if not any(assembly.owned):
            raise ValueError(
                "The model has no trainable parameter; add a LoRA adapter or unfreeze something."
            )
        refuse_averages_on_runtimes(trainer, self.plan)
        cut_averages(
            trainer,
            cut=partial(stage_model, anatomy=anatomy, plan=self.plan, stage=self.stage_index),
            owned=assembly.owned,
            stage=self.stage_index,
            rank_of_stage=self._replicas.first,
        )
        with self.whole_model():
            check_updated_once(module, anatomy, tuple(stage.last for stage in self.plan.stages))
            # Every rank's optimizer lists all trainable parameters in the order of the unsplit model and steps
            # those that have a gradient: its own. That keeps checkpoints independent of the split.
            self._setup_one_optimizer(trainer)
        self._updates = Updates(
            trainer,
            assembly=assembly,
            rank_of_stage=self._replicas.first,
            hooks=self._hooks,
            zo_lr_scale=self._zo_lr_scale,
            whole_model=self.whole_model,
        )
        self._updates.attach()
        dtype = str(assembly.engine.boundary_dtypes[self.stage_index]).removeprefix("torch.")
        executor = self.plan.stages[self.stage_index].executor
        held = {
            **held_by_stage(module, assembly.engine.parameters),
            "device": str(self.compute_device)
            if executor == "torch"
            else f"{self.compute_device} ({executor})",
            "dtype": dtype,
        }
        table = held_table(self.plan, gather_in_order(held, self._replicas.first))
        show_whole_model(trainer, whole_model=self.whole_model, table=table)

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
        for optimizer in self.optimizers:
            forget_absent_parameters(optimizer)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        with parameters_kept() if self.compute_device.type == "npu" else nullcontext():
            self.model.to(self.compute_device)

    @property
    def _is_last_stage(self) -> bool:
        return self.stage_index == len(self.plan.stages) - 1

    @property
    def _ends_steps(self) -> bool:
        """Whether this is the rank that evaluation steps end on, and that tells the others: the first replica's last stage."""
        return self._is_last_stage and self._replicas.index == 0

    # The training step: run and stash, then install.

    @override
    def training_step(self, batch: Any, *arguments: Any) -> STEP_OUTPUT:
        if not self.pipelined:
            return super().training_step(batch, *arguments)
        module, assembly = self._module_and_assembly()
        assert self._updates is not None
        trainer = module.trainer
        micro_batches, weights, token_shapes = self._sliced(batch)
        recorder = LogRecorder(module)
        watch = AttributeWatch(module)
        extras: dict[int, Any] = {}

        def report() -> dict[str, Any]:
            has_extras = any(extras.values()) and outputs_are_read(module, "on_train_batch_end")
            recorded = recorder.report() if self.plan.replicas == 1 else recorder.report_of_share()
            return {**recorded, "extras": has_extras, "more": has_extras or bool(watch.changes())}

        def step(
            micro_batch: int, loss: Callable[..., Any], logging: AbstractContextManager[None], copies: int = 1
        ) -> Any:
            rows = self._on_device(repeat_rows(micro_batches[micro_batch], copies))
            with logging, self.precision_plugin.train_step_context():
                return loss(rows, *arguments)

        def base(micro_batch: int) -> Any:
            logging = recorder.recording(
                weight=weights[micro_batch], rows=row_count(micro_batches[micro_batch])
            )
            output = step(micro_batch, module.training_step, logging)
            if isinstance(output, Mapping):
                extras[micro_batch] = recursive_detach({k: v for k, v in output.items() if k != "loss"})
            return output

        exit_loss = module.training_step if self._hooks is None else self._hooks.early_exit_loss
        with self._in_step(), assembly.calls.during_training():
            self._result = train_mini_batch(
                assembly.engine,
                weights=weights,
                token_shapes=token_shapes,
                steps=Steps(
                    base=base,
                    perturbed=lambda m, copies: step(
                        m, module.training_step, _without_trace(module, recorder), copies
                    ),
                    early_exit=lambda m: step(m, exit_loss, _without_trace(module, recorder)),
                ),
                settings=self._estimator_settings(),
                # Not `total_batch_idx`, which counts a batch that an exception has stopped a second time.
                step=_batches_processed(trainer.fit_loop.epoch_loop.batch_progress.total),
                replicas=self._replicas,
                report=report,
                queries_per_forward=self._queries_per_forward(token_shapes),
                running_exit_loss=self._running_exit_loss,
            )
        self._running_exit_loss = running_mean(self._running_exit_loss, self._result.exit_loss)
        self._updates.stash = self._result.gradients
        self._times.add(self._result.timeline, self._result.sent_bytes)
        reports = self._result.report
        merged = reports[0] if self.plan.replicas == 1 else merged_reports(reports)
        replay(module, merged, owns_metrics=self._ends_steps)
        loss = torch.tensor(self._result.loss, device=self.root_device)
        if not any(report["more"] for report in reports):
            return loss
        joined = None
        if any(report["extras"] for report in reports):
            told = [
                self._from_rank([list(extra) for extra in extras.items()], rank)
                for rank in self._replicas.last_stages
            ]
            together = {m: extra for own in told for m, extra in own}
            joined = join_outputs([together[m] for m in sorted(together)], weights)
        changes = self._from_last_stage(watch.changes() if self._ends_steps else None)
        if not self._ends_steps:
            apply_changes(module, changes)
        return loss if joined is None else {"loss": loss, **joined}

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if not self.pipelined:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self._updates is not None
        with self._updates.step():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _estimator_settings(self) -> EstimatorSettings:
        _, assembly = self._module_and_assembly()
        # Losses carry the rounding of all stages, hidden states at the boundary that of the zo stages alone. So with what
        # travels between them.
        stages = self.plan.zo_stages
        if stages and self.plan.estimator == "loss":
            stages = tuple(range(len(self.plan.stages)))
        estimating = [assembly.arithmetic[stage] for stage in stages]
        dtypes = [str(dtype).removeprefix("torch.") for dtype in estimating] or ["float32"]
        dtypes += [wire for stage in stages[:-1] if (wire := self.plan.stages[stage].wire) is not None]
        return EstimatorSettings(
            seed=self.seed,
            epsilon=self._epsilon or max(DEFAULT_EPSILON[dtype] for dtype in dtypes),
            directions=self._directions_in_use,
            distribution=self._distribution,
            dimensions=assembly.grouping.dimensions if self._shrinkage else None,
            resolution=max(RESOLUTION[dtype] for dtype in dtypes),
        )

    def _queries_per_forward(self, token_shapes: list[tuple[int, int]]) -> int:
        """Return how many queries ride in one forward of a mini-batch, the same on all ranks."""
        _, assembly = self._module_and_assembly()
        fitting = copies_that_fit(
            assembly.grouping,
            token_shapes,
            directions=self._directions_in_use,
            memory=self._perturbation_memory,
        )
        return min(self.plan.queries_per_forward, fitting)

    # Validation, test and prediction: forward-only pipelines.

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if not self.pipelined:
            return super().validation_step(*args, **kwargs)
        output: STEP_OUTPUT = self._evaluate("validation_step", self.precision_plugin.val_step_context, *args)
        return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if not self.pipelined:
            return super().test_step(*args, **kwargs)
        output: STEP_OUTPUT = self._evaluate("test_step", self.precision_plugin.test_step_context, *args)
        return output

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.pipelined:
            return super().predict_step(*args, **kwargs)
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, *args)

    def _evaluate(
        self, hook: str, context: Callable[[], AbstractContextManager[None]], batch: Any, *arguments: Any
    ) -> Any:
        """Run one of the module's evaluation steps; all ranks return its output, or None where nobody reads it."""
        module, assembly = self._module_and_assembly()
        calls = assembly.calls
        micro_batches, _, token_shapes = self._sliced(batch)
        recorder = LogRecorder(module)
        watch = AttributeWatch(module)

        def step(rows: Any, logging: AbstractContextManager[None]) -> Any:
            with logging, context():
                return getattr(module, hook)(self._on_device(rows), *arguments)

        def micro_batch_step(m: int) -> Any:
            with calls.during_micro_batch(token_shapes[m]):
                return step(micro_batches[m], _without_trace(module, recorder))

        def whole_step() -> Any:
            with calls.during_mini_batch():
                return step(batch, recorder.recording(weight=1.0, rows=row_count(batch)))

        with self._in_step():
            output = self._evaluate_share(
                len(micro_batches), step=micro_batch_step, whole_step=whole_step, token_shapes=token_shapes
            )
        batch_end = f"on_{hook.removesuffix('step')}batch_end"
        is_read = hook == "predict_step" or outputs_are_read(module, batch_end)
        told = (output if is_read else None, watch.changes()) if self._ends_steps else (None, {})
        report = {**recorder.report(), "more": told[0] is not None or bool(told[1])}
        with context():
            report = calls.serve_until_over(report if self._ends_steps else None)
        replay(module, report, owns_metrics=self._ends_steps)
        if not report["more"]:
            return None
        output, changes = self._from_last_stage(told)
        if not self._ends_steps:
            apply_changes(module, changes)
        return output

    def _evaluate_share(self, micro_batches: int, **steps: Any) -> Any:
        """Run this replica's share of a mini-batch; the first replica's last stage goes on with all of it."""
        _, assembly = self._module_and_assembly()
        replicas, count = self._replicas, self.plan.replicas
        share = share_of(micro_batches, replicas=count, index=replicas.index)
        if count > 1 and len(self.plan.stages) == 1 and not self._ends_steps:
            return None  # a stage without others runs the whole step
        actions: tuple[Action, ...] = ()
        if share:
            plan = replace(self.plan, micro_batches=len(share))
            actions = renumbered(forward_only(plan)[self.stage_index], share)
        if count > 1:
            steps["join"] = partial(joined_on_first, peers=replicas.last_stages)
        return assembly.engine.evaluate(actions, **steps)

    def _from_last_stage(self, value: Any) -> Any:
        """Return the last stage's `value` on every rank, its tensors on the device of Lightning's collectives."""
        return self._from_rank(value, self._replicas.first[-1])

    def _from_rank(self, value: Any, rank: int) -> Any:
        moved = move_data_to_device(value, self.root_device) if self.global_rank == rank else None
        if self.world_size == 1:
            return moved
        if broadcast_json(can_be_packed(moved), source=rank):
            return broadcast_nested(moved, source=rank)
        # Objects of the user's own, which all ranks know.
        return self.broadcast(moved, src=rank)

    # What both share.

    @property
    def _hooks(self) -> HybridOPMixin | None:
        """The module's own decisions, if it makes any."""
        module: object = self.lightning_module
        return module if isinstance(module, HybridOPMixin) else None

    def _module_and_assembly(self) -> tuple[LightningModule, Assembly]:
        assert self.lightning_module is not None and self._assembly is not None
        return self.lightning_module, self._assembly

    def _sliced(self, batch: Any) -> tuple[list[Any], list[float], list[tuple[int, int]]]:
        """Return the micro-batches of a batch that all ranks agree on, their weights and token shapes."""
        if self.world_size > 1:
            stages = [self._replicas.stage_of(rank) for rank in range(self.world_size)]
            check_same_batch(fingerprint(batch), stages_of_ranks=stages)
        micro_batches = split_rows(batch, self.plan.micro_batches * self.plan.replicas)
        weights = shares([self._micro_batch_weight(rows) for rows in micro_batches])
        return micro_batches, weights, [token_shape(rows) for rows in micro_batches]

    def _micro_batch_weight(self, rows: Any) -> float:
        chosen = self._hooks.micro_batch_weight(rows) if self._hooks else None
        if chosen is not None:
            return chosen
        assert self.lightning_module is not None
        return label_count(rows, shifted=loss_is_shifted(self.lightning_module))

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
    def process_dataloader(self, dataloader: Any) -> Any:
        if not self.pipelined:
            return dataloader
        seed_samplers(dataloader, self.seed)
        trained = self._batches_trained_this_epoch(length_of(dataloader))
        # One that keeps its own place is put back there by Lightning.
        if trained and not isinstance(dataloader, _Stateful):
            dataloader = ResumedLoader(dataloader, trained=trained)
        if self.world_size == 1:
            return dataloader
        if self._data == "broadcast":
            return shared_loader(dataloader, rank=self.global_rank)
        check_same_length(dataloader, stage_of_rank=self._replicas.stage_of)
        return EvenLoader(dataloader) if length_of(dataloader) is None else dataloader

    def _batches_trained_this_epoch(self, length: int | None) -> int:
        """Return how many batches of its epoch, of `length` if it has one, a run had trained on that is now resumed."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        epochs: Any = trainer.fit_loop.epoch_progress.current
        if trainer.state.stage != RunningStage.TRAINING or not trainer.fit_loop.restarting:
            return 0
        if epochs.ready == epochs.processed:
            return 0
        trained = _batches_processed(trainer.fit_loop.epoch_loop.batch_progress.current)
        # After the last batch of an epoch Lightning goes on with the next one.
        return 0 if trained >= batches_of_epoch(length, trainer.limit_train_batches) else trained

    # What a run measured.

    @property
    def last_result(self) -> MiniBatchResult | None:
        """The latest training mini-batch: loss, gradients, directional derivatives, this stage's timeline."""
        return self._result

    @property
    def distribution(self) -> Distribution:
        """What directions consist of."""
        return self._distribution

    @property
    def zo_settings(self) -> StepSettings | None:
        """How zo stages took the latest optimizer step, known on every rank: another object for each step."""
        return None if self._updates is None else self._updates.zo_settings

    def gather_estimated_names(self) -> dict[int, tuple[str, ...]]:
        """Return the names of the parameters that each zo stage estimates the gradient of, on every rank. Collective."""
        if self._assembly is None or self.plan.estimator == "adjoint":
            return {}
        mine = list(self._assembly.engine.zo_parameters)
        names = gather_in_order(mine, self._replicas.first)
        return {stage: tuple(names[stage]) for stage in self.plan.zo_stages}

    def gather_timeline(self) -> Timeline:
        """Return all stages' actions of the latest training mini-batch, in seconds on rank 0's clock. Collective.

        Of replicas those of the first one.
        """
        if self._result is None:
            return ()
        times = [number for timed in self._result.timeline for number in (timed.start, timed.end)]
        gathered = gather_numbers(times, self._replicas.first)
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
        if self._assembly is None:
            yield
            return
        with self._assembly.engine.model.whole():
            yield

    def trainable_state_dict(self) -> dict[str, Tensor]:
        """Return all stages' trainable parameters under the unsplit model's names, on every rank. Collective."""
        if self._assembly is None:
            assert self.lightning_module is not None
            named = self.lightning_module.named_parameters()
            return {name: parameter.detach() for name, parameter in named if parameter.requires_grad}
        self._meet_after_failure()
        if self.world_size > 1:
            synchronise(self._assembly.owned, self._replicas.first)
        return {name: p.detach() for owned in self._assembly.owned for name, p in owned.items()}

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self.pipelined:
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        trained = self.trainable_state_dict()
        with self.whole_model():
            # A random part of an adapter that stays as it is drawn, as the A of LoRA-FA; all ranks have it.
            frozen = frozen_adapters(self.lightning_module)
        return {**trained, **{name: parameter.detach() for name, parameter in frozen.items()}}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if self.world_size == 1:
            return state
        self._meet_after_failure()
        _, assembly = self._module_and_assembly()
        return merge_optimizer_state(state, optimizer, assembly.owned, self._replicas.first)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self.pipelined:
            super().load_optimizer_state_dict(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)  # onto the devices of the parameters
            forget_absent_parameters(optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        if self.pipelined:
            checkpoint = with_plain_hyper_parameters(checkpoint)
            if self._running_exit_loss is not None and self.plan.exit_baseline == "running":
                checkpoint[RUNNING_EXIT_LOSS] = self._running_exit_loss
        if self._keeps_checkpoints:
            self.checkpoint_io.save_checkpoint(
                checkpoint, self._here(filepath), storage_options=storage_options
            )

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self._keeps_checkpoints:
            self.checkpoint_io.remove_checkpoint(self._here(filepath))

    def _here(self, path: _PATH) -> _PATH:
        """Return a path that rank 0 has told, in the Trainer's root folder of this host if it is in that of rank 0."""
        root = self._root_of_rank_0
        if root is None or not Path(path).is_relative_to(root):
            return path
        assert self.lightning_module is not None
        return Path(self.lightning_module.trainer.default_root_dir) / Path(path).relative_to(root)

    @property
    def _keeps_checkpoints(self) -> bool:
        """Whether this rank writes checkpoints: rank 0 does, and where copies are asked for one process of each other host."""
        return self.is_global_zero or (self._checkpoint_copies and self.local_rank == 0)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        # Edge hosts share no disk: the first rank that has the file reads it for all. Nothing in it may run code, unless
        # the user says so.
        reader = self._first_with(checkpoint_path)
        checkpoint = None
        if self.global_rank == reader:
            if Path(checkpoint_path).is_file():
                check_whole(checkpoint_path)
            with code_refused(checkpoint_path):
                checkpoint = super().load_checkpoint(
                    checkpoint_path, True if weights_only is None else weights_only
                )
        loaded: dict[str, Any] = self.broadcast(checkpoint, src=reader)
        self._running_exit_loss = loaded.get(RUNNING_EXIT_LOSS)
        module = self._lightning_module
        if module is not None and module._trainer is not None:
            complete_averages(loaded, module, module.trainer)
        return loaded

    def _first_with(self, path: _PATH) -> int:
        """Return the first rank that has a file, rank 0 if none does (it may be somewhere else than on a disk)."""
        if self.world_size == 1:
            return 0
        have_it: list[bool] = gather_in_order(Path(path).is_file(), list(range(self.world_size)))
        return have_it.index(True) if any(have_it) else 0

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        state = checkpoint["state_dict"]
        # Lightning restores before it sets up.
        materialise(p for p in self.lightning_module.parameters() if p.requires_grad or not self.pipelined)
        if not self.pipelined:
            # A pipeline's checkpoint holds what was trained; the frozen rest is loaded already.
            named = self.lightning_module.named_parameters(remove_duplicate=False)
            trained = {name for name, parameter in named if parameter.requires_grad}
            names = self.lightning_module.state_dict().keys()
            absent = names - state.keys()
            only_trained = bool(absent) and not absent & trained and state.keys() <= names
            super().load_model_state_dict(checkpoint, strict and not only_trained)
            return
        with self.whole_model():
            trainable = {n: p for n, p in self.lightning_module.named_parameters() if p.requires_grad}
            missing = sorted(trainable.keys() - state.keys())
            if missing and strict:
                raise KeyError(
                    f"The checkpoint lacks {len(missing)} trainable parameters, the first being {missing[0]}; it was "
                    "made with another adapter configuration."
                )
            saved = trainable | frozen_adapters(self.lightning_module)
            with torch.no_grad():
                for name in saved.keys() & state.keys():
                    if saved[name].shape != state[name].shape:
                        raise ValueError(
                            f"{name} has the shape {tuple(state[name].shape)} in the checkpoint and {tuple(saved[name].shape)} "
                            "here; use the adapter configuration (rank, and zo_rank with its blocks) that it was made with."
                        )
                    saved[name].copy_(state[name])

    @override
    def on_train_end(self) -> None:
        if self.pipelined:
            self.trainable_state_dict()
            self._plan = replace(self.plan, measured=self._times.gather(self._replicas.first))
            self.sent_mib = self._times.gather_sent_mib(self._replicas.first)
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
        if self._updates is not None:
            self._updates.detach()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            restore_writers(self.lightning_module.trainer)
        if self.lightning_module is not None and lacks_values(self.lightning_module):
            self._lightning_module = (
                None  # it cannot be moved to the CPU, and why it was refused must be seen
            )
        with parameters_kept() if self.compute_device.type == "npu" else nullcontext():
            super().teardown()

    # Collectives over the world.

    @override
    def barrier(self, name: str | None = None) -> None:
        self._meet_after_failure()
        if self.world_size > 1 and dist.is_initialized():
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._meet_after_failure()
        if self.world_size == 1 or not dist.is_initialized():
            return obj
        return broadcast_object(obj, source=src)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks stacked along a new first dimension."""
        if self.world_size == 1:
            return super().all_gather(tensor, group, sync_grads)
        # As bytes in host memory: Gloo's collectives know neither bfloat16 nor int16, nor other devices.
        mine = as_bytes(tensor)
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(gathered, mine, group=group)
        return torch.stack([part.view(tensor.dtype).view(tensor.shape) for part in gathered]).to(
            tensor.device
        )

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
