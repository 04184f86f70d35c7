"""The workload: what each part of a transformer costs, as a function of rows, length and dtype."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_hybridop.planning.fields import check_number

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

# Families whose feed-forward part has two matrices; all others have a gate as well.
_UNGATED = frozenset(
    "bert bloom codegen distilbert electra falcon gpt2 gpt_bigcode gpt_neo gpt_neox gptj mpt nemotron opt phi "
    "roberta starcoder2".split()
)

# An adapter's weight, gradient and both of Adam's moments, all in float32.
_TRAINED_BYTES = 4 * 4


class WorkloadError(ValueError):
    """A workload that cannot be computed; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes of a decoder of equal blocks.

    `experts` is the number of feed-forward parts of a block, `active_experts` how many of them a token goes through.
    """

    name: str
    blocks: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool = False
    gated: bool = True
    experts: int = 1
    active_experts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA of one rank on the named projections: of `q k v o` and `gate up down`."""

    rank: int = 8
    targets: tuple[str, ...] = ("q", "v")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCosts:
    """What one part of a model (the embedding, a block, the head) costs for one micro-batch.

    `parameter_bytes` are the frozen weights, read once by each forward; `activation_bytes` are kept from a forward to
    its backward; `output_bytes` is the hidden state that crosses a cut behind the part.
    """

    forward_flops: float
    parameter_bytes: float
    trainable_parameters: int
    activation_bytes: float
    output_bytes: float

    @property
    def trained_bytes(self) -> float:
        """Adapters with their gradient and Adam's two moments (the paper's `(l2 + l3) |theta|`)."""
        return float(self.trainable_parameters * _TRAINED_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One mini-batch of `rows` rows of `length` tokens through an adapted architecture, in one dtype.

    `activation_elements` is the number of elements per token that a block keeps for its backward (the paper's `l4`,
    relative to the hidden size it is about 20); None estimates it from the architecture.

    Raises:
        WorkloadError: naming the field that is out of range.
    """

    architecture: Architecture
    adapter: Adapter = Adapter()
    rows: int = 8
    length: int = 384
    dtype: str = "float16"
    activation_elements: float | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise WorkloadError(f"{name}: found {value!r}, expected a whole number of at least 1.")
        if self.dtype not in DTYPE_BYTES:
            raise WorkloadError(f"dtype: found {self.dtype!r}, expected one of {', '.join(DTYPE_BYTES)}.")
        if self.activation_elements is not None:
            check_number("activation_elements", self.activation_elements, error=WorkloadError)
        unknown = [name for name in self.adapter.targets if name not in _projections(self.architecture)]
        if unknown:
            raise WorkloadError(
                f"adapter.targets: {self.architecture.name} has no projection {unknown[0]}; choose from "
                f"{', '.join(_projections(self.architecture))}."
            )

    def micro_batch_choices(self) -> tuple[int, ...]:
        """Return every M that cuts the mini-batch into equal micro-batches."""
        return tuple(count for count in range(1, self.rows + 1) if self.rows % count == 0)

    def embedding(self, rows: float) -> PartCosts:
        """Return the costs of the embedding for a micro-batch; a look-up has no arithmetic to speak of."""
        sizes = self.architecture
        return PartCosts(
            forward_flops=0.0,
            parameter_bytes=float(sizes.vocabulary * sizes.hidden * self._item),
            trainable_parameters=0,
            activation_bytes=0.0,
            output_bytes=self._hidden_bytes(rows),
        )

    def block(self, rows: float) -> PartCosts:
        """Return the costs of one block for a micro-batch of `rows` rows.

        FLOPs are two per weight and token, and those of scores and values of attention over the whole length.
        """
        sizes, tokens = self.architecture, rows * self.length
        matrices = _projections(sizes)
        rank = self.adapter.rank
        trained = sum(
            (inputs + outputs) * rank * copies
            for name, (inputs, outputs, copies) in matrices.items()
            if name in self.adapter.targets
        )
        stored = sum(inputs * outputs * copies for inputs, outputs, copies in matrices.values())
        idle_experts = 1 - sizes.active_experts / sizes.experts
        passed = sum(
            inputs * outputs * copies * (1 - idle_experts if name in _FEED_FORWARD else 1)
            for name, (inputs, outputs, copies) in matrices.items()
        )
        attention = 4.0 * self.length * sizes.heads * sizes.head_size
        return PartCosts(
            forward_flops=tokens * (2.0 * (passed + trained) + attention),
            parameter_bytes=float((stored + 2 * sizes.hidden) * self._item),
            trainable_parameters=trained,
            activation_bytes=tokens * self._kept_elements() * self._item,
            output_bytes=self._hidden_bytes(rows),
        )

    def head(self, rows: float) -> PartCosts:
        """Return the costs of norm and head for a micro-batch; its activations are the logits, in float32, and twice."""
        sizes, tokens = self.architecture, rows * self.length
        weights = sizes.vocabulary * sizes.hidden
        return PartCosts(
            forward_flops=2.0 * tokens * weights,
            parameter_bytes=float((weights + sizes.hidden) * self._item),
            trainable_parameters=0,
            activation_bytes=tokens * sizes.vocabulary * 4.0 * 2,
            output_bytes=0.0,
        )

    @property
    def _item(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def _hidden_bytes(self, rows: float) -> float:
        return rows * self.length * self.architecture.hidden * float(self._item)

    def _kept_elements(self) -> float:
        if self.activation_elements is not None:
            return self.activation_elements
        sizes = self.architecture
        query = sizes.heads * sizes.head_size
        key_value = 2 * sizes.key_value_heads * sizes.head_size
        # Both norms' inputs and outputs, and the residual; q, k, v before and behind the rotation, and what attention
        # returned; the gate, its activation, the other branch and the product of both.
        branches = 4 if sizes.gated else 2
        return (
            6 * sizes.hidden
            + 3 * query
            + 2 * key_value
            + branches * sizes.intermediate * sizes.active_experts
        )


_FEED_FORWARD = ("gate", "up", "down")


def _projections(sizes: Architecture) -> dict[str, tuple[int, int, int]]:
    """Return the matrices of a block: inputs, outputs and number of copies of each."""
    query, key_value = sizes.heads * sizes.head_size, sizes.key_value_heads * sizes.head_size
    matrices = {
        "q": (sizes.hidden, query, 1),
        "k": (sizes.hidden, key_value, 1),
        "v": (sizes.hidden, key_value, 1),
        "o": (query, sizes.hidden, 1),
        "up": (sizes.hidden, sizes.intermediate, sizes.experts),
        "down": (sizes.intermediate, sizes.hidden, sizes.experts),
    }
    if sizes.gated:
        matrices["gate"] = (sizes.hidden, sizes.intermediate, sizes.experts)
    return matrices


def architecture_from_config(config: Mapping[str, Any], *, name: str = "model") -> Architecture:
    """Return the sizes in a Hugging Face model's configuration (the content of its config.json).

    Raises:
        WorkloadError: a size that has no default is missing.
    """
    text = config.get("text_config") or config

    def first(*keys: str, default: int | None = None) -> int:
        found = next((text[key] for key in keys if text.get(key) is not None), default)
        if found is None:
            raise WorkloadError(
                f"{name}: its configuration has no {keys[0]}; plan for it with measured costs instead."
            )
        return int(found)

    kind = str(text.get("model_type", "llama"))
    hidden = first("hidden_size", "n_embd", "d_model", "dim")
    heads = first("num_attention_heads", "n_head", "n_heads")
    return Architecture(
        name=name,
        blocks=first("num_hidden_layers", "n_layer", "n_layers"),
        hidden=hidden,
        heads=heads,
        key_value_heads=first("num_key_value_heads", default=heads),
        head_size=first("head_dim", default=hidden // heads),
        intermediate=first(
            "moe_intermediate_size",
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "hidden_dim",
            default=4 * hidden,
        ),
        vocabulary=first("vocab_size"),
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))),
        gated=kind not in _UNGATED,
        experts=first("num_local_experts", "num_experts", "n_routed_experts", default=1),
        active_experts=first("num_experts_per_tok", default=1),
    )
