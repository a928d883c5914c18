"""A whole pmap loop: batch norm of each device's own rows, sharded batches, evaluation, `get_metrics`."""

import functools
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


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(16, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(3)(nn.relu(x))


def create_train_state(rng, learning_rate_fn):
    model = Net()
    variables = model.init(rng, jnp.ones((1, 8)), train=False)
    tx = optax.sgd(learning_rate_fn, momentum=0.9, nesterov=True)
    return TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
    )


def compute_metrics(logits, labels):
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    metrics = {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == labels)}
    return lax.pmean(metrics, axis_name="batch")


def train_step(state, batch, learning_rate_fn):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new_model_state = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return loss, (new_model_state, logits)

    aux, grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = lax.pmean(grads, axis_name="batch")
    new_model_state, logits = aux[1]
    metrics = compute_metrics(logits, batch["y"])
    metrics["learning_rate"] = learning_rate_fn(state.step)
    batch_stats = new_model_state["batch_stats"]
    # jdist: batch_stats = lax.pmean(new_model_state["batch_stats"], axis_name="batch")
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), metrics


def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["x"], train=False, mutable=False)
    return compute_metrics(logits, batch["y"])


sync_mean = jax.pmap(lambda x: lax.pmean(x, "x"), "x")


def sync_batch_stats(state):
    return state.replace(batch_stats=sync_mean(state.batch_stats))


def load_batches(num_steps):
    rng = np.random.default_rng(7)
    for _ in range(num_steps):
        x = rng.normal(size=(32, 8)).astype(np.float32)
        yield {"x": x, "y": x[:, :3].argmax(-1)}


def main(strategy):
    learning_rate_fn = optax.linear_schedule(0.3, 0.1, 8)
    step_fn = functools.partial(train_step, learning_rate_fn=learning_rate_fn)
    state = create_train_state(jax.random.key(0), learning_rate_fn)
    state = jax_utils.replicate(state)
    # jdist:
    p_train_step = jax.pmap(step_fn, axis_name="batch")
    # jdist: p_train_step = jdist.distribute(step_fn, strategy, args=("state", "per_replica"), returns=("state", "per_replica"))
    p_eval_step = jax.pmap(eval_step, axis_name="batch")
    # jdist: p_eval_step = jdist.distribute(eval_step, strategy, args=("state", "per_replica"), returns="per_replica")
    losses, summaries, train_metrics = [], [], []
    for step, batch in enumerate(map(common_utils.shard, load_batches(8)), start=1):
        state, metrics = p_train_step(state, batch)
        train_metrics.append(metrics)
        if step % 4 == 0:
            train_metrics = common_utils.get_metrics(train_metrics)
            losses.extend(map(float, train_metrics["loss"]))
            train_metrics = []
            state = sync_batch_stats(state)
            # jdist:
            eval_metrics = [p_eval_step(state, batch) for batch in map(common_utils.shard, load_batches(2))]
            eval_metrics = common_utils.get_metrics(eval_metrics)
            summaries.append(jax.tree.map(lambda x: float(x.mean()), eval_metrics))
    state = jax_utils.unreplicate(state)
    # jdist: state = strategy.fetch(state)
    return {"state": state, "losses": losses, "summaries": summaries}
