"""Models of the examples, in flax."""
