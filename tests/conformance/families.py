"""One small model of every family, each with the step a user would write for it.

Every family is `run(strategy, tx, **options) -> Run`: 20 optimiser steps over the same 60 rows, 5 epochs of 4 batches
of 16, the last of each epoch 4 rows short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jdist
from jdist.core.remote import shapes_of
from jdist.core.step_state import user_states

ROWS, GLOBAL_BATCH, EPOCHS, CLASSES = 60, 16, 5, 3
STEPS = EPOCHS * -(-ROWS // GLOBAL_BATCH)


@dataclasses.dataclass(frozen=True)
class Run:
    """What 20 steps gave: parameters on the host, the loss of every step, and how often a later call compiled."""

    params: Any
    losses: np.ndarray
    compilations_after_first_call: int
    shardings_kept: bool


class compilations:
    """Counts the programs that JAX compiles within a `with` block."""

    def __enter__(self) -> compilations:
        self.count, self.on = 0, True
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        self.count += self.on and event == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *_: object) -> None:
        self.on = False  # JAX has no public way to take one listener out


def dataset(strategy: jdist.Strategy, arrays: Any, options: dict[str, Any]) -> Any:
    source = jdist.data.from_arrays(arrays, global_batch=GLOBAL_BATCH, shuffle_seed=7, epochs=EPOCHS)
    return strategy.distribute_dataset(source, steps_per_call=options.get("steps_per_call", 1))


def train(strategy: jdist.Strategy, create: Any, step: Any, arrays: Any, options: dict[str, Any]) -> Run:
    """Trains a pure state, or several, by a decorated step.

    `microbatches_of=n` has one device meet, in each microbatch, the rows that a microbatch of `n` replicas has.
    """
    options = dict(options)
    n, k = options.pop("microbatches_of", 1), options.get("accumulate", 1)

    lead = int(options.get("steps_per_call", 1) > 1)

    def arranged(x: Any) -> Any:
        rows = np.asarray(x)
        steps, row = rows.shape[:lead], rows.shape[1 + lead :]
        return rows.reshape(*steps, n, k, -1, *row).swapaxes(lead, lead + 1).reshape(rows.shape)

    state = strategy.init(create, jax.random.key(0))
    laid_out = shardings(state)
    several = options.get("args", ()).count("state") > 1
    states = tuple(state) if several else (state,)
    train_step = jdist.distribute(step, strategy, **options)
    losses, compiled = [], 0
    for i, batch in enumerate(dataset(strategy, arrays, options)):
        batch = jax.tree.map(arranged, batch) if n > 1 else batch
        with compilations() as counted:
            *states, metrics = train_step(*states, batch)
        compiled += counted.count if i else 0
        losses.append(np.ravel(metrics["loss"]))
    state = tuple(states) if several else states[0]
    kept = shardings(user_states(state)) == laid_out
    assert jax.tree.structure(shapes_of(state)) == jax.tree.structure(shapes_of(train_step.last_state))
    fetched = strategy.fetch(state)
    if several:
        params = fetched[0]
    elif is_plain(fetched):
        params = fetched["params"]
    else:
        params = [s.params for s in jax.tree.leaves(fetched, is_leaf=is_train_state)]
    return Run(params, np.concatenate(losses), compiled, kept)


def shardings(state: Any) -> list[Any]:
    leaves = jax.tree.leaves(shapes_of(state))
    return [leaf if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.sharding for leaf in leaves]


def is_train_state(x: Any) -> bool:
    return isinstance(x, jdist.TrainState)


def is_plain(state: Any) -> bool:
    return isinstance(state, dict) and "params" in state


def labelled(shape: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, *shape)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES, ROWS)}


def classifier_step(model: nn.Module) -> Any:
    """The step of the README, for a linen classifier with or without batch statistics."""

    def step(state: jdist.TrainState, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = {"params": params, **state.extra}
            logits, new = model.apply(variables, batch["x"], mutable=list(state.extra))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return jdist.mean(losses, batch["mask"]), (new, logits)

        (loss, (new, logits)), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = jdist.mean(logits.argmax(-1) == batch["y"], batch["mask"])
        metrics = {"loss": loss, "accuracy": accuracy, "grad_norm": optax.tree.norm(grads)}
        return state.apply_gradients(grads=grads, **new), metrics

    return step


def linen(model: nn.Module, arrays: dict[str, np.ndarray]) -> Callable[..., Run]:
    def run(strategy: jdist.Strategy, tx: optax.GradientTransformation, **options: Any) -> Run:
        def create(key: jax.Array) -> jdist.TrainState:
            variables = model.init(key, jnp.asarray(arrays["x"][:1]))
            params = variables.pop("params")
            return jdist.TrainState.create(apply_fn=model.apply, params=params, tx=tx, **variables)

        return train(strategy, create, classifier_step(model), arrays, options)

    return run


class CNN(nn.Module):
    """A convolution and a batch normalisation that is synchronised over whatever replicas there are."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(4, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=False, axis_name=jdist.replica_axes())(x)
        return nn.Dense(CLASSES)(nn.relu(x).reshape(x.shape[0], -1))


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES)(nn.RNN(nn.OptimizedLSTMCell(8))(x)[:, -1])


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(8)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        x = x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(x.mean(1))


