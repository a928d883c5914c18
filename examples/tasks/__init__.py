"""Tasks that configs/ names: text, and MNIST's files."""
