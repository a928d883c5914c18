"""Replicas of several devices: rules and flax's metadata divide arrays inside a replica, and the numbers are one device's."""

import collections
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdist
from jdist.checkpoint.checkpointer import Checkpointer
from jdist.core.sharded_leaf import ShardedLeaf
from jdist.errors import ReplicaDivergenceError, StepError, StrategyError
from tests.by_default import some
from tests.conformance.families import FAMILIES
from tests.conformance.matrix import OPTIMIZERS, OPTIONS
from tests.toys import assert_close, step_of

RULES = {
    "cnn_synced_batchnorm": [("Conv_0/kernel", (None, None, None, "model")), ("Dense_0/kernel", ("model",))],
    "lstm": [("h./kernel", (None, "model")), ("Dense_0/kernel", ("model",))],
    "transformer": [
        ("(query|key|value)/kernel", (None, "model")),
        ("out/kernel", ("model",)),
        ("Dense_1/kernel", (None, "model")),
        ("Dense_2/kernel", ("model", None)),
    ],
    "plain_pytree": [("w", (None, "model")), ("v", ("model",))],
    "params_and_opt_state": [("w", (None, "model")), ("v", ("model",))],
    "gan": [("generator/.*w", (None, "model")), ("discriminator/.*w", ("model",))],
    "nnx_mlp": [("first/kernel", (None, "model")), ("first/bias", ("model",)), ("second/kernel", ("model",))],
}
WAYS = {
    "state": {},
    "optimizer": {"shard": "optimizer"},
    "alone": {"within": 1},
    "within": {"within": 2},
}
CASES = [(way, family, option) for way in WAYS for family in RULES for option in OPTIONS]
CHOSEN = [
    ("state", "transformer", "plain"),
    ("state", "nnx_mlp", "accumulate"),
    ("state", "cnn_synced_batchnorm", "steps_per_call"),
    ("state", "lstm", "skip_non_finite"),
    ("optimizer", "plain_pytree", "accumulate_and_steps_per_call"),
    ("optimizer", "nnx_mlp", "keep_state"),
    ("alone", "params_and_opt_state", "accumulate"),
    ("alone", "gan", "plain"),
    ("within", "gan", "keep_state"),
]


def with_model_axis(rules=(), model=2, **options):
    mesh = {"replica": -1, "model": model}
    return jdist.sharded(mesh=mesh, rules=rules, whole_below=0, most_whole=1, **options)


@functools.cache
def one_device(family, accumulate):
    return FAMILIES[family](jdist.one_device(), OPTIMIZERS["sgd"](), accumulate=accumulate)


@pytest.mark.parametrize(("way", "family", "option"), some(CASES, CHOSEN))
def test_conformance(way, family, option):
    options = dict(OPTIONS[option])
    strategy = with_model_axis(RULES[family], **WAYS[way])
    got = FAMILIES[family](strategy, OPTIMIZERS["sgd"](), **options)
    meets = options.get("accumulate", 1) > 1 and family == "cnn_synced_batchnorm"
    if meets:
        want = FAMILIES[family](
            jdist.one_device(), OPTIMIZERS["sgd"](), microbatches_of=strategy.num_replicas, **options
        )
    else:
        want = one_device(family, options.get("accumulate", 1))
    # As in tests/conformance: sums over replicas are made in another order.
    np.testing.assert_allclose(got.losses, want.losses, rtol=0, atol=1e-5)
    assert_close(got.params, want.params, atol=2e-5)
    assert got.compilations_after_first_call == 0
    assert got.shardings_kept


LAYERS, WIDTH, HIDDEN, ROWS = 3, 32, 64, 40
STACKED = [
    ("up/kernel", (None, None, "model")),
    ("up/bias", (None, "model")),
    ("down/kernel", (None, "model")),
    ("first", (None, "model")),
    ("last", ("model",)),
]
BATCHES = [{"x": np.random.default_rng(i).normal(size=(ROWS, WIDTH)).astype(np.float32)} for i in range(6)]
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def create(tx=ADAMW):
    keys = jax.random.split(jax.random.key(0), 4)

    def weights(key, *shape):
        return jax.random.normal(key, shape) / shape[-2] ** 0.5

    up = {"kernel": weights(keys[0], LAYERS, WIDTH, HIDDEN), "bias": jnp.zeros((LAYERS, HIDDEN))}
    # `first` and `last` have one shape, and are divided along different axes.
    params = {
        "layers": {"up": up, "down": {"kernel": weights(keys[1], LAYERS, HIDDEN, WIDTH)}},
        "first": weights(keys[2], WIDTH, WIDTH),
        "last": weights(keys[3], WIDTH, WIDTH),
    }
    return jdist.TrainState.create(params=params, tx=tx)


