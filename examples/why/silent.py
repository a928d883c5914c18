"""Mistakes of a data-parallel step that raise no error, each measured on eight virtual devices: python silent.py"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from problem import ROWS, create_params, cross_entropy, image, label, model

DEVICES = jax.device_count()
WHOLE, SPLIT = PartitionSpec(), PartitionSpec("data")
mesh = jax.make_mesh((DEVICES,), ("data",))
params = create_params(jax.random.key(0))
full = {"image": image[:ROWS], "label": label[:ROWS]}
real = len(label) % ROWS
short = {
    "image": np.pad(image[-real:], ((0, ROWS - real), (0, 0))),
    "label": np.pad(label[-real:], (0, ROWS - real)),
    "mask": (np.arange(ROWS) < real).astype(np.float32),
}


def losses(params: Any, batch: Any) -> jax.Array:
    return cross_entropy(model.apply({"params": params}, batch["image"]), batch["label"])


def masked(params: Any, batch: Any) -> jax.Array:
    return (losses(params, batch) * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)


def error(tree: Any, right: Any) -> float:
    """Returns |tree - right| / |right|."""
    got, right = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(t))]) for t in (tree, right))
    return float(np.linalg.norm(got - right) / np.linalg.norm(right))


def on_each(fn: Callable[..., Any], whole: Any, rows: Any, out: PartitionSpec = WHOLE, **options: Any) -> Any:
    """Runs `fn` by shard_map, with `whole` on each device and a part of `rows`."""
    put = [jax.device_put(tree, NamedSharding(mesh, spec)) for tree, spec in ((whole, WHOLE), (rows, SPLIT))]
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(WHOLE, SPLIT), out_specs=out, **options))(*put)


def padding_counts_as_rows() -> str:
    got = jax.grad(lambda p: losses(p, short).mean())(params)
    return f"gradient {error(got, jax.grad(masked)(params, short)):.0%} off"


def mean_of_the_devices_means() -> str:
    got = on_each(jax.grad(lambda p, b: jax.lax.pmean(masked(p, b), "data")), params, short)
    return f"gradient {error(got, jax.grad(masked)(params, short)):.0%} off"


def mean_of_the_microbatches_means() -> str:
    halves = [{name: x[half] for name, x in short.items()} for half in (slice(ROWS // 2), slice(ROWS // 2, None))]
    got = jax.tree.map(lambda a, b: (a + b) / 2, *(jax.grad(masked)(params, half) for half in halves))
    return f"gradient {error(got, jax.grad(masked)(params, short)):.0%} off"


def forgotten_pmean() -> str:
    got = on_each(jax.grad(lambda p, b: losses(p, b).mean()), params, full)
    right = jax.grad(lambda p: losses(p, full).mean())(params)
    return f"gradient {1 + error(got, right):.0f} times too large"


def forgotten_pmean_unchecked() -> str:
    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: losses(p, batch).mean())(params)
        return jax.tree.map(lambda p, g: (p - 0.1 * g)[None], params, grads)

    copies = jax.device_get(on_each(step, params, full, SPLIT, check_vma=False))
    return f"{len(np.unique(copies['layers_2']['kernel'], axis=0))} different models"


def statistics_of_one_device() -> str:
    norm = nn.BatchNorm(use_running_average=False, momentum=0.0)
    variables = norm.init(jax.random.key(0), full["image"])

    def variance(variables: Any, x: Any) -> Any:
        return norm.apply(variables, x, mutable=["batch_stats"])[1]["batch_stats"]["var"]

    got = on_each(variance, variables, full["image"], check_vma=False)
    return f"variance {error(got, variance(variables, full['image'])):.0%} off"


def one_key_for_all() -> str:
    kept = on_each(lambda key, x: jax.random.bernoulli(key, 0.5, x.shape), jax.random.key(0), full["image"], SPLIT)
    return f"{len({part.tobytes() for part in np.split(np.asarray(kept), DEVICES)})} mask for {DEVICES} devices"


if __name__ == "__main__":
    for mistake in (
        padding_counts_as_rows,
        mean_of_the_microbatches_means,
        mean_of_the_devices_means,
        forgotten_pmean,
        forgotten_pmean_unchecked,
        statistics_of_one_device,
        one_key_for_all,
    ):
        print(f"{mistake.__name__.replace('_', ' ')}: {mistake()}")
