"""What the programs of `programs/` share: handwritten digits, and the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from sklearn.datasets import load_digits

import jdist

ROWS = 240


def digits(seed: int, epochs: int = 2) -> Any:
    """Flat images and labels in batches of 64, of which the last of an epoch is short."""
    found = load_digits()
    arrays = {"image": found.data[:ROWS].astype("float32") / 16, "label": found.target[:ROWS]}
    return jdist.data.from_arrays(arrays, global_batch=64, shuffle_seed=seed, epochs=epochs)


def train(
    strategy: jdist.Strategy, create_state: Callable[..., Any], step: Callable[..., Any], dataset: Any, seed: int
) -> tuple[Any, dict[str, list[float]]]:
    """Trains by a step; returns the state on the host, and each metric of every step."""
    state = strategy.init(create_state, jax.random.key(seed))
    distributed, history = jdist.distribute(step, strategy), []
    for batch in strategy.distribute_dataset(dataset):
        state, metrics = distributed(state, batch)
        history.append(metrics)
    return strategy.fetch(state), {name: [float(m[name]) for m in history] for name in history[0]}
