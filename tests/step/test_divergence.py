"""Replicas that differ are found, named, and told apart from those that do not."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jdist
from jdist.errors import ReplicaDivergenceError
from jdist.step import mesh_program as step_module
from jdist.step import placement
from jdist.step.divergence import compare, hash_leaf
from tests.toys import TWO

FOUR = jdist.mirrored(["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
hash_one = jax.jit(hash_leaf)
rng = np.random.default_rng(0)
LEAVES = {
    "float32": rng.normal(size=(3, 5)).astype(np.float32),
    "bfloat16": np.asarray(jnp.arange(15, dtype=jnp.bfloat16).reshape(3, 5) + 0.5),
    "float16": np.arange(15, dtype=np.float16).reshape(3, 5),
    "float8": np.asarray(jnp.arange(15, dtype=jnp.float8_e4m3fn)),
    "bool": rng.random(15) < 0.5,
    "int8": np.arange(-7, 8, dtype=np.int8),
    "uint32": rng.integers(0, 2**32, 15, np.uint32),
    "complex64": (rng.normal(size=15) + 1j * rng.normal(size=15)).astype(np.complex64),
    "scalar": np.float32(3),
}


@pytest.fixture(params=["host", "devices"])
def read_by(request, monkeypatch):
    """By the host, as CPU devices are, or by a program, as all others."""
    if request.param == "devices":
        monkeypatch.setattr(placement, "is_of_this_host", lambda leaf: False)


def raw(array):
    """The array's bytes, to be changed in place."""
    return array.reshape(-1).view(np.uint8)


def one_ulp(array):
    out = np.array(array)
    if out.dtype == np.bool_:
        out.reshape(-1)[0] ^= True
    else:
        raw(out)[0] ^= 1
    return out


def swapped(array):
    out = np.array(array)
    flat = out.reshape(-1)
    j = next(i for i in range(flat.size) if flat[i] != flat[0])
    flat[[0, j]] = flat[[j, 0]]
    return out


def on_replicas(values):
    """One array declared replicated, of which every replica holds its own version."""
    shards = [jax.device_put(value, device) for value, device in zip(values, FOUR.devices, strict=True)]
    return jax.make_array_from_single_device_arrays(values[0].shape, FOUR.replicated_sharding, shards)


def state_with(change):
    """One changed copy of every leaf on replica 2, and one that is the same on all."""
    state = {name: on_replicas([leaf, leaf, change(leaf), leaf]) for name, leaf in LEAVES.items() if change}
    state["same"] = on_replicas([np.arange(3.0, dtype=np.float32)] * 4)
    return state


@pytest.mark.usefixtures("read_by")
def test_equal_replicas_pass():
    FOUR.check({name: on_replicas([leaf] * 4) for name, leaf in LEAVES.items()} | {"key": FOUR.init(jax.random.key, 0)})


@pytest.mark.usefixtures("read_by")
def test_one_ulp_in_one_element_on_one_replica_is_found_for_every_dtype():
    with pytest.raises(ReplicaDivergenceError) as caught:
        FOUR.check(state_with(one_ulp))
    assert sorted(caught.value.leaves) == sorted(f"['{name}']" for name in LEAVES)
    assert set(caught.value.replicas) == {(2,)}
    assert "['bool']: replicas [2] differ from the majority" in str(caught.value)
    assert "['same']" not in str(caught.value)
    assert "jdist.value_and_grad" in str(caught.value)


@pytest.mark.usefixtures("read_by")
def test_two_elements_that_changed_places_are_found():
    leaves = {name: leaf for name, leaf in LEAVES.items() if name != "scalar"}
    state = {name: on_replicas([leaf, leaf, leaf, swapped(leaf)]) for name, leaf in leaves.items()}
    with pytest.raises(ReplicaDivergenceError) as caught:
        FOUR.check(state)
    assert sorted(caught.value.leaves) == sorted(f"['{name}']" for name in leaves)
    assert set(caught.value.replicas) == {(3,)}


