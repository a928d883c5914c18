"""Two models: a student that learns from labels and from a teacher, who is the average of the student and gets no gradient."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import jdist

ROWS = 240

model = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(10)])


class States(struct.PyTreeNode):
    student: TrainState
    teacher: dict


def create_states(key):
    params = model.init(key, jnp.zeros((1, 64)))
    tx = optax.sgd(optax.exponential_decay(0.5, 2, 0.9))
    return States(student=TrainState.create(apply_fn=model.apply, params=params, tx=tx), teacher=params)


def train_step(states, batch):
    def loss_fn(params, teacher):
        logits = states.student.apply_fn(params, batch["image"])
        of_teacher = jax.lax.stop_gradient(states.student.apply_fn(teacher, batch["image"]))
        supervised = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        consistency = ((jax.nn.softmax(logits) - jax.nn.softmax(of_teacher)) ** 2).sum(-1)
        labelled = batch["mask"] * (jnp.arange(10) < 5)[batch["label"]]  # labels of half of the classes alone
        return jdist.mean(supervised, labelled) + jdist.mean(consistency, batch["mask"])

    loss, (grads, none) = jdist.value_and_grad(loss_fn, argnums=(0, 1))(states.student.params, states.teacher)
    student = states.student.apply_gradients(grads=grads)
    teacher = optax.incremental_update(student.params, states.teacher, 0.1)
    return States(student=student, teacher=teacher), {"loss": loss, "of_teacher": optax.tree.norm(none)}


def main(strategy):
    digits = load_digits()
    arrays = {"image": digits.data[:ROWS].astype("float32") / 16, "label": digits.target[:ROWS]}
    dataset = jdist.data.from_arrays(arrays, global_batch=64, shuffle_seed=9, epochs=2)
    states = strategy.init(create_states, jax.random.key(10))
    step = jdist.distribute(train_step, strategy)
    history = []
    for batch in strategy.distribute_dataset(dataset):
        states, metrics = step(states, batch)
        history.append(metrics)
    assert all(float(m["of_teacher"]) == 0 for m in history)
    return {"state": strategy.fetch(states), "losses": [float(m["loss"]) for m in history]}
