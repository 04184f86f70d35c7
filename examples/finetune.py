"""Teaches a language model to classify texts: an ordinary script for Lightning, transformers and peft.

    python examples/finetune.py texts.csv --model <hub id or folder>

The file has a header and the columns `text` and `label`; every tenth row is held out. The one line that knows of a
pipeline is `strategy=`: without it the script runs in one process.
"""

import argparse
import csv
from functools import partial

import lightning
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightning_hybridop import HybridOPStrategy


class Classifier(lightning.LightningModule):
    """A language model with LoRA adapters and a head with one score for each class."""

    def __init__(self, model, classes, padding_token):
        super().__init__()
        base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=classes)
        base.config.pad_token_id = padding_token
        lora = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules="all-linear")
        self.model = get_peft_model(base, lora)
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch, batch_idx):
        """Return the loss of a batch."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        """Measure loss and accuracy on held-out texts."""
        output = self.model(**batch)
        self.accuracy(output.logits, batch["labels"])
        self.log_dict({"val_loss": output.loss, "val_accuracy": self.accuracy}, prog_bar=True)

    def configure_optimizers(self):
        """Train what peft left trainable."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=5e-4)


def collate(rows, tokenizer, labels):
    """Return a batch of token numbers and class numbers."""
    batch = tokenizer(
        [row["text"] for row in rows], padding=True, truncation=True, max_length=128, return_tensors="pt"
    )
    return {**batch, "labels": torch.tensor([labels.index(row["label"]) for row in rows])}


def main():
    """Read the texts, train, and measure the held-out ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()

    lightning.seed_everything(0)
    with open(options.texts, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    labels = sorted({row["label"] for row in rows})
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    loader = partial(
        DataLoader, batch_size=8, collate_fn=partial(collate, tokenizer=tokenizer, labels=labels)
    )
    training = loader([row for i, row in enumerate(rows) if i % 10], shuffle=True)
    held_out = loader(rows[::10])

    trainer = lightning.Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        strategy=HybridOPStrategy(stages=2, zo_stages=1),
    )
    module = Classifier(options.model, len(labels), tokenizer.pad_token_id)
    trainer.fit(module, training, held_out)
    trainer.validate(module, held_out)


if __name__ == "__main__":
    main()
