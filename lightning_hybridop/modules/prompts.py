"""Classification as language modelling: a text, the prompt's end and, as the answer, a label word."""

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedTokenizerBase

Batch = dict[str, Tensor]
"""Tensors of a batch by name, int64; the module that takes it says of which shapes."""

IGNORED = -100
"""The label of positions that are not trained on, as in Hugging Face models."""

CLASSES = ("World", "Sports", "Business", "Technology")
"""Label words of the four-class news sets, in the order of their class indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """How a text asks for its class: `{text}{ending} {label word}`; the label words stand in class order."""

    ending: str = "\nTopic:"
    label_words: tuple[str, ...] = CLASSES

    def ending_tokens(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the tokens of the prompt's end, without special tokens."""
        return _tokens(tokenizer, self.ending)

    def label_tokens(self, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """Return the tokens of each label word where it follows the prompt's end, without special tokens.

        Raises ValueError when two label words begin with the same token: the first token tells the classes
        apart.
        """
        # A word's tokens may depend on what stands before it, so tokenise it in place and take the end off.
        ending = self.ending_tokens(tokenizer)
        answers = [_tokens(tokenizer, f"{self.ending} {word}")[len(ending) :] for word in self.label_words]
        owners: dict[int, str] = {}
        for word, answer in zip(self.label_words, answers, strict=True):
            if not answer:
                raise ValueError(f"The label word {word!r} has no token of its own: choose another word.")
            other = owners.setdefault(answer[0], word)
            if other != word:
                raise ValueError(
                    f"The label words {other!r} and {word!r} begin with the same token {answer[0]}, but the "
                    "first token must tell the classes apart: choose other words."
                )
        return answers


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
