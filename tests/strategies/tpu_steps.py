"""Two steps, and their shapes, that tests compile for TPUs which are not here: a CNN and a transformer of 163 MB."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jdist
from examples.models.transformer import Block
from jdist.plan.collectives import collectives, host_copies
from jdist.plan.hlo import parse
from jdist.tasks import digits

COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)")
TOPOLOGIES = {"v4:2x2x1": 4, "v5e:2x4": 8, "v6e:16x16": 256, "v5p:16x16x16": 4096}


def batch_of(rows, **leaves):
    made = {k: jax.ShapeDtypeStruct((rows, *shape), dtype) for k, (shape, dtype) in leaves.items()}
    return made | {"mask": jax.ShapeDtypeStruct((rows,), bool)}


def stacked(batch, steps):
    """The batches of several steps of one call."""
    return batch if steps == 1 else jax.tree.map(lambda x: jax.ShapeDtypeStruct((steps, *x.shape), x.dtype), batch)


def size_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def the_all_reduce(step, state, batch):
    """Compiles a step whose state is replicated; its collectives, which must be of one kind and over one axis."""
    module = parse(step.lower(state, batch).compile().as_text())
    (all_reduces,) = collectives(module, dict(step.strategy.mesh.shape))
    check_donated(module, state)
    assert host_copies(module)[0] == 0
    return all_reduces


def check_donated(module, state):
    aliases = len(re.findall(r"\((\d+), \{\}, m\w+-alias\)", module.header))
    assert aliases == len(jax.tree.leaves(state))  # every leaf of the donated state is used again


def host_computations(text):
    """The text of every computation that a host runs."""
    blocks = re.findall(r"^%[^\n]*\{\n(.*?)^\}([^\n]*)", text, re.DOTALL | re.MULTILINE)
    return [body for body, attributes in blocks if 'execution_thread="host"' in attributes]


def digits_step(strategy, **options):
    task = digits.make()
    state = jax.eval_shape(lambda key: task.create_state(key, optax.adamw(1e-3)), jax.random.key(0))
    return jdist.distribute(task.train_step, strategy, **options), state


def digits_batch(rows):
    return batch_of(rows, image=((8, 8, 1), jnp.float32), label=((), jnp.int32))


LAYERS, WIDTH, LENGTH, TOKENS = 92, 192, 16, 257


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Block(heads=8, layers=LAYERS, dropout=0.0, dtype=jnp.float32)(x), None


class ScannedTransformer(nn.Module):
    """The text task's blocks, stacked in one scan: the compiler sees one block, which takes it seconds, not minutes."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(TOKENS, WIDTH)(tokens)
        stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return nn.Dense(TOKENS)(stack()(x, None)[0])


def transformer_step(strategy):
    """The step and the shapes of its state: none of the 163 MB is allocated."""
    model = ScannedTransformer()

    def create(key):
        params = model.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]
        return jdist.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(1e-2))

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["tokens"][:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
            return jdist.mean(losses, batch["mask"])

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    state = jax.eval_shape(create, jax.random.key(0))
    assert size_bytes(state.params) >= 160e6
    return jdist.distribute(step, strategy), state


def transformer_batch(rows):
    return batch_of(rows, tokens=((LENGTH + 1,), jnp.int32))
