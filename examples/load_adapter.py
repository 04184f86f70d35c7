"""Loads the adapter of a finished run into plain peft and measures its accuracy again, without any pipeline.

python examples/load_adapter.py outputs/<run>

Nothing of the strategy is used: transformers loads the base model, peft the adapter, and the most likely label word
is the answer. The script fails if the accuracy is not the one that the run itself reported.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from omegaconf import OmegaConf
from peft import PeftModel

from lightning_hybridop.commands.parts import factory
from lightning_hybridop.modules.language_models import load_language_model
from lightning_hybridop.modules.prompts import CLASSES


def main(folder: Path) -> int:
    """Print both accuracies and return 0 if they are equal."""
    config = OmegaConf.load(folder / "config.yaml")
    reported = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["after"]["val_accuracy"]

    base, tokenizer = load_language_model(config.model.name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing adapter weight is only a warning in peft
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        model = PeftModel.from_pretrained(base, folder / "adapter").eval()

    words = torch.tensor(
        [tokenizer(f" {name}", add_special_tokens=False)["input_ids"][0] for name in CLASSES]
    )

    data = factory(config.data)()
    data.setup("validate")
    right = rows = 0
    for batch in data.val_dataloader():
        with torch.no_grad():
            # The label word is each row's last token, so the position before it holds the answer.
            logits = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], logits_to_keep=2
            ).logits
        right += int((words[logits[:, 0, words].argmax(dim=-1)] == batch["labels"][:, -1]).sum())
        rows += len(logits)
    print(f"accuracy in plain peft: {right / rows:.4f} on {rows} rows; reported by the run: {reported:.4f}")
    return 0 if abs(right / rows - reported) < 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
