"""The simulator: what a way to train would cost on given devices, before anything runs."""
