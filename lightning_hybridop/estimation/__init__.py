"""Zeroth-order gradient estimation: directions as pure functions, estimators as formulas."""
