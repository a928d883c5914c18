"""An exported prediction gives the numbers of `jdist.predict`, in a process that cannot import jdist."""

import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import StepError
from jdist.step.base import Distributed
from tests.toys import TWO

X = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
DEFAULT = jdist.default()
STRATEGIES = [
    DEFAULT,
    TWO,
    jdist.sharded(["cpu:0", "cpu:1"], whole_below=0, most_whole=1),
    jdist.central_storage(["cpu:0", "cpu:1"]),
]
SERVER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "jdist":
            raise ImportError(f"{name} is not here")


sys.meta_path.insert(0, Blocker())
import jax
import numpy as np

artefact, data, results = sys.argv[1:]
serve = jax.export.deserialize(bytearray(open(artefact, "rb").read())).call
x = np.load(data)
np.savez(results, **{f"{name} {rows}": y for rows in (2, 7) for name, y in serve({"x": x[:rows]}).items()})
assert not any(name.partition(".")[0] == "jdist" for name in sys.modules)
"""


class Row(NamedTuple):
    x: jax.Array


def create():
    return jdist.TrainState.create(params={"w": jax.random.normal(jax.random.key(0), (3, 4))}, tx=optax.adam(1e-3))


def predict(state, batch):
    logits = batch["x"] @ state.params["w"]
    centred = logits - jdist.all_reduce(logits).mean(-1, keepdims=True) * jdist.num_replicas()
    return {"probability": jax.nn.softmax(centred), "label": logits.argmax(-1), "pairs": logits.reshape(-1, 2, 2)}


def test_a_process_without_jdist_serves_two_sizes_of_batches(tmp_path):
    state = TWO.init(create)
    (tmp_path / "model").write_bytes(jdist.export(predict, state, {"x": X[:4]}, strategy=TWO, platforms=["cpu"]))
    np.save(tmp_path / "x.npy", X)
    files = [str(tmp_path / name) for name in ("model", "x.npy", "results.npz")]
    subprocess.run([sys.executable, "-I", "-c", SERVER, *files], check=True, timeout=120, env={"JAX_PLATFORMS": "cpu"})
    with np.load(files[2]) as served:
        for rows in (2, 7):
            for name, expected in predict(TWO.fetch(state), {"x": X[:rows]}).items():
                np.testing.assert_allclose(served[f"{name} {rows}"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_the_state_of_any_strategy_gives_the_numbers_of_predict(strategy):
    def scores(state, batch):
        return batch["x"] @ state.params["w"]

    state = strategy.init(create)
    shapes = {"x": jax.ShapeDtypeStruct((4, 3), np.float32)}
    served = jax.export.deserialize(bytearray(jdist.export(scores, state, shapes, strategy=strategy)))
    expected = jdist.predict(scores, state, {"x": X}, strategy=strategy, global_batch=4)
    np.testing.assert_allclose(served.call({"x": X}), expected, rtol=1e-5, atol=1e-6)


def test_the_options_of_a_distributed_step_hold():
    @jdist.distribute(TWO, returns=("examples",), precision="bf16", batch_axis=1)
    def rounded(state, batch):
        assert batch.dtype == jnp.bfloat16
        return batch.swapaxes(0, 1) @ state["w"].astype(jnp.bfloat16)

    state = {"w": np.ones((3, 2), np.float32)}
    served = jax.export.deserialize(bytearray(jdist.export(rounded, state, X[:4].T)))
    result = served.call(X[:6].T)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, np.asarray(rounded(state, X[:6].T)))


def test_a_mesh_or_scope_around_the_call_changes_nothing():
    theirs = jax.make_mesh((2,), ("theirs",), devices=jax.devices()[:2])
    with jax.set_mesh(theirs), TWO.scope(), jax.disable_jit():
        served = jdist.export(lambda w, batch: batch * w, 2.0, X)
    np.testing.assert_array_equal(jax.export.deserialize(bytearray(served)).call(X[:2]), X[:2] * 2)


def loud(state, batch):
    jax.debug.print("{}", batch["x"])
    return batch["x"]


def asking_the_host(state, batch):
    return jax.pure_callback(lambda x: x, batch["x"], batch["x"])


@pytest.mark.parametrize(
    ("step", "batch", "options", "message"),
    [
        (3, {"x": X}, {}, "jdist.export needs a step, it got a int"),
        (
            jdist.distribute(predict, DEFAULT),
            {"x": X},
            {},
            r'needs `jdist.distribute\(step, strategy, returns=\("examples',
        ),
        (lambda s, b: b["x"][: int(b["x"].shape[0]) - 1], {"x": X}, {}, "depends on the number of rows: .*x.shape"),
        (
            lambda s, b: b["x"] if b["x"].shape[0] > 2 else 0,
            {"x": X},
            {},
            "depends on the number of rows: .*'rows' > '2'",
        ),
        (
            lambda s, b: [b["x"][i] for i in range(b["x"].shape[0])],
            {"x": X},
            {},
            "depends on the number of rows: .*range",
        ),
        (loud, {"x": X}, {}, "loud calls back into Python"),
        (asking_the_host, {"x": X}, {}, "asking_the_host calls back into Python"),
        (lambda s, b: b.x, Row(X), {}, "cannot be serialized: .*Row.* must be dicts, lists and tuples"),
        (lambda s, b: jdist.PerReplica(b["x"]), {"x": X}, {}, "cannot be serialized: .*PerReplica"),
        (lambda s, b: b["x"], {"x": 1.0}, {}, r"leaf \['x'\] of `batch` has shape \(\) and no axis 0"),
        (lambda s, b: b["x"], {"x": "abc"}, {}, r"the batch of jdist.export has a leaf .*\['x'\] is a str"),
        (lambda s, b: "abc", {"x": X}, {}, "what the step of jdist.export returns has a leaf .*is a str"),
        (predict, {"x": X}, {"platforms": "cpu"}, "`platforms` is 'cpu'; it must be a list of some of 'cpu', 'cuda'"),
        (predict, {"x": X}, {"platforms": ["gpu"]}, r"`platforms` is \['gpu'\]; it must be a list"),
    ],
)
def test_refusals(step, batch, options, message):
    strategy = None if isinstance(step, Distributed) else DEFAULT
    with pytest.raises(StepError, match=message):
        jdist.export(step, create(), batch, strategy=strategy, **options)
