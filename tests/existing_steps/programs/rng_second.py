"""A byte model whose step takes the key second: `(train_state, rng, batch) -> (train_state, metrics)`."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class ByteModel(nn.Module):
    vocabulary: int = 11

    @nn.compact
    def __call__(self, tokens, deterministic):
        x = nn.Embed(self.vocabulary, 12)(tokens)
        x = nn.Dropout(0.1)(x, deterministic=deterministic)
        return nn.Dense(self.vocabulary)(x)


def main(strategy):
    rng = np.random.default_rng(3)
    starts = rng.integers(0, 11, size=(10, 16, 1))
    tokens = ((starts + 3 * np.arange(9)) % 11).astype(np.int32)
    batches = [{"input_tokens": t[:, :-1], "target_tokens": t[:, 1:]} for t in tokens]

    model = ByteModel()
    params = model.init(jax.random.key(0), tokens[0, :1], deterministic=True)["params"]
    train_state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(0.1))

    @partial(jax.jit, donate_argnums=0)
    # jdist: @jdist.distribute(strategy, args=("state", "replicated", "batch"))
    def train_step(train_state, rng, batch):
        def loss_and_accuracy(params):
            logits = train_state.apply_fn(
                {"params": params}, batch["input_tokens"], deterministic=False, rngs={"dropout": rng}
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target_tokens"])
            return losses.mean(), jnp.mean(logits.argmax(-1) == batch["target_tokens"])

        grad_fn = jax.value_and_grad(loss_and_accuracy, has_aux=True)
        # jdist: grad_fn = jdist.value_and_grad(loss_and_accuracy, has_aux=True)
        (loss, accuracy), grads = grad_fn(train_state.params)
        train_state = train_state.apply_gradients(grads=grads)
        return train_state, {"loss": loss, "accuracy": accuracy}

    rng = jax.random.key(1, impl="rbg")
    losses = []
    for batch in batches:
        # jdist: for batch in strategy.distribute_dataset(batches):
        rng, step_rng = jax.random.split(rng)
        train_state, metrics = train_step(train_state, step_rng, batch)
        losses.append(float(metrics["loss"]))
    return {"state": train_state, "losses": losses}
