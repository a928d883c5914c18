"""One PPO update with its clip range by keyword: `(state, batch, *, clip_param) -> (state, loss)`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class ActorCritic(nn.Module):
    num_actions: int = 3

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(16)(x))
        return nn.log_softmax(nn.Dense(self.num_actions)(x)), nn.Dense(1)(x)[:, 0]


def loss_fn(params, apply_fn, minibatch, clip_param, vf_coeff, entropy_coeff):
    observations, actions, old_log_probs, returns, advantages = minibatch
    log_probs, values = apply_fn({"params": params}, observations)
    value_loss = jnp.mean(jnp.square(returns - values))
    entropy = jnp.sum(-jnp.exp(log_probs) * log_probs, axis=1).mean()
    taken = jnp.take_along_axis(log_probs, actions[:, None], axis=1)[:, 0]
    ratios = jnp.exp(taken - old_log_probs)
    clipped = jnp.clip(ratios, 1.0 - clip_param, 1.0 + clip_param)
    policy_loss = -jnp.mean(jnp.minimum(ratios * advantages, clipped * advantages))
    return policy_loss + vf_coeff * value_loss - entropy_coeff * entropy


def collect(seed, steps=64):
    rng = np.random.default_rng(seed)
    observations = rng.normal(size=(steps, 4)).astype(np.float32)
    actions = rng.integers(0, 3, steps)
    returns = observations.sum(-1)
    advantages = (observations[:, :3].argmax(-1) == actions) - np.float32(1 / 3)
    return observations, actions, np.full(steps, -np.log(3), np.float32), returns, advantages.astype(np.float32)


def main(strategy):
    model = ActorCritic()
    params = model.init(jax.random.PRNGKey(0), jnp.ones((1, 4)))["params"]
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @functools.partial(jax.jit, static_argnames="vf_coeff")
    # jdist: @jdist.distribute(strategy, static_argnames="vf_coeff")
    def train_step(state, batch, *, clip_param, vf_coeff, entropy_coeff):
        grad_fn = jax.value_and_grad(loss_fn)
        # jdist: grad_fn = jdist.value_and_grad(loss_fn)
        loss, grads = grad_fn(state.params, state.apply_fn, batch, clip_param, vf_coeff, entropy_coeff)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for i, batch in enumerate(collect(0) for _ in range(6)):
        # jdist: for i, batch in enumerate(strategy.distribute_dataset(collect(0) for _ in range(6))):
        alpha = 1.0 - i / 6
        state, loss = train_step(state, batch, clip_param=0.1 * alpha, vf_coeff=0.5, entropy_coeff=0.01)
        losses.append(float(loss))
    return {"state": state, "losses": losses}
