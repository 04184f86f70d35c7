"""Model calls beyond the one that a schedule brings, as in text generation: the last stage makes them, the others serve."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_hybridop.pipeline.batches import token_shape
from lightning_hybridop.pipeline.engine import Engine
from lightning_hybridop.pipeline.exchange import broadcast_nested
from lightning_hybridop.pipeline.stand_ins import StageBoundary, count_tokens_in
from lightning_hybridop.schedules.actions import Action, Kind

# What generation may do to its cache between two forwards: choose, double or forget rows, forget tokens.
_CACHE_METHODS = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave", "crop")

# Messages of these calls are told apart from a schedule's by this number of a query, which no plan reaches.
_QUERY = 8000


class GenerationError(RuntimeError):
    """The model's `generate` was called where, or in a way that, a pipeline cannot follow."""


class ModelCalls:
    """Lets a step call the language model any number of times, and call its `generate`.

    The last stage runs the user's code. Each forward in it is asked of the earlier stages, which run their part of it,
    with a key-value cache of their own blocks, and pass the hidden state on. Tokens, not logits, cross to them.

    Args:
        engine: this stage's engine, which knows its part of the model and its neighbours.
        language_model: the Hugging Face style model in the module, None if there is none.
        last_rank: the rank of the last stage.
        listens: whether this process belongs to another replica than that stage, so that it only waits for the end.
    """

    def __init__(
        self, engine: Engine, *, language_model: nn.Module | None, last_rank: int, listens: bool = False
    ) -> None:
        self._engine = engine
        self._listens = listens
        self._leads = engine.is_last and not listens
        self._model = engine.model
        self._language_model = language_model
        self._last_rank = last_rank
        self._during: Literal["training", "micro-batch", "mini-batch", "hook"] = "hook"
        self._shape = (0, 0)
        self._calls = 0
        self._cache: Any = None
        if language_model is not None and hasattr(language_model, "generate") and len(engine.plan.stages) > 1:
            generate: Callable[..., Any] = language_model.generate  # type: ignore[assignment]

            @wraps(generate)
            def shared(*arguments: Any, **keywords: Any) -> Any:
                return self._generate(generate, *arguments, **keywords)

            language_model.__dict__["generate"] = shared

    @contextmanager
    def during_training(self) -> Iterator[None]:
        """Inside the block a training step runs, which cannot generate."""
        with self._within("training"):
            yield

    @contextmanager
    def during_micro_batch(self, shape: tuple[int, int]) -> Iterator[None]:
        """Inside the block an evaluation step runs up to its stage's end, on a micro-batch of (rows, length)."""
        self._shape = shape
        with self._within("micro-batch"):
            yield

    @contextmanager
    def during_mini_batch(self) -> Iterator[None]:
        """Inside the block the last stage runs an evaluation step to its end."""
        if self._language_model is None or self._engine.stage == 0:  # a last stage without others asks nobody
            yield
            return
        with (
            self._within("mini-batch"),
            self._forwards_asked_for(needed=lambda: not self._model.has_received),
        ):
            yield

    def serve_until_over(self, result: Any) -> Any:
        """Return the last stage's `result` on all ranks; until then the earlier stages serve its calls. Collective.

        `result` is what `broadcast_nested` takes.
        """
        if self._leads:
            self.abandon()
            broadcast_nested({"over": result}, source=self._last_rank)
            return result
        while "over" not in (message := broadcast_nested(None, source=self._last_rank)):
            if not self._listens:
                with torch.no_grad():
                    self._serve(message)
        self._flush()
        self.abandon()
        return message["over"]

    def abandon(self) -> None:
        """Forget the calls of a step, at its end or after a failure."""
        self._calls = 0
        self._cache = None

    @contextmanager
    def _within(self, what: Literal["training", "micro-batch", "mini-batch"]) -> Iterator[None]:
        self._during = what
        try:
            yield
        finally:
            self._during = "hook"

    def _generate(self, generate: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Stand in the place of the language model's `generate`."""
        match self._during:
            case "training":
                raise GenerationError(
                    "training_step called generate(), which a pipelined training step cannot; generate in validation_step "
                    "or in a hook such as on_train_epoch_end."
                )
            case "micro-batch":
                # The step generates on the whole mini-batch, later and on the last stage; here it has no more to do.
                self._model.drop_received()
                raise StageBoundary(torch.zeros(*self._shape, self._engine.width, device=self._engine.device))
            case "mini-batch":
                self._model.drop_received()
                return generate(*arguments, **keywords)
        # In a hook all ranks are here together.
        if not self._leads:
            return self._move(self.serve_until_over(None))
        with self._forwards_asked_for(needed=lambda: True):
            tokens_BT = generate(*arguments, **keywords)
        if not isinstance(tokens_BT, Tensor):
            raise GenerationError(
                f"generate() in a hook returned {type(tokens_BT).__name__}, which other ranks cannot be told; leave "
                "return_dict_in_generate out, or generate in predict_step."
            )
        return self.serve_until_over(tokens_BT)

    @contextmanager
    def _forwards_asked_for(self, needed: Callable[[], bool]) -> Iterator[None]:
        """Inside the block the last stage's model asks the earlier stages for its hidden state where it is `needed`."""
        assert self._language_model is not None
        forward = self._language_model.forward

        @wraps(forward)
        def asking(*arguments: Any, **keywords: Any) -> Any:
            if not needed():
                output = forward(*arguments, **keywords)
                _mark_incomplete((*keywords.values(), *getattr(output, "values", tuple)()))
                return output
            if arguments:
                raise GenerationError(
                    "The model was called a second time in one step with positional arguments; name them."
                )
            hidden_BTD = self._ask(keywords)
            with self._model.within_blocks():
                return self._model.output(lambda: forward(**keywords), hidden_BTD)

        self._language_model.__dict__["forward"] = asking
        try:
            yield
        finally:
            del self._language_model.__dict__["forward"]

    def _ask(self, keywords: Mapping[str, Any]) -> Tensor:
        """Have the earlier stages run a forward and return the hidden state that comes out of them."""
        inputs = dict(keywords)
        cached = next((name for name, value in keywords.items() if hasattr(value, "get_seq_length")), None)
        fresh = False
        if cached is not None:
            cache = inputs.pop(cached)
            fresh = cache is not self._cache
            if fresh:
                self._follow(cache)
        message = {"inputs": inputs, "cached": cached, "fresh": fresh}
        broadcast_nested(message, source=self._last_rank)
        return self._receive(inputs)

    def _follow(self, cache: Any) -> None:
        """Have the earlier stages' caches do what generation does to the last stage's."""
        if type(cache).__name__ != "DynamicCache":
            raise GenerationError(
                f"generate() uses a {type(cache).__name__}, expected a DynamicCache, which alone is followed on the other "
                "stages; leave cache_implementation out, or pass use_cache=False."
            )
        if getattr(cache, "lacks_blocks_of_a_stage", False):
            raise GenerationError(
                "The model was given the cache of its first call in this step, which a pipeline runs without one; call "
                "generate() instead, or pass use_cache=False and all tokens."
            )
        if cache.get_seq_length() > 0:
            raise GenerationError(
                f"The cache given to the model holds {cache.get_seq_length()} tokens already, which the other stages do "
                "not have; start generation with an empty cache."
            )
        self._cache = cache
        count_tokens_in(cache)
        for name in _CACHE_METHODS:
            setattr(cache, name, self._followed(name, getattr(cache, name)))

    def _followed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def followed(*arguments: Any) -> Any:
            broadcast_nested({"method": name, "arguments": list(arguments)}, source=self._last_rank)
            return method(*arguments)

        return followed

    def _serve(self, message: dict[str, Any]) -> None:
        assert self._language_model is not None
        if "method" in message:
            getattr(self._cache, message["method"])(*(self._move(value) for value in message["arguments"]))
            return
        inputs = {name: self._move(value) for name, value in message["inputs"].items()}
        received_BTD = self._receive(inputs) if self._engine.stage > 0 else None
        if message["fresh"]:
            self._cache = _empty_cache(self._language_model)
        if message["cached"] is not None:
            inputs[message["cached"]] = self._cache
        language_model = self._language_model
        hidden_BTD = self._model.hidden(lambda: language_model(**inputs), received_BTD)
        self._flush()
        self._engine.send(self._next_action(), hidden_BTD)
        self._calls += 1

    def _receive(self, inputs: Mapping[str, Any]) -> Tensor:
        action = self._next_action()
        self._engine.post(action, (*token_shape(inputs), self._engine.width))
        if self._engine.is_last:
            self._calls += 1
        return self._engine.receive(action)

    def _next_action(self) -> Action:
        return Action(kind=Kind.FORWARD, micro_batch=self._calls % _QUERY, query=_QUERY)

    def _move(self, value: Any) -> Any:
        return value.to(self._engine.device) if isinstance(value, Tensor) else value

    def _flush(self) -> None:
        if not self._engine.is_last:
            self._engine.channels[self._engine.stage + 1].flush()


def _mark_incomplete(values: Iterable[Any]) -> None:
    """Note in the caches among `values` that the blocks of the last stage have not written to them."""
    for value in values:
        if hasattr(value, "get_seq_length"):
            value.lacks_blocks_of_a_stage = True


def _empty_cache(language_model: nn.Module) -> Any:
    from transformers import DynamicCache  # only models of this library have such caches

    config: Any = language_model.config
    # As generate() makes its own: some layers keep a window only.
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    count_tokens_in(cache)
    return cache
