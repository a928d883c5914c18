"""Two models: a student that learns from labels and from a teacher, who is the average of the student and gets no gradient."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct
from flax.training.train_state import TrainState

import jdist
from tests.examples.training import digits, train

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
    states, history = train(strategy, create_states, train_step, digits(9), 10)
    assert not any(history["of_teacher"])
    return {"state": states, "losses": history["loss"]}
