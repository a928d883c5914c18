"""The imagenet example's habits: pmap, synchronised batch norm, `lax.pmean` of gradients and metrics."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import common_utils, train_state
from jax import lax


class TrainState(train_state.TrainState):
    batch_stats: Any


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(4, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name="batch")(x)
        x = nn.relu(x).mean(axis=(1, 2))
        return nn.Dense(2)(x)


def create_train_state(rng):
    model = ConvNet()
    variables = model.init(rng, jnp.ones((1, 6, 6, 1)), train=False)
    tx = optax.sgd(0.2, momentum=0.9, nesterov=True)
    return TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
    )


def compute_metrics(logits, labels):
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
    metrics = {"loss": loss, "accuracy": accuracy}
    return lax.pmean(metrics, axis_name="batch")


def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new_model_state = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        weight_l2 = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return loss + 0.5e-4 * weight_l2, (new_model_state, logits)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    aux, grads = grad_fn(state.params)
    grads = lax.pmean(grads, axis_name="batch")
    new_model_state, logits = aux[1]
    metrics = compute_metrics(logits, batch["label"])
    new_state = state.apply_gradients(grads=grads, batch_stats=new_model_state["batch_stats"])
    return new_state, metrics


def load_batches(num_steps, batch_size):
    rng = np.random.default_rng(5)
    for _ in range(num_steps):
        labels = rng.integers(0, 2, batch_size)
        noise = rng.normal(size=(batch_size, 6, 6, 1))
        stripes = np.arange(6) % 2 * 2 - 1
        images = np.where(labels[:, None, None, None] == 1, stripes[:, None, None], stripes[None, :, None]) + noise
        yield {"image": images.astype(np.float32), "label": labels}


def main(strategy):
    state = jax_utils.replicate(create_train_state(jax.random.key(0)))
    # jdist: state = create_train_state(jax.random.key(0))
    p_train_step = jax.pmap(train_step, axis_name="batch")
    # jdist: p_train_step = jdist.distribute(train_step, strategy)
    train_metrics = []
    for batch in map(common_utils.shard, load_batches(num_steps=6, batch_size=32)):
        # jdist: for batch in strategy.distribute_dataset(load_batches(num_steps=6, batch_size=32)):
        state, metrics = p_train_step(state, batch)
        train_metrics.append(jax.tree.map(lambda x: float(x.mean()), metrics))
    state = jax_utils.unreplicate(state)
    # jdist: state = strategy.fetch(state)
    return {"state": state, "losses": [m["loss"] for m in train_metrics], "metrics": train_metrics}