def train_step(state, batch):
    def loss_fn(params):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]["kernel"] + w["up"]["bias"]) @ w["down"]["kernel"], None

        x, _ = jax.lax.scan(layer, jnp.tanh(batch["x"] @ params["first"]), params["layers"])
        return jnp.mean((x @ params["last"] - jnp.sin(batch["x"])) ** 2)

    loss, grads = jdist.value_and_grad(loss_fn)(state.params)
    new = state.apply_gradients(grads=grads)
    return new, {"loss": loss, "size": optax.tree.norm(new.params)}


def run(strategy, make=create, num_steps=6, **options):
    step = jdist.distribute(train_step, strategy, **options)
    state, metrics = strategy.init(make), []
    for i in range(num_steps):
        state, found = step(state, BATCHES[i % len(BATCHES)])
        metrics.append([found["loss"], found["size"]])
    return strategy.fetch(state), np.array(metrics), state


@functools.cache
def expected():
    return run(jdist.one_device())


@pytest.mark.parametrize("model", some([2, 4, 8], [4, 8]))
@pytest.mark.parametrize("way", some(list(WAYS), ["state", "optimizer"]))
def test_stacked_layers_under_a_clipped_optimiser(way, model):
    within = {"within": 1} if model == 8 and way == "within" else {}
    got, metrics, _ = run(with_model_axis(STACKED, model, **{**WAYS[way], **within}))
    want, expected_metrics, _ = expected()
    np.testing.assert_allclose(metrics, expected_metrics, rtol=2e-6)
    # AdamW divides by the size of the gradient: in these steps by up to 1e-2 of a parameter's own change.
    assert_close(got.params, want.params, atol=1e-4)


def collectives(step, state, batch):
    text = step.lower(state, batch).compile().as_text()
    found = re.findall(
        r"= (?:\((.*?)\)|(\S+)) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)", text
    )
    return [(kind, shapes or shape) for shapes, shape, kind in found]


def test_layers_are_gathered_from_the_replicas_alone_each_device_its_own_columns():
    strategy = with_model_axis(STACKED, 4)
    found = collectives(jdist.distribute(train_step, strategy), strategy.init(create), BATCHES[0])
    gathered = [shape.split("{")[0] for kind, shape in found if kind == "all-gather"]
    gathered = [
        shape for shape in gathered if not shape.startswith("f32[20,")
    ]  # what the layers compute, inside a replica
    # Of each kernel the columns, or rows, of one of four devices; forward and backward.
    sizes = {"f32[32,16]": 2, "f32[16,32]": 2, "f32[32,8]": 2, "f32[8,32]": 2}
    counts = collections.Counter(gathered)
    assert set(counts) == set(sizes), gathered
    assert all(count <= sizes[shape] for shape, count in counts.items())
    assert sum(kind == "reduce-scatter" for kind, _ in found) == 4
    # The products inside a replica, forward and backward.
    assert sum(kind == "all-reduce" and "f32[20," in shape for kind, shape in found) >= 2


def test_bytes_of_a_device():
    strategy = with_model_axis(STACKED, 4)
    state = strategy.init(create)
    report = strategy.report(state)
    kernel = next(leaf for leaf in report.leaves if leaf.path == "params['layers']['up']['kernel']")
    assert kernel.bytes_per_device == LAYERS * WIDTH * HIDDEN * 4 // 8
    assert kernel.kept == "in 8 parts over replica=2 x model=4: [3, 16, 16] each, by 'up/kernel'"
    device = jax.devices()[5]
    held = sum(
        shard.data.nbytes for x in jax.tree.leaves(state) for shard in x.addressable_shards if shard.device == device
    )
    assert held == report.bytes_per_device
    assert report.bytes_per_device <= report.num_bytes * (1 / 8 + 0.02)
    assert strategy.num_replicas == 2
    assert "2 replicas of 4 devices each" in str(strategy)


def test_the_moments_are_divided_as_their_parameter_and_factors_are_not():
    rules = [("up/kernel", (None, None, "model"))]
    strategy = with_model_axis(rules, 2)
    paths = {leaf.path: leaf.kept for leaf in strategy.report(jax.eval_shape(create)).leaves}
    assert all("model=2" in kept for path, kept in paths.items() if "'up']['kernel']" in path)
    factored = strategy.report(
        jax.eval_shape(functools.partial(create, optax.adafactor(1e-2, min_dim_size_to_factor=8)))
    )
    by_path = {leaf.path: leaf.kept for leaf in factored.leaves}
    row = next(kept for path, kept in by_path.items() if "v_row" in path and "'up']['kernel']" in path)
    assert "model" not in row


