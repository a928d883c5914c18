"""nnx's own way: `train_step(model, optimizer, metrics, batch)` changes its arguments and returns nothing."""

import jax
import numpy as np
import optax
from flax import nnx


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.linear1 = nnx.Linear(6, 16, rngs=rngs)
        self.linear2 = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.linear2(nnx.relu(self.linear1(x)))


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["label"]).mean()
    return loss, logits


def main(strategy):
    rng = np.random.default_rng(7)
    images = rng.normal(size=(8, 32, 6)).astype(np.float32)
    batches = [{"image": x, "label": x[:, :3].argmax(-1).astype(np.int32)} for x in images]

    model = Classifier(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.3, momentum=0.5), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    @nnx.jit
    # jdist: @jdist.nnx.distribute(strategy)
    def train_step(model, optimizer, metrics, batch):
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        # jdist: grad_fn = jdist.nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    history = []
    for step, batch in enumerate(batches):
        # jdist: for step, batch in enumerate(strategy.distribute_dataset(batches)):
        train_step(model, optimizer, metrics, batch)
        if step % 2 == 1:
            history.append({name: float(value) for name, value in metrics.compute().items()})
            metrics.reset()
    state = jax.tree.map(lambda x: x, nnx.state((model, optimizer)))
    return {"state": state, "losses": [h["loss"] for h in history], "history": history}
