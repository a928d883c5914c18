"""Fine-tuning: the backbone is frozen (`optax.set_to_zero`), of the head only the kernel learns (`stop_gradient`)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jdist
from tests.examples.training import digits, train


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, name="backbone")(x))
        return nn.Dense(10, name="head")(x)


def labels(params):
    return {name: jax.tree.map(lambda _, name=name: name, part) for name, part in params.items()}


model = Classifier()
tx = optax.partition({"backbone": optax.set_to_zero(), "head": optax.sgd(0.5, momentum=0.9)}, labels)


def create_state(key):
    return TrainState.create(apply_fn=model.apply, params=model.init(key, jnp.zeros((1, 64)))["params"], tx=tx)


def train_step(state, batch):
    def loss_fn(params):
        head = {**params["head"], "bias": jax.lax.stop_gradient(params["head"]["bias"])}
        logits = state.apply_fn({"params": {**params, "head": head}}, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jdist.mean(losses, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def main(strategy):
    before = jax.tree.map(np.copy, strategy.fetch(strategy.init(create_state, jax.random.key(2))).params)
    state, history = train(strategy, create_state, train_step, digits(2), 2)
    jax.tree.map(np.testing.assert_array_equal, state.params["backbone"], before["backbone"])
    np.testing.assert_array_equal(state.params["head"]["bias"], before["head"]["bias"])
    assert np.any(state.params["head"]["kernel"] != before["head"]["kernel"])
    return {"state": state, "losses": history["loss"]}
