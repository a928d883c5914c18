"""Data-parallel training by jdist."""

import jax
from problem import EPOCHS, ROWS, create_params, cross_entropy, image, label, model, tx

import jdist

strategy = jdist.mirrored()


@jdist.distribute(strategy)
def train_step(state, batch):
    def loss_fn(params):
        losses = cross_entropy(model.apply({"params": params}, batch["image"]), batch["label"])
        return jdist.mean(losses, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


state = strategy.init(lambda key: jdist.TrainState.create(params=create_params(key), tx=tx), jax.random.key(0))
arrays = {"image": image, "label": label}
state, history = jdist.fit(
    train_step, state, arrays, strategy=strategy, epochs=EPOCHS, global_batch=ROWS, progress=False, log_to=None
)
for epoch, means in enumerate(history.epochs):
    print(f"epoch {epoch}: loss {means['loss']:.5f}")
