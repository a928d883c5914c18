"""Memory of a device for a transformer in parts, compiled for hardware that is not here.

    python benchmarks/sharded_compile.py [--size 1b 7b] [--topology h100:8x8] [--strategy mirrored sharded optimizer]

A decoder of 1.2 or 6.7 billion parameters under AdamW, one row of 2,048 tokens a device in bfloat16, with its layers in a scan
and a `jax.checkpoint` around each: as in the hand-written gathers, for the comparison in docs/strategies/sharded.md.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import jdist

LENGTH, VOCABULARY = 2048, 32_000
SIZES = {"1b": (16, 2048, 16, 8192), "7b": (32, 4096, 32, 11_008)}  # layers, width, heads, hidden width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="*", choices=SIZES, default=["7b"])
    parser.add_argument("--topology", default="h100:8x8")
    parser.add_argument("--strategy", nargs="*", choices=("mirrored", "sharded", "optimizer"), default=["sharded"])
    arguments = parser.parse_args()
    for size in arguments.size:
        for name in arguments.strategy:
            measure(size, name, arguments.topology)


def measure(size: str, name: str, topology: str) -> None:
    layers, width, heads, hidden = SIZES[size]
    shard = {"mirrored": None, "sharded": "state", "optimizer": "optimizer"}[name]
    strategy = jdist.mirrored(topology=topology, shard=shard)

    def create():
        shapes = {"qkv": (width, 3 * width), "o": (width, width), "up": (width, 2 * hidden), "down": (hidden, width)}
        stack = {key: jnp.zeros((layers, *shape)) for key, shape in shapes.items()}
        stack |= {"n1": jnp.zeros((layers, width)), "n2": jnp.zeros((layers, width))}
        params = {"emb": jnp.zeros((VOCABULARY, width)), "out": jnp.zeros((width, VOCABULARY)), "layers": stack}
        return jdist.TrainState.create(params=params, tx=optax.adamw(1e-4))

    def half(x):
        return x.astype(jnp.bfloat16)

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + scale)

    def layer(x, w):
        w = jax.tree.map(half, w)
        rows = x.shape[0]
        q, k, v = jnp.split(norm(x, w["n1"]) @ w["qkv"], 3, -1)
        q, k, v = (each.reshape(rows, LENGTH, heads, -1) for each in (q, k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / (width // heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores.astype(jnp.float32), -1e9)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(x.dtype), v)
        x = x + mixed.reshape(x.shape) @ w["o"]
        a, b = jnp.split(norm(x, w["n2"]) @ w["up"], 2, -1)
        return x + (jax.nn.silu(a) * b) @ w["down"], None

    def step(state, batch):
        tokens = batch["tokens"]

        def loss_fn(params):
            x, _ = jax.lax.scan(jax.checkpoint(layer), half(params["emb"])[tokens], params["layers"])
            logits = (x @ half(params["out"])).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    batch = {"tokens": jax.ShapeDtypeStruct((strategy.num_replicas, LENGTH), jnp.int32)}
    start = time.perf_counter()
    memory = jdist.distribute(step, strategy).lower(jax.eval_shape(create), batch).compile().memory_analysis()
    seconds = time.perf_counter() - start
    print(
        f"{size} {topology} {name}: state and batch {memory.argument_size_in_bytes / 2**30:.2f} GiB, temporaries "
        f"{memory.temp_size_in_bytes / 2**30:.2f} GiB a device, {seconds:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
