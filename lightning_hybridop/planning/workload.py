"""The workload: what each part of a transformer costs, as a function of rows, length and dtype."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from lightning_hybridop.planning.fields import check_name, check_number, check_whole, checked_fields
from lightning_hybridop.planning.plan import WireName

MOST_BLOCKS = 256
MOST_ROWS = 4096
MOST_SIZE = 10**7
MOST_MICRO_BATCHES = 64
"""What can be planned for: the planner searches exactly, and its time grows with blocks and with M to choose from."""

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

_ATTENTION = ("q", "k", "v", "o")
_FEED_FORWARD = ("gate", "up", "down")
_SHARED_INPUT = {"k": "q", "v": "q", "up": "gate"}

# An adapter's weight, gradient and both of Adam's moments, all in float32.
_TRAINED_BYTES = 4 * 4


class WorkloadError(ValueError):
    """A workload that cannot be computed; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes of a decoder of equal blocks.

    `experts` is the number of feed-forward parts of a block, `active_experts` how many of them a token goes through.
    `norms` counts those of a block, `biases` names the projections that have one (of `q k v o` and `gate up down`),
    `positions` is the number of learned positions, 0 without.

    Raises:
        WorkloadError: a size is no whole number, or sizes contradict each other.
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
    norms: int = 2
    norm_bias: bool = False
    biases: tuple[str, ...] = ()
    positions: int = 0

    def __post_init__(self) -> None:
        check_name("architecture.name", self.name, error=WorkloadError)
        for name in (
            "blocks",
            "hidden",
            "heads",
            "key_value_heads",
            "head_size",
            "intermediate",
            "vocabulary",
            "experts",
            "active_experts",
        ):
            most = MOST_BLOCKS if name == "blocks" else MOST_SIZE
            check_whole(f"architecture.{name}", getattr(self, name), 1, most, error=WorkloadError)
        for name in ("norms", "positions"):
            check_whole(f"architecture.{name}", getattr(self, name), 0, MOST_SIZE, error=WorkloadError)
        for name in ("tied_embeddings", "gated", "norm_bias"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise WorkloadError(f"architecture.{name}: found {value!r}, expected true or false.")
        if self.heads % self.key_value_heads:
            raise WorkloadError(
                f"architecture.key_value_heads: found {self.key_value_heads}, expected a divisor of the {self.heads} heads."
            )
        if self.active_experts > self.experts:
            raise WorkloadError(
                f"architecture.active_experts: found {self.active_experts}, expected at most the {self.experts} experts."
            )
        _check_projections("architecture.biases", self.biases, self)

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: matrices, biases, norms and the router of its experts."""
        matrices = sum(
            (inputs + (name in self.biases)) * outputs * copies
            for name, (inputs, outputs, copies) in _projections(self).items()
        )
        return matrices + self.norms * self._norm_parameters + self._router

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding and of learned positions."""
        return (self.vocabulary + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the last norm and of the head; with tied embeddings its matrix is the embedding's."""
        return self.vocabulary * self.hidden + self._norm_parameters

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied matrix counts once."""
        shared = self.vocabulary * self.hidden if self.tied_embeddings else 0
        blocks = self.blocks * self.block_parameters
        return self.embedding_parameters + blocks + self.head_parameters - shared

    @property
    def _norm_parameters(self) -> int:
        return self.hidden * (2 if self.norm_bias else 1)

    @property
    def _router(self) -> int:
        return self.hidden * self.experts if self.experts > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA of one rank on the named projections: of `q k v o` and `gate up down`.

    Raises:
        WorkloadError: the rank is no whole number.
    """

    rank: int = 8
    targets: tuple[str, ...] = ("q", "v")

    def __post_init__(self) -> None:
        check_whole("adapter.rank", self.rank, 1, MOST_SIZE, error=WorkloadError)


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

    `activation_elements` is the number of elements of that dtype per token that a block keeps for its backward (the
    paper's `l4`), as measured; None estimates the bytes from the architecture. `wire` is how hidden states travel between
    stages; None: in `dtype`.

    Raises:
        WorkloadError: naming the field that is out of range.
    """

    architecture: Architecture
    adapter: Adapter = field(default_factory=Adapter)
    rows: int = 8
    length: int = 384
    dtype: str = "float16"
    activation_elements: float | None = None
    wire: WireName | None = None

    def __post_init__(self) -> None:
        check_whole("rows", self.rows, 1, MOST_ROWS, error=WorkloadError)
        check_whole("length", self.length, 1, MOST_SIZE, error=WorkloadError)
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise WorkloadError(f"dtype: found {self.dtype!r}, expected one of {', '.join(DTYPE_BYTES)}.")
        if self.wire not in (None, *get_args(WireName)):
            raise WorkloadError(
                f"wire: found {self.wire!r}, expected one of {', '.join(get_args(WireName))}, or null."
            )
        if self.activation_elements is not None:
            check_number("activation_elements", self.activation_elements, error=WorkloadError)
        _check_projections("adapter.targets", self.adapter.targets, self.architecture)

    def micro_batch_choices(self) -> tuple[int, ...]:
        """Return every M up to 64 that cuts the mini-batch into equal micro-batches."""
        most = min(self.rows, MOST_MICRO_BATCHES)
        return tuple(count for count in range(1, most + 1) if self.rows % count == 0)

    def embedding(self, rows: float) -> PartCosts:
        """Return the costs of the embedding for a micro-batch; a look-up has no arithmetic to speak of."""
        sizes = self.architecture
        return PartCosts(
            forward_flops=0.0,
            parameter_bytes=float(sizes.embedding_parameters * self._item),
            trainable_parameters=0,
            activation_bytes=0.0,
            output_bytes=self._hidden_bytes(rows),
        )

    def block(self, rows: float) -> PartCosts:
        """Return the costs of one block for a micro-batch of `rows` rows.

        FLOPs are two per weight and token, and those of scores and values of attention over the whole length: frameworks
        compute what a causal mask hides as well, unless they have a fused kernel.
        """
        sizes, tokens = self.architecture, rows * self.length
        matrices = _projections(sizes)
        rank = self.adapter.rank
        trained = sum(
            (inputs + outputs) * rank * copies
            for name, (inputs, outputs, copies) in matrices.items()
            if name in self.adapter.targets
        )
        passed = sizes._router + sum(
            inputs * outputs * (sizes.active_experts if name in _FEED_FORWARD else 1)
            for name, (inputs, outputs, _) in matrices.items()
        )
        attention = 4.0 * self.length * sizes.heads * sizes.head_size
        return PartCosts(
            forward_flops=tokens * (2.0 * (passed + trained) + attention),
            parameter_bytes=float(sizes.block_parameters * self._item),
            trainable_parameters=trained,
            activation_bytes=tokens * self._kept_bytes(),
            output_bytes=self._hidden_bytes(rows),
        )

    def head(self, rows: float) -> PartCosts:
        """Return the costs of norm and head for a micro-batch; its activations are the logits, in float32, and twice."""
        sizes, tokens = self.architecture, rows * self.length
        return PartCosts(
            forward_flops=2.0 * tokens * sizes.vocabulary * sizes.hidden,
            parameter_bytes=float(sizes.head_parameters * self._item),
            trainable_parameters=0,
            activation_bytes=tokens * sizes.vocabulary * 4.0 * 2,
            output_bytes=0.0,
        )

    def hidden_wire_bytes(self, rows: float) -> float:
        """Return the bytes of a micro-batch's hidden state as it travels; int8 comes with 4 bytes for each token."""
        if self.wire is None:
            return self._hidden_bytes(rows)
        scale = 4.0 if self.wire == "int8" else 0.0
        return rows * self.length * (self.architecture.hidden * float(DTYPE_BYTES[self.wire]) + scale)

    def gradient_wire_bytes(self, rows: float) -> float:
        """Return the bytes of a micro-batch's gradient on its way back: with a `wire` it travels in bfloat16."""
        if self.wire is None:
            return self._hidden_bytes(rows)
        return rows * self.length * self.architecture.hidden * float(DTYPE_BYTES["bfloat16"])

    @property
    def _item(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def _hidden_bytes(self, rows: float) -> float:
        return rows * self.length * self.architecture.hidden * float(self._item)

    def _kept_bytes(self) -> float:
        """Return the bytes per token that a block keeps from its forward to its backward.

        What a frozen linear layer was given is not needed again, only what an adapter was given is. Counted are: the
        inputs of norms and two numbers for each, in float32 whatever the dtype; the adapters' inputs and inner products,
        also in float32; q, k and v as attention takes them, with what frameworks make of a padded batch (each key and
        value head once per query head that shares it, a mask per block), its result and its normaliser; the gate, its
        activation and the other branch. Not counted are what all blocks share (rotary tables), dropout masks, and the
        scores of an attention that is not fused. Without a gate the activation function is taken for one of four steps,
        such as GPT-2's.
        """
        if self.activation_elements is not None:
            return self.activation_elements * self._item
        sizes, targets = self.architecture, self.adapter.targets
        query = sizes.heads * sizes.head_size
        inner = sizes.intermediate * sizes.active_experts
        widths = {name: inputs for name, (inputs, _, _) in _projections(sizes).items()}
        if self._item == 4:
            # Adapters share an input with each other, and that of o is kept by attention already.
            adapted = {_SHARED_INPUT.get(name, name): widths[name] for name in targets}
            inputs = sum(width for name, width in adapted.items() if name != "o")
        else:
            inputs = sum(widths[name] for name in targets)  # cast to float32 for each adapter
        in_float32 = (
            sizes.norms * (sizes.hidden + 1) + inputs + len(targets) * self.adapter.rank + sizes.heads
        )
        return 4.0 * in_float32 + self._item * (4 * query + self.length + (3 if sizes.gated else 4) * inner)


def workload_from_dict(values: Any) -> Workload:
    """Return the workload that plain containers describe.

    Raises:
        WorkloadError: an unknown or missing field, or a value out of range; the message names the field.
    """
    fields = checked_fields("workload", values, Workload, error=WorkloadError)
    sizes = checked_fields("architecture", fields.pop("architecture"), Architecture, error=WorkloadError)
    if "biases" in sizes:
        sizes["biases"] = _names("architecture.biases", sizes["biases"])
    adapter = checked_fields(
        "adapter",
        {} if (given := fields.pop("adapter", None)) is None else given,
        Adapter,
        error=WorkloadError,
    )
    if "targets" in adapter:
        adapter["targets"] = _names("adapter.targets", adapter["targets"])
    return Workload(architecture=Architecture(**sizes), adapter=Adapter(**adapter), **fields)


def _names(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise WorkloadError(f"{where}: found {value!r}, expected a list of projections.")
    return tuple(value)


def _check_projections(where: str, names: tuple[str, ...], sizes: Architecture) -> None:
    known = _projections(sizes)
    for index, name in enumerate(names):
        if name not in known:
            raise WorkloadError(
                f"{where}: {sizes.name} has no projection {name}; choose from {', '.join(known)}."
            )
        if name in names[:index]:
            raise WorkloadError(f"{where}: {name} is named twice; name each projection once.")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What configurations do not say because it is the same for all models of a family."""

    gated: bool = True
    norms: int = 2
    norm_bias: bool = False
    biases: tuple[str, ...] = ()
    learned_positions: bool = False


_ALL = (*_ATTENTION, "up", "down")
_WITH_POSITIONS = _Family(gated=False, norm_bias=True, biases=_ALL, learned_positions=True)
_FAMILIES: Mapping[str, _Family] = {
    **dict.fromkeys(
        ("bert", "distilbert", "electra", "roberta", "gpt2", "gpt_bigcode", "opt"), _WITH_POSITIONS
    ),
    "bloom": _Family(gated=False, norm_bias=True, biases=_ALL),
    "codegen": _Family(gated=False, norms=1, norm_bias=True, biases=("up", "down")),
    "cohere": _Family(norms=1),
    "falcon": _Family(gated=False, norm_bias=True),
    "gemma2": _Family(norms=4),
    "gemma3_text": _Family(norms=4),
    "gpt_neo": _Family(gated=False, norm_bias=True, biases=("o", "up", "down"), learned_positions=True),
    "gpt_neox": _Family(gated=False, norm_bias=True, biases=_ALL),
    "gptj": _Family(gated=False, norms=1, norm_bias=True, biases=("up", "down")),
    "mpt": _Family(gated=False),
    "nemotron": _Family(gated=False, norm_bias=True),
    "phi": _Family(gated=False, norms=1, norm_bias=True, biases=_ALL),
    "qwen2": _Family(biases=("q", "k", "v")),
    "qwen2_moe": _Family(biases=("q", "k", "v")),
    "stablelm": _Family(norm_bias=True),
    "starcoder2": _Family(gated=False, norm_bias=True, biases=_ALL),
}


def architecture_from_config(config: Mapping[str, Any], *, name: str = "model") -> Architecture:
    """Return the sizes in a Hugging Face model's configuration (the content of its config.json).

    Parameter counts are exact for Llama, Mistral, Mixtral, Qwen2, Gemma, Gemma2 and GPT-2; other families may have
    norms of single heads or biases besides, which are less than a thousandth of a model.

    Raises:
        WorkloadError: a size that has no default is missing, or is not one number for all blocks.
    """
    text = config.get("text_config") or config

    def first(*keys: str, default: int | None = None) -> int:
        key = next((key for key in keys if text.get(key) is not None), None)
        found = default if key is None else text[key]
        if found is None:
            raise WorkloadError(
                f"{name}: its configuration has no {keys[0]}; plan for it with measured costs instead."
            )
        if not isinstance(found, int):
            raise WorkloadError(
                f"{name}: its configuration has {key} {found!r}, expected one whole number for all blocks."
            )
        return found

    family = _FAMILIES.get(str(text.get("model_type", "llama")), _Family())
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
        gated=family.gated,
        experts=first("num_local_experts", "num_experts", "n_routed_experts", default=1),
        active_experts=first("num_experts_per_tok", default=1),
        norms=family.norms,
        norm_bias=family.norm_bias,
        biases=family.biases or _configured_biases(text, family),
        positions=first("n_positions", "max_position_embeddings") if family.learned_positions else 0,
    )


def _configured_biases(text: Mapping[str, Any], family: _Family) -> tuple[str, ...]:
    attention = _ATTENTION if text.get("attention_bias") else ()
    feed_forward = _FEED_FORWARD if text.get("mlp_bias") else ()
    return tuple(name for name in (*attention, *feed_forward) if name != "gate" or family.gated)