@pytest.mark.parametrize("name", some(["adafactor", "muon", "lamb"], ["adafactor", "lamb"]))
def test_other_optimisers(name):
    tx = {
        "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
        "muon": optax.contrib.muon(1e-2),
        "lamb": optax.lamb(1e-2),
    }[name]
    make = functools.partial(create, tx)
    got, metrics, _ = run(with_model_axis(STACKED, 2), make, 3)
    want, expected_metrics, _ = run(jdist.one_device(), make, 3)
    np.testing.assert_allclose(metrics, expected_metrics, rtol=1e-5)
    assert_close(got.params, want.params, atol=1e-4)


class Block(nn.Module):
    """Its kernels say how they are divided: one by mesh axes, one by logical names."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(HIDDEN, kernel_init=nn.with_partitioning(init, (None, "model")))(x)
        rules = [("hidden", "model"), ("width", None)]
        return nn.Dense(WIDTH, kernel_init=nn.with_logical_partitioning(init, ("hidden", "width"), rules=rules))(
            nn.tanh(x)
        )


class TestMetadata:
    def test_linen(self):
        model = Block()

        def make():
            params = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
            return jdist.TrainState.create(params=params, tx=optax.adam(1e-2))

        @step_of
        def step(params, batch):
            return jnp.mean((model.apply({"params": params}, batch["x"]) - jnp.sin(batch["x"])) ** 2)

        losses = []
        for strategy in (with_model_axis(model=4), jdist.sharded(jax.devices()[:1], mesh={"replica": 1, "model": 1})):
            state, distributed = strategy.init(make), jdist.distribute(step, strategy)
            found = []
            for batch in BATCHES:
                state, metrics = distributed(state, batch)
                found.append(float(metrics["loss"]))
            losses.append(found)
            if len(strategy.devices) > 1:
                kept = {leaf.path: leaf.kept for leaf in strategy.report(state).leaves}
                divided = [path for path, how in kept.items() if "model=4" in how and "by the metadata" in how]
                assert len(divided) == 6  # two kernels, and two moments of each
        np.testing.assert_allclose(*losses, rtol=1e-5)

    def test_nnx(self):
        losses = []
        for strategy in (with_model_axis(model=2), jdist.one_device()):
            mesh = strategy.mesh if strategy.model_axes else jax.make_mesh((1,), ("model",))
            with jax.set_mesh(mesh):
                init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
                model = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=nnx.Rngs(0))
                optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

            @jdist.nnx.distribute(strategy)
            def step(model, optimizer, batch):
                def loss_fn(model):
                    return jnp.mean((model(batch["x"]) - jnp.sin(batch["x"])) ** 2)

                loss, grads = jdist.nnx.value_and_grad(loss_fn)(model)
                optimizer.update(model, grads)
                return {"loss": loss}

            losses.append([float(step(model, optimizer, batch)["loss"]) for batch in BATCHES])
            if strategy.model_axes:
                kernel = model.kernel[...] if not isinstance(model.kernel.get_value(), ShardedLeaf) else None
                stored = model.kernel.get_value().stored if kernel is None else kernel
                assert "model" in str(stored.sharding.spec)
        np.testing.assert_allclose(*losses, rtol=1e-5)

    def test_a_strategy_without_such_an_axis_says_what_to_do(self):
        model, strategy = Block(), jdist.mirrored()
        params = strategy.init(lambda: model.init(jax.random.key(0), jnp.ones((1, WIDTH))))

        def step(params, batch):
            return params, {"y": model.apply(params, batch["x"]).mean()}

        found = "mirrored has no mesh axis 'model', over which flax's metadata"
        remedies = r"Add the axis, `jdist\.sharded\(mesh=.*\)`, remove the metadata, .*, or .* by flax's axis rules"
        with pytest.raises(StepError, match=f"{found}.*{remedies}"):
            jdist.distribute(step, strategy)(params, BATCHES[0])

    def test_a_rule_that_says_the_same_is_no_second_one(self):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("model", None))
        model = nn.Dense(8, kernel_init=init)
        strategy = with_model_axis([("kernel", ("model",))])
        state = strategy.init(lambda: model.init(jax.random.key(0), jnp.ones((1, 4))))
        assert any("over model" in leaf.kept for leaf in strategy.report(state).leaves)

    def test_an_axis_that_the_mesh_has_not(self):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "experts"))
        model = nn.Dense(8, kernel_init=init)
        with pytest.raises(
            StepError, match="the leaf params/kernel name the axis 'experts', which the mesh does not have"
        ):
            with_model_axis().init(lambda: model.init(jax.random.key(0), jnp.ones((1, 4))))


@pytest.mark.parametrize("way", some(list(WAYS), ["state"]))
def test_checkpoints_go_to_other_meshes_and_strategies(way, tmp_path):
    make = functools.partial(with_model_axis, STACKED)
    strategy = make(4, **WAYS[way])
    want, _, state = run(strategy, num_steps=2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, state)
    others = [make(2), make(8, within=1), jdist.sharded(), jdist.mirrored(), strategy, jdist.central_storage()]
    for other in others:
        with Checkpointer(tmp_path) as checkpointer:
            restored = checkpointer.restore(other.init(create))
        assert_close(other.fetch(restored.state), want)


def test_a_state_of_another_strategy_is_laid_out():
    state = jdist.mirrored().init(create)
    strategy = with_model_axis(STACKED, 4)
    state, _ = jdist.distribute(train_step, strategy, donate=False)(state, BATCHES[0])
    kernel = state.params["layers"]["up"]["kernel"]
    assert isinstance(kernel, ShardedLeaf)
    assert kernel.stored.sharding.spec == jax.sharding.PartitionSpec(None, ("replica",), "model")


@pytest.mark.parametrize(
    ("name", "num_devices", "who"),
    [
        ("last", 2, r"params\['last'\], part 1: replicas \[2\] differ from the majority"),
        ("first", 2, r"params\['first'\]: the devices of replicas \[2\] differ among each other"),
        ("first", 8, r"params\['first'\]: the devices of replicas \[0\] differ among each other"),
    ],
)
def test_a_device_whose_copy_differs_is_found(name, num_devices, who):
    strategy = with_model_axis([rule for rule in STACKED if rule[0] != "first"], num_devices, within=1)
    state = strategy.init(create)
    leaf = state.params[name]
    parts = [np.array(shard.data) for shard in leaf.addressable_shards]
    parts[5].reshape(-1)[0] += 1
    arrays = [jax.device_put(x, shard.device) for x, shard in zip(parts, leaf.addressable_shards, strict=True)]
    state.params[name] = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)
    with pytest.raises(ReplicaDivergenceError, match=who):
        strategy.check(state)


def test_gradients_of_states_whose_leaves_of_one_shape_have_different_rules():
    def create():
        def new(key):
            weights = {"w": jax.random.normal(jax.random.key(key), (6, 6))}
            return jdist.TrainState.create(params=weights, tx=optax.sgd(0.1))

        return {"actor": new(0), "critic": new(1)}

    def step(state, batch):
        new = {}
        for name in ("critic", "actor"):

            def loss_fn(params):
                return jdist.mean((batch["x"][:, :6] @ params["w"]).sum(-1) ** 2)

            loss, grads = jdist.value_and_grad(loss_fn)(state[name].params)
            new[name] = state[name].apply_gradients(grads=grads)
        return new, {"loss": loss}

    rules = [("actor/params/w", (None, "model")), ("critic/params/w", ("model",))]
    results = []
    for strategy in (with_model_axis(rules, devices=jax.devices()[:4]), jdist.one_device()):
        state, metrics = jdist.distribute(step, strategy)(strategy.init(create), BATCHES[0])
        results.append((strategy.fetch(state), metrics))
    assert_close(*results, rtol=1e-5)


def test_gradients_by_several_leaves_of_one_shape_with_different_rules():
    def step(state, batch):
        def loss_fn(first, last):
            return jnp.mean((batch["x"] @ first @ last - jnp.sin(batch["x"])) ** 2)

        args = state.params["first"], state.params["last"]
        loss, (first, last) = jdist.value_and_grad(loss_fn, argnums=(0, 1))(*args)
        grads = jax.tree.map(jnp.zeros_like, state.params) | {"first": first, "last": last}
        return state.apply_gradients(grads=grads), {"loss": loss}

    results = []
    for strategy in (with_model_axis(STACKED, 2), jdist.one_device()):
        make = functools.partial(create, optax.sgd(0.1))
        state, metrics = jdist.distribute(step, strategy)(strategy.init(make), BATCHES[0])
        results.append((strategy.fetch(state), metrics))
    assert_close(*results, atol=1e-6)


def test_a_parameter_called_value():
    strategy = with_model_axis([("attn/value", (None, "model"))])
    names = ("query", "key", "value")
    leaves = strategy.report(strategy.init(lambda: {"attn": {name: jnp.ones((8, 8)) for name in names}})).leaves
    assert ["model=" in leaf.kept for leaf in leaves] == [False, False, True]  # in the order of their names


def test_several_states_are_made_one_by_one_though_each_has_its_own_rule():
    strategy = with_model_axis([("actor/w", (None, "model")), ("critic/w", ("model",))])
    states = [strategy.init(lambda name=name: {name: {"w": jnp.ones((8, 8))}}) for name in ("actor", "critic")]
    assert all("model=" in strategy.report(state).leaves[0].kept for state in states)


class TestWhatIsRefused:
    def test_calls_of_the_host(self):
        def step(state, batch):
            jax.experimental.io_callback(lambda _: None, None, state.step)
            return train_step(state, batch)

        strategy = with_model_axis(STACKED)
        with pytest.raises(StepError, match=r"calls the host .* has the axes model inside a replica"):
            jdist.distribute(step, strategy)(strategy.init(create), BATCHES[0])

    def test_a_leaf_of_which_no_other_axis_divides_well(self):
        state = {"w": jnp.zeros((3, 200_000))}
        strategy = jdist.sharded(mesh={"replica": -1, "model": 2}, rules=[("w", (None, "model"))])
        with pytest.raises(StepError, match=r"50.0% of .*A leaf that a rule divides .*`most_whole=") as caught:
            strategy.init(lambda: state)
        assert "whole_below" not in str(caught.value)

    @pytest.mark.parametrize(
        ("rules", "message"),
        [
            (
                [("up/kernels", (None, None, "model"))],
                r"matches no leaf of the state. The nearest path is '\w+/layers/up/kernel'",
            ),
            ([("bias", (None, None, "model"))], "3 entries, and the leaf params/layers/up/bias has 2 axes"),
            ([("up/kernel", ("model",))], "axis 0 of the leaf params/layers/up/kernel among 2 devices.*has 3 elements"),
            (
                [("kernel", (None, None, "model")), ("up/.*", (None, "model"))],
                r"two rules divide the leaf .*: \('kernel', .*\) and \('up/\.\*', \(None, 'model'\)\)",
            ),
            ([], "model=2 inside a replica, and no leaf of the state is divided over it: give `rules`"),
        ],
    )
    def test_rules_that_do_not_fit_the_state(self, rules, message):
        strategy = with_model_axis(rules)
        with pytest.raises(StepError, match=message):
            jdist.distribute(train_step, strategy)(jdist.one_device().init(create), BATCHES[0])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mesh": {"replica": -1, "model": 3}}, "its sizes must multiply to the number of devices, 8"),
            ({"mesh": {"replica": -1, "model": -1}}, "one may be -1"),
            ({"mesh": {"model": 2}}, "`mesh` has no axis 'replica'"),
            ({"mesh": [2, 4]}, "must be the sizes of the mesh's axes by name"),
            ({"mesh": {"replica": -1, "model": 0}}, "sizes are 1 or more"),
            ({"rules": [("w", (None, "model"))]}, "it has none, see `mesh`"),
            ({"mesh": {"replica": -1, "model": 2}, "rules": [("w", ("replica",))]}, "the state is cut anyway"),
            ({"mesh": {"replica": -1, "model": 2}, "rules": [("w", (None,))]}, "names no axis"),
            ({"mesh": {"replica": -1, "model": 2}, "rules": [("w", ("model", "model"))]}, "each once"),
            ({"mesh": {"replica": -1, "model": 2}, "rules": [("(", ("model",))]}, "is not a regular expression"),
            ({"mesh": {"replica": -1, "model": 2}, "rules": ["w"]}, "must be pairs of a pattern and axes"),
            ({"mesh": {"replica": -1, "model": 2}, "rules": [("(?i)W", ("model",))]}, "is not a regular expression"),
            ({"mesh": {"replica": -1, "model": 2}, "rules": [("w", (1, "model"))]}, "neither None nor a name"),
            (
                {"mesh": {"replica": -1, "replica_group": 2}, "within": 2},
                "has an axis 'replica_group', a name that `within`",
            ),
            ({"mesh": {"replica": -1, "model": 4}, "within": 4}, "divide the number of replicas, 2"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(StrategyError, match=re.escape(message)):
            jdist.sharded(**options)
