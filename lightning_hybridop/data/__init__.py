"""Data for the recipes: texts and questions, in ready LightningDataModules."""
