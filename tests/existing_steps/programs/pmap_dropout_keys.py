"""The translation example's habits under pmap: padding, summed metrics with their denominator, a dropout key a device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import common_utils, train_state
from jax import lax


class Tagger(nn.Module):
    @nn.compact
    def __call__(self, tokens, train=True):
        x = nn.Embed(12, 16)(tokens)
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(12)(x)


def create_train_state(rng):
    model = Tagger()
    params = model.init(rng, jnp.ones((1, 6), jnp.int32), train=False)["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.5, momentum=0.9))


def compute_metrics(logits, targets, weights):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights
    hits = (jnp.argmax(logits, -1) == targets) * weights
    metrics = {"loss": losses.sum(), "accuracy": hits.sum(), "denominator": weights.sum()}
    return lax.psum(metrics, axis_name="batch")


def train_step(state, batch, dropout_rng):
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)
    weights = jnp.where(batch["targets"] > 0, 1, 0).astype(jnp.float32)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["inputs"], rngs={"dropout": dropout_rng})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (losses * weights).sum() / weights.sum(), logits

    (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = lax.pmean(grads, axis_name="batch")
    return state.apply_gradients(grads=grads), compute_metrics(logits, batch["targets"], weights)


def load_batches(num_steps):
    rng = np.random.default_rng(8)
    for _ in range(num_steps):
        inputs = rng.integers(1, 12, (32, 6))
        lengths = rng.integers(2, 7, 32)
        yield {"inputs": inputs, "targets": np.where(np.arange(6) < lengths[:, None], 12 - inputs, 0)}


def main(strategy):
    state = jax_utils.replicate(create_train_state(jax.random.key(0)))
    # jdist: state = create_train_state(jax.random.key(0))
    dropout_rngs = jax.random.split(jax.random.key(1), jax.local_device_count())
    p_train_step = jax.pmap(train_step, axis_name="batch", donate_argnums=(0,))
    # jdist: roles = {"args": ("state", "per_replica", "per_replica"), "returns": ("state", "per_replica")}
    # jdist: p_train_step = jdist.distribute(train_step, strategy, **roles)
    train_metrics = []
    for batch in map(common_utils.shard, load_batches(6)):
        state, metrics = p_train_step(state, batch, dropout_rngs)
        train_metrics.append(metrics)
    sums = common_utils.get_metrics(train_metrics)
    denominator = sums.pop("denominator")
    summary = jax.tree.map(lambda x: (x / denominator).tolist(), sums)
    state = jax_utils.unreplicate(state)
    # jdist: state = strategy.fetch(state)
    return {"state": state, "losses": summary["loss"], "summary": summary}
