"""Data for the recipes: labelled texts as prompts, in ready LightningDataModules."""
