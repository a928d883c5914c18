"""nnx with dropout and batch norm, and keys of its own: `train_step(model, optimizer, metrics, rngs, batch)`."""

import numpy as np
import optax
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear1 = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(rate=0.1)
        self.linear2 = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = nnx.relu(self.norm(self.linear1(x)))
        return self.linear2(self.dropout(x, rngs=rngs))[:, 0]


def loss_fn(model, rngs, batch):
    return optax.squared_error(model(batch["x"], rngs), batch["y"]).mean()


def main(strategy):
    rng = np.random.default_rng(8)
    xs = rng.normal(size=(6, 128, 6)).astype(np.float32)
    batches = [{"x": x, "y": np.tanh(x.sum(-1))} for x in xs]
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    rngs = nnx.Rngs(dropout=1)

    @nnx.jit
    # jdist: @jdist.nnx.distribute(strategy)
    def train_step(model, optimizer, metrics, rngs, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, rngs, batch)
        # jdist: loss, grads = jdist.nnx.value_and_grad(loss_fn)(model, rngs, batch)
        metrics.update(loss=loss)
        optimizer.update(model, grads)

    losses = []
    for _ in range(4):
        model.train()
        for batch in batches:
            # jdist: for batch in strategy.distribute_dataset(batches):
            train_step(model, optimizer, metrics, rngs, batch)
        losses.append(float(metrics.compute()["loss"]))
        metrics.reset()
        model.eval()
        model(batches[0]["x"])
    return {"state": nnx.state((model, optimizer, rngs)), "losses": losses}
