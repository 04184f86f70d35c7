"""Measures what one block, the embedding and the head of a language model take on the machine that this runs on."""

import platform
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_hybridop.devices.host import available_memory, device_name, is_forward_only, synchronize
from lightning_hybridop.devices.timed_model import (
    MeasureError,
    block_calls,
    chain,
    kept_elements,
    random_batch,
    random_network,
    replaced_output,
    without_blocks,
)
from lightning_hybridop.planning.cluster import BYTES_PER_GB, DeviceProfile
from lightning_hybridop.planning.workload import Adapter, Workload, architecture_from_config

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PretrainedConfig

WARM_UP = 2
"""Untimed passes before the timed ones."""

PART_SECONDS = 8.0
"""No further pass of a part begins after so long, so that a dtype which a device is slow in does not take minutes."""

_PROJECTIONS = {f"{name}_proj": name for name in ("q", "k", "v", "o", "gate", "up", "down")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What was measured, and with what: two measurements of equal settings may replace each other.

    `device_name` is what the machine calls the device, `threads` those that torch computes with on the CPU.
    """

    model: str
    device: str
    device_name: str
    dtype: str
    rows: int
    length: int
    lora_rank: int
    lora_targets: tuple[str, ...]
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of one micro-batch, and what they mean as rates; None where the device only runs forward.

    `block_flops` and `head_flops` are those of a forward. `activation_elements` is the number of elements of the dtype
    per token that a block keeps for its backward (the paper's `l4`); `memory_bytes` is what a process can have.
    """

    setting: Setting
    block_forward: float
    block_backward: float | None
    embedding_forward: float
    head_forward: float
    head_backward: float | None
    block_flops: float
    head_flops: float
    activation_elements: float | None
    memory_bytes: float


def measure(
    config: "PretrainedConfig",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    rows: int = 4,
    length: int = 64,
    lora: "LoraConfig | None" = None,
    repeats: int = 5,
    model: str = "model",
    step: Callable[[], None] = lambda: None,
) -> Measured:
    """Time a model of that configuration with few blocks and random weights on one micro-batch.

    Times are medians over `repeats` (fewer of a part that is slow), with the device synchronised. The micro-batch has a
    padded row, as most have. An NPU only runs forward. `step` is called `steps(repeats)` times on the way. The global
    random state is left alone.

    Raises:
        MeasureError: the configuration allows no rows of that length, or its blocks cannot be found.
    """
    device = torch.device(device)
    setting = measured_setting(model=model, device=device, dtype=dtype, rows=rows, length=length, lora=lora)
    workload = Workload(
        architecture=architecture_from_config(config.to_dict(), name=model),
        adapter=_adapter(lora),
        rows=rows,
        length=length,
        dtype=setting.dtype,
    )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise MeasureError(f"length: found {length}, but {model} takes at most {positions} tokens per row.")
    memory = available_memory(device)
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked):
        torch.manual_seed(0)
        network = random_network(config, lora, dtype).to(device)
        batch = random_batch(config, rows, length, device)
        step()
        clock = _Clock(device=device, repeats=repeats, step=step, backward=not is_forward_only(device))
        calls = block_calls(network, batch)
        hidden_BTD = torch.randn_like(calls[0].hidden)
        block = clock.time(lambda hidden: chain(calls, hidden), hidden_BTD)
        elements = None
        if block.backward is not None:
            elements = kept_elements(calls, hidden_BTD)
        step()
        embedding, head = _ends(network, batch, clock)
    return Measured(
        setting=setting,
        block_forward=block.forward / len(calls),
        block_backward=None if block.backward is None else block.backward / len(calls),
        embedding_forward=embedding,
        head_forward=head.forward,
        head_backward=head.backward,
        block_flops=workload.block(rows).forward_flops,
        head_flops=workload.head(rows).forward_flops,
        activation_elements=elements,
        memory_bytes=memory,
    )


def steps(repeats: int) -> int:
    """Return how often `measure` calls its `step`."""
    return 2 + 3 * (WARM_UP + repeats)


def measured_setting(
    *,
    model: str,
    device: torch.device | str,
    dtype: torch.dtype,
    rows: int,
    length: int,
    lora: "LoraConfig | None",
) -> Setting:
    """Return the setting that `measure` would note for these arguments."""
    device = torch.device(device)
    adapter = _adapter(lora)
    return Setting(
        model=model,
        device=str(device),
        device_name=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        rows=rows,
        length=length,
        lora_rank=adapter.rank,
        lora_targets=adapter.targets,
        threads=torch.get_num_threads(),
    )