@pytest.mark.usefixtures("read_by")
def test_keys_are_compared():
    keys = [jax.random.key(seed) for seed in (0, 0, 1, 0)]
    shards = [jax.device_put(key, device) for key, device in zip(keys, FOUR.devices, strict=True)]
    key = jax.make_array_from_single_device_arrays((), FOUR.replicated_sharding, shards)
    with pytest.raises(ReplicaDivergenceError) as caught:
        FOUR.check({"rng": key})
    assert (caught.value.leaves, caught.value.replicas) == (("['rng']",), ((2,),))


@pytest.mark.usefixtures("read_by")
def test_arrays_of_keys_that_a_step_returns_are_compared():
    @jdist.distribute(FOUR, check_replicas=0)
    def step(keys, batch):
        return jax.random.split(jax.random.fold_in(keys[0], jnp.where(jdist.replica_id() == 2, 1, 0)), 3), {}

    keys, _ = step(FOUR.init(lambda: jax.random.split(jax.random.key(0), 3)), {"x": np.ones((4, 1))})
    with pytest.raises(ReplicaDivergenceError) as caught:
        FOUR.check({"rng": keys})
    assert (caught.value.leaves, caught.value.replicas) == (("['rng']",), ((2,),))


@pytest.mark.usefixtures("read_by")
def test_negative_zero_and_other_nans_are_other_bits():
    for a, b in ((np.float32(0.0), np.float32(-0.0)), (np.uint32(0x7FC00000), np.uint32(0x7FC00001))):
        a, b = np.asarray(a).view(np.float32), np.asarray(b).view(np.float32)
        with pytest.raises(ReplicaDivergenceError):
            FOUR.check(on_replicas([a, a, b, a]))
    FOUR.check(on_replicas([np.float32(np.nan)] * 4))


@pytest.mark.usefixtures("read_by")
def test_64_bit_leaves():
    with jax.enable_x64(True):
        for dtype in (np.float64, np.int64, np.uint64, np.complex128):
            leaf = np.arange(1, 5).astype(dtype)
            FOUR.check(on_replicas([leaf] * 4))
            for byte in (0, 4, 7):  # low and high word
                other = np.array(leaf)
                raw(other)[byte] ^= 1
                with pytest.raises(ReplicaDivergenceError):
                    FOUR.check(on_replicas([leaf, other, leaf, leaf]))
            with pytest.raises(ReplicaDivergenceError):
                FOUR.check(on_replicas([leaf, leaf, leaf, leaf[::-1].copy()]))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8), st.integers(0, 7), st.integers(0, 31))
def test_any_flipped_bit_changes_the_hash(words, position, bit):
    before = np.array(words, np.uint32)
    after = before.copy()
    after[position] ^= np.uint32(1 << bit)
    assert hash_one(before.view(np.float32)) != hash_one(after.view(np.float32))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8), st.integers(0, 7), st.integers(0, 7))
def test_any_two_elements_that_changed_places_change_the_hash(words, i, j):
    before = np.array(words, np.uint32)
    after = before.copy()
    after[[i, j]] = after[[j, i]]
    same = before[i] == before[j]
    assert (hash_one(before) == hash_one(after)) == same


def test_elements_far_apart_that_changed_places_change_the_hash():
    before = np.zeros(2**16 + 1, np.uint32)
    before[0] = UNMIXED_65536
    assert hash_one(before) != hash_one(before[::-1].copy())


def test_rows_that_changed_places_change_all_bits_of_the_hash():
    differences = set()
    for seed in range(4):
        rows = np.random.default_rng(seed).integers(0, 2**32, (2, 2**18), np.uint32)
        differences |= {int(hash_one(rows)) ^ int(hash_one(rows[::-1].copy()))}
    assert any(d % 2**16 for d in differences)


