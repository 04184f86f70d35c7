"""Which device holds which layers, decided before anything runs; knows nothing of torch or Lightning."""
