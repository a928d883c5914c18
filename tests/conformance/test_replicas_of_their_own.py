"""What differs between replicas, dropout and unsynced batch statistics, against the replicas one after another."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist

GLOBAL_BATCH, STEPS = 16, 20


class Net(nn.Module):
    """Dropout, and a batch normalisation over one replica's rows alone."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(12)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=False)(x))


MODEL, TX = Net(), optax.sgd(0.1)


def create(key: jax.Array) -> jdist.TrainState:
    variables = MODEL.init({"params": key, "dropout": key}, jnp.zeros((1, 6)))
    return jdist.TrainState.create(
        params=variables["params"], tx=TX, rng=jax.random.key(9), batch_stats=variables["batch_stats"]
    )


def loss_fn(params: Any, stats: Any, key: jax.Array, batch: Any) -> Any:
    logits, new = MODEL.apply(
        {"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"], rngs={"dropout": key}
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jdist.mean(losses), new["batch_stats"]


def step(state: jdist.TrainState, batch: Any) -> Any:
    key = jdist.replica_rng(jax.random.fold_in(state.rng, state.step))
    (loss, stats), grads = jdist.value_and_grad(loss_fn, has_aux=True)(
        state.params, state.extra["batch_stats"], key, batch
    )
    return state.apply_gradients(grads=grads, batch_stats=jdist.all_reduce(stats, "mean")), {"loss": loss}


def one_after_another(batches: list[Any], num_replicas: int) -> tuple[jdist.TrainState, list[float]]:
    """The same training with plain JAX: each replica's slice in turn, means taken by hand."""
    gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    state, losses = create(jax.random.key(0)), []
    for batch in batches:
        rows = GLOBAL_BATCH // num_replicas
        results = []
        for i in range(num_replicas):
            key = jax.random.fold_in(jax.random.fold_in(state.rng, state.step), i)
            part = {name: leaf[i * rows : (i + 1) * rows] for name, leaf in batch.items()}
            results.append(gradient(state.params, state.extra["batch_stats"], key, part))
        (loss, stats), grads = jax.tree.map(lambda *parts: sum(parts) / num_replicas, *results)
        state = state.apply_gradients(grads=grads, batch_stats=stats)
        losses.append(float(loss))
    return state, losses


@pytest.mark.parametrize("transform", ["shard_map", "pmap"])
def test_equals_the_replicas_one_after_another(transform: Any):
    strategy = jdist.mirrored(jax.local_devices()[:4], transform=transform)
    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.normal(size=(GLOBAL_BATCH, 6)).astype(np.float32), "y": rng.integers(0, 3, GLOBAL_BATCH)}
        for _ in range(STEPS)
    ]
    expected, expected_losses = one_after_another(batches, strategy.num_replicas)

    state = strategy.init(create, jax.random.key(0))
    train_step = jdist.distribute(step, strategy, check_replicas=1)
    losses = []
    for batch in strategy.distribute_dataset(batches):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    got = strategy.fetch(state)

    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-5)
    for a, b in zip(
        jax.tree.leaves((got.params, got.extra)), jax.tree.leaves((expected.params, expected.extra)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)

    same_everywhere = jdist.distribute(lambda s, b: step(s, b)[1], strategy, returns="metrics")(state, batches[0])
    with pytest.warns(UserWarning, match="draws .* from a key that all replicas share"):
        shared_key = jdist.distribute(_with_shared_dropout, strategy, returns="metrics")(state, batches[0])
    assert abs(float(same_everywhere["loss"]) - float(shared_key["loss"])) > 1e-4  # dropout does differ by replica


def _with_shared_dropout(state: jdist.TrainState, batch: Any) -> Any:
    loss, _ = loss_fn(state.params, state.extra["batch_stats"], jax.random.fold_in(state.rng, state.step), batch)
    return {"loss": loss}
