"""Blocks of several architectures on an inference runtime: forward and gradients are torch's."""

import pytest

from tests.pipeline.executors.staged import padded_step, staged, worst_difference
from tests.pipeline.test_families import DECODER, FAMILIES, Family, adapted_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.timeout(240),
]

ALL = {**FAMILIES, "Gemma": Family(config="Gemma", options={**DECODER, "head_dim": 8})}
# Beside those asked for most: sliding windows and caps on scores, alibi in the place of positions, joined projections.
OTHERS = ("Gemma2", "Gemma3", "Bloom", "Phi3", "BERT")


def check(name: str, executor: str) -> None:
    made = staged(adapted_model(ALL[name], "causal"), executor, needs_vjp=True)
    step = padded_step()

    expected, found = made.both(step)

    assert found.gradients.keys() == expected.gradients.keys()
    assert abs(float((found.output.loss - expected.output.loss).detach())) < 1e-5
    # What the runtime computed, and what came out of its gradient by the hidden state, on the stage before.
    assert (
        worst_difference(found, expected, lambda name: any(f".{block}." in name for block in (1, 2))) < 1e-4
    )
    assert worst_difference(found, expected, lambda name: ".0." in name) < 1e-4
    hidden, on_runtime = made.hidden(step)
    assert float((on_runtime - hidden).abs().max() / hidden.abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT-2", "OPT", "Gemma"])
def test_forward_and_adjoint_on_onnx_runtime_equal_torch(name: str) -> None:
    check(name, "onnxruntime")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT-2", "OPT", "Gemma"])
def test_forward_and_adjoint_on_openvino_equal_torch(name: str) -> None:
    check(name, "openvino")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_run_as_well(name: str) -> None:
    check(name, "onnxruntime")
