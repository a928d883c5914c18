"""Schedule-free SGD: the state holds two sequences of parameters, and the model is evaluated at a third, their average."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jdist
from tests.examples.training import digits

model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(10)])
tx = optax.contrib.schedule_free_sgd(0.5, warmup_steps=2, b1=0.9)


def create_state(key):
    return TrainState.create(apply_fn=model.apply, params=model.init(key, jnp.zeros((1, 64))), tx=tx)


def losses_of(params, batch):
    logits = model.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def train_step(state, batch):
    loss, grads = jdist.value_and_grad(lambda params: jdist.mean(losses_of(params, batch), batch["mask"]))(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def eval_step(state, batch):
    params = optax.contrib.schedule_free_eval_params(state.opt_state, state.params)
    return {"loss": jdist.all_reduce(jdist.mean(losses_of(params, batch), batch["mask"]), "mean")}


def main(strategy):
    state = strategy.init(create_state, jax.random.key(13))
    step = jdist.distribute(train_step, strategy)
    evaluate = jdist.distribute(eval_step, strategy, returns="metrics")
    losses, evaluated = [], []
    for batch in strategy.distribute_dataset(digits(13)):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        evaluated.append(evaluate(state, batch)["loss"])
    return {
        "state": strategy.fetch(state),
        "losses": [float(loss) for loss in losses],
        "evaluated": [float(loss) for loss in evaluated],
    }
