"""Adversarial training by the fast gradient sign method: each row is moved by the sign of the loss's gradient by it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

optimizer = optax.sgd(0.2)


def logits_of(params, image):
    return jnp.tanh(image @ params["hidden"]) @ params["last"]


def loss_of(params, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, image), label).mean()


def main(strategy):
    rng = np.random.default_rng(5)
    images = rng.normal(size=(8, 32, 6)).astype(np.float32)
    teacher = rng.normal(size=(6, 3))
    batches = [{"image": x, "label": (x @ teacher).argmax(-1).astype(np.int32)} for x in images]

    @jax.jit
    # jdist: @jdist.distribute(strategy)
    def train_step(state, batch):
        by_image = jax.grad(loss_of, argnums=1)(state["params"], batch["image"], batch["label"])
        # jdist: by_image = jdist.grad(loss_of, argnums=1)(state["params"], batch["image"], batch["label"])
        image = batch["image"] + 0.05 * jnp.sign(by_image)
        loss, grads = jax.value_and_grad(loss_of)(state["params"], image, batch["label"])
        # jdist: loss, grads = jdist.value_and_grad(loss_of)(state["params"], image, batch["label"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {"loss": loss}

    params = {"hidden": rng.normal(size=(6, 16)) / 6**0.5, "last": rng.normal(size=(16, 3)) / 4}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    state, losses = {"params": params, "opt_state": optimizer.init(params)}, []
    for batch in batches:
        # jdist: for batch in strategy.distribute_dataset(batches):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return {"state": state, "losses": losses}
