"""The strategies, steps and batches that tests use again and again."""

import jax
import numpy as np

import jdist
from jdist.loop.report.metrics_file import COSTS

DEVICES = ["cpu:0", "cpu:1"]
TWO = jdist.mirrored(DEVICES)
TRANSFORMS = {
    "shard_map": TWO,
    "pmap": jdist.mirrored(DEVICES, transform="pmap"),
    "jit": jdist.mirrored(DEVICES, transform="jit"),
}
EVERY = {"default": jdist.default(), "one_device": jdist.one_device("cpu:2"), **TRANSFORMS}
ON_ALL_DEVICES = [
    jdist.default(),
    jdist.one_device(),
    *(jdist.mirrored(transform=t) for t in TRANSFORMS),
    jdist.central_storage(),
]

# How a state may lie on the devices; a model of the last has a "dense/kernel" whose columns 4 devices share.
LAYOUTS = {
    "default": jdist.default,
    "one_device": jdist.one_device,
    "mirrored": jdist.mirrored,
    "sharded 5": lambda: jdist.sharded(jax.devices()[:5], whole_below=8),
    "sharded within": lambda: jdist.sharded(jax.devices()[:6], within=3, whole_below=8),
    "model axis": lambda: jdist.sharded(
        mesh={"replica": 2, "model": 4}, rules=[("dense/kernel", (None, "model"))], whole_below=8
    ),
    "central_storage": jdist.central_storage,
}


def every_of_one_process():
    """Two that ask the environment or put the state elsewhere as well."""
    return {**EVERY, "multi_worker": jdist.multi_worker(), "central_storage": jdist.central_storage(DEVICES)}


BATCH = {"x": np.arange(4, dtype=np.float32), "y": np.ones(4, np.float32), "z": np.ones(4, np.int32)}


def add(w, batch):
    """Adds the mean of x."""
    return w + jdist.all_reduce(batch["x"].mean()), {"x": batch["x"].mean()}


def step_of(loss_fn, rate=0.1):
    """A step down a loss of parameters and batch: by the optimiser of a TrainState, else by `rate` times the gradient."""

    def step(state, batch):
        has_optimizer = hasattr(state, "apply_gradients")
        params = state.params if has_optimizer else state
        loss, grads = jdist.value_and_grad(lambda params: loss_fn(params, batch))(params)
        if has_optimizer:
            return state.apply_gradients(grads=grads), {"loss": loss}
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), {"loss": loss}

    return step


def state_of(task, tx):
    """A task's first state, compiled as one program: far quicker than one operation at a time."""
    return jax.jit(lambda key: task.create_state(key, tx))(jax.random.key(0))


def masked_batch(seed=0):
    """Rows of a linear regression, of which the last 6 are padding: whole microbatches of a replica are."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(16, 3)), rng.normal(size=16)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32), "mask": np.arange(16) < 10}


def numbers(tree):
    """Float64 arrays of a tree on the host, of keys their data."""

    def number(x):
        x = x if isinstance(x, jax.Array) else np.asarray(x)  # a parameter server's are still to come
        return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return jax.tree.map(lambda x: np.asarray(number(x), np.float64), tree)


def assert_close(got, want, *, rtol=0.0, atol=0.0):
    """Two trees have the same paths, shapes and dtypes, and within a tolerance the same values; of keys their data."""
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(want), strict=True)
    for (path, a), (same, b) in pairs:
        name = jax.tree_util.keystr(path)
        assert name == jax.tree_util.keystr(same)
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=name)


def without_costs(rows):
    """Rows without what no two runs have the same."""
    return [{name: value for name, value in row.items() if name not in ("time_s", *COSTS)} for row in rows]
