"""`jdist doctor`: what this machine and its cluster have, and what would keep a job from running."""
