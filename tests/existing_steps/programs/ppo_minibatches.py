"""PPO in the style of purejaxrl: one call runs epochs of shuffled minibatches by `lax.scan`, each with its update."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

CONFIG = {"LR": 0.02, "UPDATE_EPOCHS": 2, "NUM_MINIBATCHES": 2, "CLIP_EPS": 0.2, "VF_COEF": 0.5, "ENT_COEF": 0.01}


class Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: jax.Array


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(16)(x))
        return nn.log_softmax(nn.Dense(3)(x)), nn.Dense(1)(x)[:, 0]


def _loss_fn(params, apply_fn, traj):
    log_probs, value = apply_fn(params, traj.obs)
    value_loss = jnp.square(value - traj.target).mean()
    ratio = jnp.exp(jnp.take_along_axis(log_probs, traj.action[:, None], 1)[:, 0] - traj.log_prob)
    gae = (traj.advantage - traj.advantage.mean()) / (traj.advantage.std() + 1e-8)
    clipped = jnp.clip(ratio, 1.0 - CONFIG["CLIP_EPS"], 1.0 + CONFIG["CLIP_EPS"])
    actor_loss = -jnp.minimum(ratio * gae, clipped * gae).mean()
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    total_loss = actor_loss + CONFIG["VF_COEF"] * value_loss - CONFIG["ENT_COEF"] * entropy
    return total_loss, (value_loss, actor_loss, entropy)


def collect(seed, steps=128):
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(steps, 4)).astype(np.float32)
    action = rng.integers(0, 3, steps)
    advantage = (obs[:, :3].argmax(-1) == action) + 0.1 * rng.normal(size=steps)
    log_prob = np.full(steps, -np.log(3.0), np.float32)
    return Transition(obs, action, log_prob, advantage.astype(np.float32), obs.sum(-1))


def main(strategy):
    network = ActorCritic()
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(CONFIG["LR"], eps=1e-5))
    rng, init_rng = jax.random.split(jax.random.PRNGKey(0))
    train_state = TrainState.create(apply_fn=network.apply, params=network.init(init_rng, jnp.zeros((1, 4))), tx=tx)

    def _update_minibatch(train_state, minibatch):
        grad_fn = jax.value_and_grad(_loss_fn, has_aux=True)
        # jdist: grad_fn = jdist.value_and_grad(_loss_fn, has_aux=True)
        (total_loss, _), grads = grad_fn(train_state.params, train_state.apply_fn, minibatch)
        return train_state.apply_gradients(grads=grads), total_loss

    def _update_epoch(update_state, _):
        train_state, traj_batch, rng = update_state
        rng, shuffle_rng = jax.random.split(rng)
        permutation = jax.random.permutation(shuffle_rng, traj_batch.obs.shape[0])
        shuffled = jax.tree.map(lambda x: jnp.take(x, permutation, axis=0), traj_batch)
        minibatches = jax.tree.map(lambda x: jnp.reshape(x, [CONFIG["NUM_MINIBATCHES"], -1, *x.shape[1:]]), shuffled)
        train_state, losses = jax.lax.scan(_update_minibatch, train_state, minibatches)
        return (train_state, traj_batch, rng), losses

    @jax.jit
    # jdist: @jdist.distribute(strategy)
    def update(train_state, traj_batch, rng):
        update_state = (train_state, traj_batch, rng)
        (train_state, _, _), losses = jax.lax.scan(_update_epoch, update_state, None, CONFIG["UPDATE_EPOCHS"])
        return train_state, losses

    history = []
    for i, traj_batch in enumerate(collect(seed=0) for _ in range(4)):
        # jdist: for i, traj_batch in enumerate(strategy.distribute_dataset(collect(seed=0) for _ in range(4))):
        train_state, losses = update(train_state, traj_batch, jax.random.fold_in(rng, i))
        history.append(np.asarray(losses))
    return {"state": train_state, "losses": [float(x.mean()) for x in history], "history": history}
