"""Models for the recipes: pretrained language models and ready LightningModules."""
