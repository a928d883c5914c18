"""What a training run tells: a bar or lines while it lasts, rows of metrics, curves."""
