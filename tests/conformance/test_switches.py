"""JAX's own switches around a whole run: each leaves the numbers of plain JAX as they are, under every strategy.

A switch is on while the strategy initialises, feeds, steps, checks and fetches.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jdist
from jdist.errors import StepError
from tests.by_default import some
from tests.conformance.families import FAMILIES
from tests.conformance.matrix import OPTIMIZERS
from tests.toys import step_of

ROWS = 40
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(ROWS, 4)).astype(np.float32),
    "y": RNG.normal(size=ROWS).astype(np.float32),
}


def create_state() -> jdist.TrainState:
    return jdist.TrainState.create(
        params={"w": jnp.asarray(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)), "b": jnp.zeros(3)},
        tx=optax.sgd(0.1),
        rng=jax.random.key(0),
        seen=jnp.zeros((), jnp.int32),
        average=jnp.zeros((), jnp.float32),
        aggregation={"seen": "sum", "average": "mean"},
    )


def train_step(state: jdist.TrainState, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
        return jdist.mean((hidden.sum(-1) - batch["y"]) ** 2, batch["mask"])

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    drawn = jax.random.uniform(jdist.replica_rng(state.rng))
    metrics = {
        "loss": loss,
        "rows": jdist.all_reduce(batch["mask"].sum(), "sum"),
        "largest": jdist.all_reduce(jnp.abs(batch["x"]).max(), "max"),
        "gathered": jnp.abs(jdist.all_gather(batch["x"][:1])).max() * 0,
        "drawn": drawn * 0,
    }
    seen = state.extra["seen"] + batch["mask"].sum(dtype=jnp.int32)
    average = 0.9 * state.extra["average"] + 0.1 * jdist.mean(batch["x"].mean(-1), batch["mask"])
    return state.apply_gradients(grads=grads, seen=seen, average=average), metrics


def train(strategy: jdist.Strategy, step: Callable[..., Any] = train_step, **options: Any) -> dict[str, Any]:
    state = strategy.init(create_state)
    run = jdist.distribute(step, strategy, **options)
    history = []
    for batch in strategy.distribute_dataset(jdist.data.from_arrays(DATA, global_batch=16)):
        state, metrics = run(state, batch)
        history.append(metrics)
    strategy.check(state)
    state = strategy.fetch(state)
    return {"params": state.params, "extra": state.extra, "metrics": jax.device_get(history)}


@contextlib.contextmanager
def config(name: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def around(count: int, axis: str, kind: AxisType) -> Any:
    return jax.set_mesh(jax.make_mesh((count,), (axis,), axis_types=(kind,), devices=jax.devices()[-count:]))


SWITCHES: dict[str, Callable[[], Any]] = {
    "mesh_explicit": lambda: around(8, "data", AxisType.Explicit),
    "mesh_of_the_same_axis": lambda: around(8, "replica", AxisType.Auto),
    "mesh_of_another_size": lambda: around(2, "data", AxisType.Explicit),
    "x64": lambda: config("jax_enable_x64", True),
    "strict_promotion": lambda: config("jax_numpy_dtype_promotion", "strict"),
    "disable_jit": lambda: config("jax_disable_jit", True),
    "debug_nans": lambda: config("jax_debug_nans", True),
    "tracer_leaks": lambda: config("jax_check_tracer_leaks", True),
    "rbg_keys": lambda: config("jax_default_prng_impl", "rbg"),
    "keys_not_partitionable": lambda: config("jax_threefry_partitionable", False),
    "default_device": lambda: config("jax_default_device", jax.devices()[3]),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "matmul_precision": lambda: config("jax_default_matmul_precision", "highest"),
}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "default": jdist.default,
    "one_device": jdist.one_device,
    "mirrored": jdist.mirrored,
    "two_devices": lambda: jdist.mirrored(jax.devices()[:2]),
    "pmap": lambda: jdist.mirrored(transform="pmap"),
    "global_view": lambda: jdist.mirrored(transform="jit"),
    "sharded": lambda: jdist.sharded(whole_below=1),
    "within": lambda: jdist.sharded(within=2, whole_below=1),
    "central_storage": jdist.central_storage,
}
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "accumulate": {"accumulate": 2}, "skip": {"non_finite": "skip"}}
EVERY = list(itertools.product(SWITCHES, STRATEGIES, OPTIONS))


def pairwise() -> list[tuple[str, str, str]]:
    """Every switch under every strategy once, the options in turn so that each meets every switch."""
    options = list(OPTIONS)
    return [
        (switch, strategy, options[(i + j) % len(options)])
        for i, switch in enumerate(SWITCHES)
        for j, strategy in enumerate(STRATEGIES)
    ]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return train(jdist.default())


@pytest.mark.parametrize(
    ("switch", "strategy", "options"),
    [pytest.param(*each, marks=() if each in set(pairwise()) else pytest.mark.full) for each in EVERY],
)
def test_numbers_are_those_without_the_switch(switch, strategy, options, expected):
    if (switch, strategy) == ("transfer_guard", "default"):  # which hands on numpy's arrays, as plain JAX would
        with SWITCHES[switch](), pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
            train(jdist.default(), **OPTIONS[options])
        return
    with SWITCHES[switch]():
        found = train(STRATEGIES[strategy](), **OPTIONS[options])
    # As for all conformance under SGD: devices sum in another order.
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("switch", ["mesh_explicit", "mesh_of_another_size", "transfer_guard"])
@pytest.mark.parametrize("strategy", ["two_devices", "pmap", "sharded", "central_storage"])
def test_all_that_is_not_a_call_of_a_step_works_under_a_switch(switch, strategy):
    strategy = STRATEGIES[strategy]()
    step = jdist.distribute(train_step, strategy)
    evaluate = jdist.distribute(
        lambda state, batch: {"loss": train_step(state, batch)[1]["loss"]}, strategy, returns="metrics"
    )
    batch = {**DATA, "mask": np.ones(ROWS, bool)}
    state = create_state()
    plan = {"global_batch": 16, "steps": 2, "progress": False, "log_to": None, "verify": "strict"}
    with SWITCHES[switch]():
        assert step.preview(state, batch).changes_state
        assert step.jaxpr(state, batch) is not None
        assert jdist.verify(step, state, batch).ok
        jdist.fit(train_step, state, DATA, strategy=strategy, eval_step=evaluate, eval_data=DATA, **plan)
        assert jdist.evaluate(evaluate, state, DATA, global_batch=16)["loss"] > 0


MESHES = [name for name in SWITCHES if name.startswith("mesh")]
STRATEGIES_OF_FAMILIES = ["two_devices", "pmap", "sharded", "central_storage"]
OF_FAMILIES = list(itertools.product(FAMILIES, MESHES, STRATEGIES_OF_FAMILIES))
ONE_EACH = [(family, MESHES[i % 3], STRATEGIES_OF_FAMILIES[i % 4]) for i, family in enumerate(FAMILIES)]


@pytest.mark.parametrize(("family", "mesh", "strategy"), some(OF_FAMILIES, ONE_EACH))
def test_a_family_of_models_under_a_foreign_mesh_is_what_it_is_without(family, mesh, strategy):
    run = functools.partial(FAMILIES[family], STRATEGIES[strategy](), OPTIMIZERS["sgd"]())
    with SWITCHES[mesh]():
        inside = run()
    outside = run()
    jax.tree.map(np.testing.assert_array_equal, (inside.params, inside.losses), (outside.params, outside.losses))


def test_constraints_over_an_axis_inside_a_replica_work_with_and_without_the_mesh_in_context():
    @step_of
    def constrained(w, batch):
        hidden = jax.lax.with_sharding_constraint(batch["x"] @ w["w"], PartitionSpec(None, "model"))
        return jdist.mean(hidden.sum(-1) ** 2, batch["mask"])

    def losses(strategy):
        w = strategy.init(lambda: {"w": jnp.ones((4, 2))})
        step = jdist.distribute(constrained, strategy)
        source = jdist.data.from_arrays({"x": DATA["x"]}, global_batch=16)
        result = []
        for batch in strategy.distribute_dataset(source):
            w, metrics = step(w, batch)
            result.append(float(metrics["loss"]))
        return result

    strategies = [jdist.sharded(mesh={"replica": -1, "model": 2}, rules=[("w", (None, "model"))]) for _ in range(2)]
    with jax.set_mesh(strategies[0].mesh):
        inside = losses(strategies[0])
    assert inside == losses(strategies[1])


@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "pmap", "global_view", "sharded", "central_storage"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_that_a_step_names_itself_is_refused_by_name(strategy, kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    if kind == "Explicit":
        mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])

    def step(w, batch):
        x = jax.lax.with_sharding_constraint(batch["x"], NamedSharding(mesh, PartitionSpec("data")))
        return w, {"mean": x.mean()}

    made = STRATEGIES[strategy]()
    with pytest.raises(StepError, match=r"names a mesh of its own, and \w+ runs it over"):
        jdist.distribute(step, made)(0.0, DATA | {"x": DATA["x"][:16], "y": DATA["y"][:16]})