def _unmixed(y):
    """The word that hash_leaf's mixing turns into `y`."""
    y ^= y >> 16
    y = y * pow(0xC2B2AE35, -1, 2**32) % 2**32
    y ^= (y >> 13) ^ (y >> 26)
    y = y * pow(0x85EBCA6B, -1, 2**32) % 2**32
    return y ^ (y >> 16)


UNMIXED_65536 = _unmixed(2**16)


def test_the_shape_does_not_matter_to_the_hash_and_empty_leaves_have_one():
    assert hash_one(np.zeros((2, 3), np.float32)) == hash_one(np.zeros(6, np.float32))
    assert int(hash_one(np.zeros((0, 3), np.float32))) == 0


def test_compare_names_the_replicas_outside_the_majority():
    hashes = np.array([[1, 5], [2, 5], [1, 5], [2, 5], [1, 6]], np.uint32)
    with pytest.raises(ReplicaDivergenceError, match=r"2 of 2 leaves.*differ between the 5 replicas") as caught:
        compare(hashes, ["a", "b"])
    assert caught.value.leaves == ("a", "b")
    assert caught.value.replicas == ((1, 3), (4,))
    with pytest.raises(ReplicaDivergenceError) as caught:
        compare(hashes[:4], ["a", "b"])
    assert (caught.value.leaves, caught.value.replicas) == (("a",), ((0, 1, 2, 3),))  # no majority: all of them
    assert "a: no majority, the same on [0, 2] and on [1, 3]" in str(caught.value)
    compare(hashes[:, :0], [])
    compare(hashes[[0, 2]], ["a", "b"])


@pytest.mark.parametrize("n", [2, 8])
def test_compare_says_that_no_two_replicas_agree(n):
    with pytest.raises(
        ReplicaDivergenceError, match=rf"between the {n} replicas:\n  a: all replicas differ\n"
    ) as caught:
        compare(np.arange(n, dtype=np.uint32)[:, None], ["a"])
    assert caught.value.replicas == (tuple(range(n)),)


def test_a_long_list_is_cut_in_the_message_and_whole_in_the_attributes():
    hashes = np.array([[0] * 30, [1] * 30], np.uint32)
    with pytest.raises(ReplicaDivergenceError, match=r"and 20 more leaves") as caught:
        compare(hashes, [f"leaf {i}" for i in range(30)])
    assert len(caught.value.leaves) == len(caught.value.replicas) == 30


