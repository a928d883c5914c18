"""A step for one replica -> a step over a mesh."""
