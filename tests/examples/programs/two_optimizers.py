"""One model, two optimisers by `optax.partition`: the embedding by a clipped SGD, all else by one with momentum."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jdist
from tests.examples.training import train

ROWS, WORDS, LENGTH = 120, 24, 6


class BagOfWords(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(WORDS, 8, name="embedding")(tokens).mean(1)
        return nn.Dense(3)(nn.tanh(nn.Dense(16)(x)))


def labels(params):
    return jax.tree.map_with_path(lambda path, _: "embedding" if path[0].key == "embedding" else "rest", params)


model = BagOfWords()
tx = optax.partition(
    {
        "embedding": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(2.0)),
        "rest": optax.sgd(0.2, momentum=0.9, nesterov=True),
    },
    labels,
)


def create_state(key):
    params = model.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jdist.mean(losses, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def main(strategy):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, WORDS, (ROWS, LENGTH))
    arrays = {"tokens": tokens, "label": rng.integers(0, 3, WORDS)[tokens[:, 0]]}
    dataset = jdist.data.from_arrays(arrays, global_batch=32, shuffle_seed=3, epochs=3)
    state, history = train(strategy, create_state, train_step, dataset, 3)
    return {"state": state, "losses": history["loss"]}