def small_params(key: jax.Array) -> Any:
    k1, k2 = jax.random.split(key)
    return {"w": jax.random.normal(k1, (6, 8)) * 0.3, "v": jax.random.normal(k2, (8, CLASSES)) * 0.3}


def small_loss(params: Any, batch: Any) -> jax.Array:
    logits = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jdist.mean(losses, batch["mask"])


def plain_pytree(strategy: jdist.Strategy, tx: optax.GradientTransformation, **options: Any) -> Run:
    """A dict of parameters and raw optax, as many programs have it."""

    def create(key: jax.Array) -> Any:
        params = small_params(key)
        return {"params": params, "opt": tx.init(params)}

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jdist.value_and_grad(lambda params: small_loss(params, batch))(state["params"])
        updates, opt = jdist.optimizer(tx).update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return train(strategy, create, step, labelled((6,)), options)


def params_and_opt_state(strategy: jdist.Strategy, tx: optax.GradientTransformation, **options: Any) -> Run:
    """Parameters and the optimiser's state as two arguments."""

    def create(key: jax.Array) -> Any:
        params = small_params(key)
        return params, tx.init(params)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jdist.value_and_grad(lambda params: small_loss(params, batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss}

    return train(strategy, create, step, labelled((6,)), {**options, "args": ("state", "state", "batch")})


def gan(strategy: jdist.Strategy, tx: optax.GradientTransformation, **options: Any) -> Run:
    """Two TrainStates with an optimiser each, both gradients at the parameters as they came in."""

    def create(key: jax.Array) -> Any:
        k1, k2 = jax.random.split(key)
        make = jdist.TrainState.create
        return {
            "generator": make(params={"w": jax.random.normal(k1, (4, 6)) * 0.3}, tx=tx),
            "discriminator": make(params={"w": jax.random.normal(k2, (6,)) * 0.3}, tx=optax.sgd(0.05)),
        }

    def step(state: Any, batch: Any) -> Any:
        g, d = state["generator"], state["discriminator"]

        def d_loss(params: Any) -> jax.Array:
            real, fake = batch["x"] @ params["w"], batch["z"] @ g.params["w"] @ params["w"]
            return jdist.mean(nn.softplus(-real) + nn.softplus(fake), batch["mask"])

        def g_loss(params: Any) -> jax.Array:
            return jdist.mean(nn.softplus(-(batch["z"] @ params["w"] @ d.params["w"])), batch["mask"])

        loss_d, grads_d = jdist.value_and_grad(d_loss)(d.params)
        loss_g, grads_g = jdist.value_and_grad(g_loss)(g.params)
        new = {"generator": g.apply_gradients(grads=grads_g), "discriminator": d.apply_gradients(grads=grads_d)}
        return new, {"loss": loss_d + loss_g}

    rng = np.random.default_rng(3)
    arrays = {"x": rng.normal(size=(ROWS, 6)).astype(np.float32), "z": rng.normal(size=(ROWS, 4)).astype(np.float32)}
    return train(strategy, create, step, arrays, options)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


def nnx_mlp(strategy: jdist.Strategy, tx: optax.GradientTransformation, **options: Any) -> Run:
    """nnx objects changed in place."""
    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy())

    @jdist.nnx.distribute(strategy, **options)
    def train_step(model: MLP, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch: Any) -> Any:
        def loss_fn(model: MLP) -> Any:
            logits = model(batch["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return jdist.mean(losses, batch["mask"]), logits

        (loss, logits), grads = jdist.nnx.value_and_grad(loss_fn, has_aux=True)(model)
        metrics.update(logits=logits, labels=batch["y"], mask=batch["mask"])
        optimizer.update(model, grads)
        return {"loss": loss}

    losses, compiled, laid_out = [], 0, []
    for i, batch in enumerate(dataset(strategy, labelled((6,)), options)):
        with compilations() as counted:
            losses.append(np.ravel(train_step(model, optimizer, metrics, batch)["loss"]))
        compiled += counted.count if i else 0
        laid_out = shardings(nnx.state((model, optimizer, metrics))) if i == 0 else laid_out
    kept = shardings(nnx.state((model, optimizer, metrics))) == laid_out
    assert int(metrics.accuracy.count[...]) == ROWS * EPOCHS  # every row once, padding left out, on any devices
    return Run(strategy.fetch(nnx.to_pure_dict(nnx.state(model, nnx.Param))), np.concatenate(losses), compiled, kept)


FAMILIES: dict[str, Callable[..., Run]] = {
    "cnn_synced_batchnorm": linen(CNN(), labelled((6, 6, 1))),
    "lstm": linen(LSTM(), labelled((5, 4))),
    "transformer": linen(Transformer(), labelled((5, 4))),
    "plain_pytree": plain_pytree,
    "params_and_opt_state": params_and_opt_state,
    "gan": gan,
    "nnx_mlp": nnx_mlp,
}