def measured_profile(measured: Measured, *, name: str | None = None) -> DeviceProfile:
    """Return a measurement as a device profile; a backward counts as two forwards' worth of FLOPs."""
    setting = measured.setting

    def rates(flops: float, seconds: float | None) -> dict[str, float]:
        return {} if seconds is None else {setting.dtype: flops / seconds / 1e12}

    source = (
        f"measured: {setting.model}, {setting.dtype}, {setting.rows} rows of {setting.length} tokens, "
        f"{setting.threads} threads"
    )
    profile: dict[str, Any] = {
        "forward_tflops": rates(measured.block_flops, measured.block_forward),
        "backward_tflops": rates(2 * measured.block_flops, measured.block_backward),
        "head_forward_tflops": rates(measured.head_flops, measured.head_forward),
        "head_backward_tflops": rates(2 * measured.head_flops, measured.head_backward),
    }
    return DeviceProfile(
        name=name or f"{platform.node()}-{setting.device.replace(':', '-')}",
        title=setting.device_name,
        forward_only=measured.block_backward is None,
        **profile,
        efficiency=1.0,
        memory_gb=measured.memory_bytes / BYTES_PER_GB,
        sources={name: source for name, rate in profile.items() if rate}
        | {"memory_gb": "measured: what a process could have before the model was there"},
    )


def _adapter(lora: "LoraConfig | None") -> Adapter:
    """Return the workload's view of a LoRA configuration; projections of other names cost next to nothing."""
    if lora is None:
        return Adapter(targets=())
    given = lora.target_modules or ()
    names = tuple(_PROJECTIONS) if isinstance(given, str) else sorted(given)
    return Adapter(rank=lora.r, targets=tuple(_PROJECTIONS[name] for name in names if name in _PROJECTIONS))


# The clock.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    forward: float
    backward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clock:
    """Times functions of one tensor on one device."""

    device: torch.device
    repeats: int
    step: Callable[[], None]
    backward: bool

    def time(self, run: Callable[[Tensor], Tensor], given: Tensor) -> _Times:
        """Return the median seconds of `run(given)` and of the gradient with respect to `given` and all it trains."""
        forwards: list[float] = []
        backwards: list[float] = []
        first_began = time.perf_counter()
        for _ in range(WARM_UP + self.repeats):
            if not forwards or time.perf_counter() - first_began < PART_SECONDS:
                forward, backward = self._pass(run, given)
                forwards.append(forward)
                backwards.append(backward)
            self.step()
        return _Times(
            forward=median(forwards[WARM_UP:] or forwards[-1:]),
            backward=median(backwards[WARM_UP:] or backwards[-1:]) if self.backward else None,
        )

    def _pass(self, run: Callable[[Tensor], Tensor], given: Tensor) -> tuple[float, float]:
        taken = given.detach().clone().requires_grad_(self.backward)
        synchronize(self.device)
        began = time.perf_counter()
        with nullcontext() if self.backward else torch.no_grad():
            output = run(taken)
        synchronize(self.device)
        forward = time.perf_counter() - began
        if not self.backward:
            return forward, 0.0
        gradient = torch.ones_like(output)
        synchronize(self.device)
        began = time.perf_counter()
        output.backward(gradient)  # type: ignore[no-untyped-call]
        synchronize(self.device)
        return forward, time.perf_counter() - began


def _ends(network: nn.Module, batch: Mapping[str, Tensor], clock: _Clock) -> tuple[float, _Times]:
    """Return the embedding's seconds, and those of all that is left of the model without embedding and blocks.

    That is the last norm, the head and the loss, and the masks and rotary tables that every stage makes for itself.
    """
    language_model: Any = network
    embedding = language_model.get_input_embeddings()
    forward_only = _Clock(device=clock.device, repeats=clock.repeats, step=clock.step, backward=False)
    looked_up = forward_only.time(lambda _: embedding(batch["input_ids"]), torch.zeros(1)).forward
    hidden_BTD = embedding(batch["input_ids"]).detach()

    def rest(hidden: Tensor) -> Tensor:
        with replaced_output(embedding, hidden):
            loss: Tensor = language_model(**batch, use_cache=False).loss
        return loss

    with without_blocks(network):
        whole = clock.time(rest, hidden_BTD)
    return looked_up, _Times(forward=max(whole.forward - looked_up, 1e-9), backward=whole.backward)
