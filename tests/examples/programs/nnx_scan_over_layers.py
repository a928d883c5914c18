"""nnx objects changed in place: layers made by `nnx.vmap`, scanned and recomputed in the backward pass (`nnx.remat`)."""

import jax
import optax
from flax import nnx

import jdist
from tests.examples.training import digits

LAYERS, WIDTH = 6, 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x)))) / LAYERS


class Deep(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def make(rngs):
            return Block(rngs)

        self.first = nnx.Linear(64, WIDTH, rngs=rngs)
        self.blocks = make(rngs)
        self.last = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x, block):
            return block(x)

        return self.last(forward(self.first(x), self.blocks))


def main(strategy):
    model = Deep(nnx.Rngs(12))
    optimizer = nnx.Optimizer(
        model, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.2, momentum=0.9)), wrt=nnx.Param
    )

    @jdist.nnx.distribute(strategy)
    def train_step(model, optimizer, batch):
        def loss_fn(model):
            losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])
            return jdist.mean(losses, batch["mask"])

        loss, grads = jdist.nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    losses = []
    for batch in strategy.distribute_dataset(digits(12)):
        losses.append(train_step(model, optimizer, batch)["loss"])
    state = strategy.fetch(nnx.to_pure_dict(nnx.state((model, optimizer))))
    return {"state": jax.tree.leaves(state), "losses": [float(loss) for loss in losses]}
