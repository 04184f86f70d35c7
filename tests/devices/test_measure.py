"""Measurements of tiny models: what is counted exactly, and what a profile makes of the seconds."""

import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from lightning_hybridop.devices import host, measure, timed_model
from lightning_hybridop.devices.host import (
    NoDeviceError,
    available_memory,
    best_device,
    device_name,
    named_device,
)
from lightning_hybridop.devices.measure import Measured, measured_profile, measured_setting, steps
from lightning_hybridop.devices.timed_model import MeasureError
from lightning_hybridop.planning.cluster import Cluster, Device
from lightning_hybridop.planning.costs import pipeline_costs
from lightning_hybridop.planning.workload import Adapter, Workload, architecture_from_config

LLAMA = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GPT2 = GPT2Config(
    vocab_size=97,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
ROWS, LENGTH = 2, 16


def measured_llama(**changes: Any) -> Measured:
    arguments: dict[str, Any] = {"rows": ROWS, "length": LENGTH, "lora": LORA, "repeats": 2, "model": "tiny"}
    return measure.measure(LLAMA, **{**arguments, **changes})


def llama_workload(dtype: str = "float32") -> Workload:
    return Workload(
        architecture=architecture_from_config(LLAMA.to_dict()),
        adapter=Adapter(rank=4, targets=("q", "v")),
        rows=ROWS,
        length=LENGTH,
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_are_those_of_the_workload(dtype: torch.dtype) -> None:
    workload = llama_workload(str(dtype).removeprefix("torch."))
    measured = measured_llama(dtype=dtype)

    assert measured.block_flops == workload.block(ROWS).forward_flops
    assert measured.head_flops == workload.head(ROWS).forward_flops
    assert measured.activation_elements == pytest.approx(
        workload.block(ROWS).activation_bytes / (ROWS * LENGTH) / dtype.itemsize
    )
    times = (measured.block_forward, measured.embedding_forward, measured.head_forward)
    assert all(0 < seconds < 5 for seconds in times)
    assert measured.block_backward is not None
    assert measured.head_backward is not None


def test_it_says_what_was_measured_and_how_far_it_is() -> None:
    done: list[int] = []
    measured = measured_llama(step=lambda: done.append(1), repeats=3)

    assert len(done) == steps(3)
    assert measured.setting == measured_setting(
        model="tiny", device="cpu", dtype=torch.float32, rows=ROWS, length=LENGTH, lora=LORA
    )
    assert measured.setting.lora_targets == ("q", "v")
    assert measured.setting.threads == torch.get_num_threads()


def test_nothing_of_the_caller_changes() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    config, lora = LLAMA.to_dict(), LORA.to_dict()

    torch.manual_seed(5)
    measured_llama(repeats=1)
    assert torch.equal(torch.rand(3), expected)
    assert LLAMA.to_dict() == config
    assert LORA.to_dict() == lora


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        (GPT2, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")),
        (LLAMA, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")),
        (LLAMA, None),
    ],
)
def test_other_families_and_adapters(config: PretrainedConfig, lora: LoraConfig | None) -> None:
    measured = measure.measure(config, rows=ROWS, length=LENGTH, lora=lora, repeats=1)

    assert measured.block_backward is not None
    assert measured.activation_elements is not None


class Sleeping(nn.Module):
    """A block that takes a known time, forward and backward, and keeps nothing."""

    FORWARD, BACKWARD = 0.004, 0.009

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        class Sleep(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, hidden: Tensor) -> Tensor:
                time.sleep(Sleeping.FORWARD)
                return hidden * 1.0

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                time.sleep(Sleeping.BACKWARD)
                return gradient

        return Sleep.apply(hidden)


def test_times_are_those_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    real = timed_model.random_network

    def sleeping(*arguments: Any) -> nn.Module:
        network = real(*arguments)
        blocks = next(module for module in network.modules() if isinstance(module, nn.ModuleList))
        for index in range(len(blocks)):
            blocks[index] = Sleeping()
        return network

    monkeypatch.setattr(measure, "random_network", sleeping)
    measured = measured_llama(repeats=5)

    assert measured.block_backward is not None
    # Sleeps last at least as long as asked for; the rest is what a busy machine adds.
    assert Sleeping.FORWARD <= measured.block_forward < 2 * Sleeping.FORWARD
    assert Sleeping.BACKWARD <= measured.block_backward < 2 * Sleeping.BACKWARD
    # The head is timed without the blocks.
    assert measured.head_forward < 3 * Sleeping.FORWARD


def test_a_slow_part_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    passes: list[int] = []
    real = measure.chain

    def counted(*arguments: Any) -> Tensor:
        passes.append(1)
        return real(*arguments)

    monkeypatch.setattr(measure, "PART_SECONDS", 0.0)
    monkeypatch.setattr(measure, "chain", counted)
    measured = measured_llama(repeats=3, step=lambda: done.append(1))

    assert len(passes) == 1
    assert len(done) == steps(3)
    assert measured.block_forward > 0


def test_an_npu_only_runs_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "is_forward_only", lambda device: True)
    measured = measured_llama()
    profile = measured_profile(measured)

    assert measured.block_backward is None
    assert measured.head_backward is None
    assert measured.activation_elements is None
    assert profile.forward_only
    assert profile.backward_tflops == {}
    assert profile.head_backward_tflops == {}


def test_the_type_says_which_device_only_runs_forward() -> None:
    # Torch knows the type npu only where torch_npu is.
    assert host.is_forward_only(SimpleNamespace(type="npu"))  # type: ignore[arg-type]
    assert not host.is_forward_only(torch.device("cpu"))
    assert not host.is_forward_only(torch.device("cuda", 0))


def test_a_plan_from_the_profile_gives_the_measured_seconds_back() -> None:
    measured = measured_llama()
    profile = measured_profile(measured, name="here")
    cluster = Cluster(name="here", devices=(Device(name="here", profile=profile),))
    (costs,) = pipeline_costs(cluster, llama_workload(), micro_batches=1, queries=1).devices

    assert costs.forward[0] == pytest.approx(measured.block_forward)
    assert costs.backward[0] == pytest.approx(measured.block_backward)
    assert costs.head_forward == pytest.approx(measured.head_forward)
    assert costs.head_backward == pytest.approx(measured.head_backward)
    assert costs.memory == pytest.approx(measured.memory_bytes)
    assert profile.efficiency == 1
    assert set(profile.sources) == {
        "forward_tflops",
        "backward_tflops",
        "head_forward_tflops",
        "head_backward_tflops",
        "memory_gb",
    }


def test_rows_that_are_too_long_are_refused() -> None:
    with pytest.raises(
        MeasureError, match=r"^length: found 129, but tiny takes at most 128 tokens per row\.$"
    ):
        measured_llama(length=129)


def test_this_machine() -> None:
    cpu = torch.device("cpu")

    assert 0 < available_memory(cpu) <= psutil.virtual_memory().total
    assert device_name(cpu)
    assert best_device().type in ("cpu", "cuda", "npu")


@pytest.mark.parametrize("name", ["npu:0", "cuda:99", "tpu", "cpu:x"])
def test_a_device_that_is_not_here_is_refused(name: str) -> None:
    if name == "npu:0" and best_device().type == "npu":
        pytest.skip("this machine has one")

    with pytest.raises(NoDeviceError) as error:
        named_device(name)
    assert str(error.value) == (
        f"device: there is no {name} on this machine; choose another, such as {best_device()}."
    )


def test_a_device_that_is_here() -> None:
    assert named_device("cpu") == torch.device("cpu")
    assert named_device(str(best_device())) == best_device()