class TestInAStep:
    """One leaf's all-reduce forgotten, under the transforms that run a step once for each replica."""

    @property
    def batch(self):
        return {"x": np.arange(1, 5, dtype=np.float32)}

    @staticmethod
    def step(params, batch):
        f = lambda p: ((p["good"] + p["bad"]) * batch["x"].mean()).sum()  # noqa: E731
        _, grads = jdist.value_and_grad(f)(params)
        _, local = jax.value_and_grad(f)(params)
        return {"good": params["good"] - grads["good"], "bad": params["bad"] - local["bad"]}, {}

    @pytest.mark.parametrize("transform", ["shard_map", "pmap"])
    def test_it_is_found_after_the_first_step(self, transform):
        strategy = jdist.mirrored(["cpu:0", "cpu:1"], transform=transform)
        train_step = jdist.distribute(self.step, strategy)
        state = strategy.init(lambda: {"good": jnp.ones(3), "bad": jnp.ones(3)})
        with pytest.raises(ReplicaDivergenceError) as caught:
            train_step(state, self.batch | {"y": self.batch["x"]})
        assert caught.value.leaves == ("['bad']",)
        assert caught.value.replicas == ((0, 1),)  # of two, neither is the majority
        with pytest.raises(ReplicaDivergenceError):
            strategy.fetch(train_step.last_state)

    def test_zero_turns_it_off_but_not_that_before_a_save(self):
        train_step = jdist.distribute(self.step, TWO, check_replicas=0)
        state = {"good": jnp.ones(3), "bad": jnp.ones(3)}
        for _ in range(3):
            state, _ = train_step(state, self.batch)
        with pytest.raises(ReplicaDivergenceError):
            TWO.check(state)

    @pytest.mark.parametrize(
        ("every", "per_call", "expected"), [(3, 1, [0, 3, 6]), (1, 1, [*range(8)]), (4, 2, [0, 2, 4, 6])]
    )
    def test_it_is_made_after_the_first_step_and_every_so_many(self, every, per_call, expected, monkeypatch):
        train_step = jdist.distribute(lambda w, b: (w + 1, {}), TWO, check_replicas=every, steps_per_call=per_call)
        calls, checked, state = [], [], TWO.init(lambda: jnp.float32(0))
        monkeypatch.setattr(step_module, "compare_replicas", lambda strategy, state: checked.append(len(calls)))
        batch = {"x": np.ones(2)} if per_call == 1 else {"x": np.ones((per_call, 2))}
        while len(calls) < 8:
            state, _ = train_step(state, batch)
            calls.append(1)
        assert checked == expected

    def test_a_shorter_last_call_counts_its_own_steps(self, monkeypatch):
        train_step = jdist.distribute(lambda w, b: (w + 1, {}), TWO, check_replicas=4, steps_per_call=3)
        checked, state = [], TWO.init(lambda: jnp.float32(0))
        monkeypatch.setattr(step_module, "compare_replicas", lambda strategy, state: checked.append(int(state)))
        for steps in [3, 1, 1, 1, 1]:
            state, _ = train_step(state, {"x": np.ones((steps, 2))})
        assert checked == [3, 7]

    def test_one_replica_is_never_checked(self, monkeypatch):
        monkeypatch.setattr(step_module, "compare_replicas", lambda strategy, state: pytest.fail("checked"))
        jdist.distribute(lambda w, b: (w + 1, {}), jdist.one_device(), check_replicas=1)(0.0, {"x": np.ones(2)})


def round_a_ring(x):
    """A mean by hand: that it is one over all replicas cannot be seen."""
    return sum(jax.lax.ppermute(x, "replica", [(i, (i + n) % 4) for i in range(4)]) for n in range(4)) / 4


