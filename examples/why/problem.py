"""The model and the data of docs/why.md: a small MLP, 1,003 rows, batches of 128."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

ROWS, EPOCHS = 128, 2  # rows of a global batch; the last one of an epoch has 107

model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(10)])
tx = optax.sgd(0.1, momentum=0.9)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels

rng = np.random.default_rng(0)
label = rng.integers(10, size=1003).astype(np.int32)
image = (rng.normal(size=(10, 64))[label] + rng.normal(size=(1003, 64))).astype(np.float32)


def create_params(key):
    return model.init(key, jnp.zeros((1, 64)))["params"]
