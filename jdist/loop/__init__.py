"""The training loop: `fit`, `evaluate`, `predict`."""