class TestMovingAverages:
    """Batch statistics that nobody brought together are known from the traced step."""

    @staticmethod
    def create(**options):
        params, stats = {"w": jnp.ones(3)}, {"mean": jnp.zeros(3), "var": jnp.ones(3)}
        return jdist.TrainState.create(params=params, tx=optax.sgd(0.1), batch_stats=stats, **options)

    @staticmethod
    def step(state, batch, together=lambda x: x):
        def loss_fn(params):
            x = together(batch["x"].mean(axis=0)), together(batch["x"].var(axis=0))
            new = {
                name: 0.9 * old + 0.1 * x
                for (name, old), x in zip(sorted(state.extra["batch_stats"].items()), x, strict=True)
            }
            return jdist.mean((batch["x"] @ params["w"]) ** 2, batch["mask"]), new

        (loss, new), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=new), {"loss": loss}

    DATA: ClassVar = {"x": rng.normal(size=(16, 3)).astype(np.float32)}

    @pytest.mark.parametrize("accumulate", [1, 2])
    @pytest.mark.parametrize(
        "strategy",
        [FOUR, jdist.mirrored(FOUR.devices, transform="pmap"), jdist.central_storage(FOUR.devices)],
        ids=["shard_map", "pmap", "central_storage"],
    )
    def test_they_are_refused_before_anything_is_compiled(self, strategy, accumulate, compiled):
        state = strategy.init(self.create)
        (batch,) = strategy.distribute_dataset(jdist.data.from_arrays(self.DATA, global_batch=16))
        step = jdist.distribute(self.step, strategy, accumulate=accumulate)
        compiled.clear()
        with pytest.raises(
            ReplicaDivergenceError, match=r"\['batch_stats'\]\['mean'\], and 1 more .* 0\.9 times"
        ) as exc:
            step(state, batch)
        assert compiled == []
        assert exc.value.leaves == (".extra['batch_stats']['mean']", ".extra['batch_stats']['var']")
        assert exc.value.replicas == ((0, 1, 2, 3),) * 2

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_also_where_jdist_itself_spreads_parameters(self, accumulate):
        strategy = jdist.sharded(FOUR.devices, whole_below=0, most_whole=1)
        state = strategy.init(lambda: self.create().replace(params={"w": jnp.ones((3, 8)).sum(1) / 8}))
        (batch,) = strategy.distribute_dataset(jdist.data.from_arrays(self.DATA, global_batch=16))
        step = jdist.distribute(self.step, strategy, accumulate=accumulate)
        with pytest.raises(ReplicaDivergenceError, match=r"\['batch_stats'\]\['mean'\], and 1 more .* 0\.9 times"):
            step(state, batch)

    def test_an_average_of_sums_is_told_how_to_be_combined(self):
        step = jdist.distribute(lambda own, batch: (0.9 * own + 0.1 * batch["x"].sum(0), {}), FOUR)
        with pytest.raises(ReplicaDivergenceError, match=r"0\.9 times .*Combine it first.*all_reduce\(x, \"sum\"\)"):
            step(jnp.zeros(3), self.DATA)

    def test_fit_refuses_them_before_anything_is_compiled(self, compiled):
        state = FOUR.init(self.create)
        compiled.clear()
        with pytest.raises(ReplicaDivergenceError, match="moving average"):
            jdist.fit(self.step, state, self.DATA, strategy=FOUR, global_batch=16, progress=False, log_to=None)
        assert compiled == []

    @pytest.mark.parametrize(
        ("options", "together"),
        [
            ({"aggregation": {"batch_stats": "mean"}}, lambda x: x),
            ({}, lambda x: jdist.all_reduce(x, "mean")),
            ({}, lambda x: jax.lax.pmean(x, jdist.replica_axes())),
            ({}, round_a_ring),
        ],
        ids=["declared", "jdist", "jax", "by hand"],
    )
    def test_what_was_brought_together_is_not(self, options, together):
        step = jdist.distribute(lambda state, batch: self.step(state, batch, together), FOUR, check_replicas=1)
        zeros = {"x": np.zeros((16, 3), np.float32)}  # of which sums are the same in every order
        (batch,) = FOUR.distribute_dataset(jdist.data.from_arrays(zeros, global_batch=16))
        state, _ = step(FOUR.init(lambda: self.create(**options)), batch)
        np.testing.assert_allclose(state.extra["batch_stats"]["var"], 0.9)

    def test_gradients_that_were_never_brought_together_are_told_of_as_such(self, compiled):
        def step(state, batch):
            loss, grads = jax.value_and_grad(lambda p: ((batch["x"] @ p["w"] - 1) ** 2).mean())(state.params)
            return state.apply_gradients(grads=grads), {"loss": loss}

        state = FOUR.init(lambda: jdist.TrainState.create(params={"w": jnp.ones(3)}, tx=optax.adam(0.1)))
        compiled.clear()
        with pytest.raises(ReplicaDivergenceError, match=r"mu\['w'\].*Take gradients by `jdist\.value_and_grad`"):
            jdist.distribute(step, FOUR)(state, {"x": np.ones((16, 3), np.float32)})
        assert compiled == []

    def test_the_global_view_and_one_replica_have_one_average(self):
        for strategy in (jdist.mirrored(FOUR.devices, transform="jit"), jdist.one_device()):
            (batch,) = strategy.distribute_dataset(jdist.data.from_arrays(self.DATA, global_batch=16))
            state, _ = jdist.distribute(self.step, strategy)(strategy.init(self.create), batch)
            np.testing.assert_allclose(state.extra["batch_stats"]["mean"], 0.1 * self.DATA["x"].mean(0), rtol=1e-5)
