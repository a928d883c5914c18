"""The imagenet example's half precision: `DynamicScale.value_and_grad(axis_name="batch")` under pmap."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import common_utils, train_state
from flax.training import dynamic_scale as dynamic_scale_lib
from jax import lax


class TrainState(train_state.TrainState):
    batch_stats: Any
    dynamic_scale: dynamic_scale_lib.DynamicScale


class Net(nn.Module):
    dtype: Any = jnp.float16

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(16, use_bias=False, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype, axis_name="batch")(x)
        return nn.Dense(3, dtype=self.dtype)(nn.relu(x)).astype(jnp.float32)


def create_train_state(rng):
    model = Net()
    variables = model.init(rng, jnp.ones((1, 8)), train=False)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.sgd(0.2, momentum=0.9),
        batch_stats=variables["batch_stats"],
        dynamic_scale=dynamic_scale_lib.DynamicScale(scale=2.0**21, growth_interval=3),
    )


def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new_model_state = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return loss, (new_model_state, logits)

    dynamic_scale = state.dynamic_scale
    grad_fn = dynamic_scale.value_and_grad(loss_fn, has_aux=True, axis_name="batch")
    dynamic_scale, is_fin, aux, grads = grad_fn(state.params)
    new_model_state, _ = aux[1]
    new_state = state.apply_gradients(grads=grads, batch_stats=new_model_state["batch_stats"])
    # Where the gradients hold Inf or NaN the old parameters and optimiser state are kept.
    select_fn = functools.partial(jnp.where, is_fin)
    new_state = new_state.replace(
        opt_state=jax.tree.map(select_fn, new_state.opt_state, state.opt_state),
        params=jax.tree.map(select_fn, new_state.params, state.params),
        dynamic_scale=dynamic_scale,
    )
    metrics = lax.pmean({"loss": aux[0], "is_fin": is_fin.astype(jnp.float32)}, axis_name="batch")
    metrics["scale"] = dynamic_scale.scale
    return new_state, metrics


def main(strategy):
    rng = np.random.default_rng(6)
    xs = rng.normal(size=(10, 32, 8)).astype(np.float32)
    batches = [{"x": x, "y": x[:, :3].argmax(-1)} for x in xs]
    state = jax_utils.replicate(create_train_state(jax.random.key(0)))
    # jdist: state = create_train_state(jax.random.key(0))
    p_train_step = jax.pmap(train_step, axis_name="batch", donate_argnums=(0,))
    # jdist: p_train_step = jdist.distribute(train_step, strategy)
    history = []
    for batch in map(common_utils.shard, batches):
        # jdist: for batch in strategy.distribute_dataset(batches):
        state, metrics = p_train_step(state, batch)
        history.append(jax.tree.map(lambda x: float(x.mean()), metrics))
    state = jax_utils.unreplicate(state)
    # jdist: state = strategy.fetch(state)
    return {"state": state, "losses": [m["loss"] for m in history], "history": history}
