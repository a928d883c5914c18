"""nnx with dropout and synchronised batch norm as a pure step: split once, merged in the step, its state returned."""

import numpy as np
import optax
from flax import nnx

import jdist
from tests.examples.training import train

ROWS, FEATURES = 128, 6


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear1 = nnx.Linear(FEATURES, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        # Whole units are dropped, for all rows alike: the draw is then the same on any number of replicas.
        self.dropout = nnx.Dropout(0.2, broadcast_dims=(0,), rngs=rngs)
        self.linear2 = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.linear2(self.dropout(nnx.relu(self.norm(self.linear1(x)))))[:, 0]


def create():
    model = Net(nnx.Rngs(0, dropout=1))
    return model, nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)


graphdef, _ = nnx.split(nnx.eval_shape(create))


def train_step(state, batch):
    model, optimizer = nnx.merge(graphdef, state)
    model.norm.axis_name = jdist.replica_axes()  # a model that is made outside of a step cannot know them

    def loss_fn(model):
        return jdist.mean((model(batch["x"]) - batch["y"]) ** 2, batch["mask"])

    loss, grads = jdist.nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), {"loss": loss}


def main(strategy):
    rng = np.random.default_rng(11)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    dataset = jdist.data.from_arrays({"x": x, "y": np.tanh(x.sum(-1))}, global_batch=32, shuffle_seed=11, epochs=3)
    state, history = train(strategy, lambda key: nnx.state(create()), train_step, dataset, 0)
    return {"state": state, "losses": history["loss"]}
