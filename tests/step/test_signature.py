"""The arguments of a call, sorted by their roles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.errors import StepError
from jdist.step.options import make_options
from jdist.step.signature import Call, Others, Signature
from tests.toys import BATCH, TWO


def test_bind_sorts_and_apply_puts_back():
    def step(kind, w, a, scale, b, *rest, shift, train):
        return kind, w, a, scale, b, rest, shift, train

    options = make_options(args=("static", "state", "batch", "replicated", "batch"), static_argnames="train")
    call, state, batches, others = Signature(step, options).bind(
        ("add", 1, "a", 2, "b", 3), {"shift": 4, "train": True}
    )
    assert (state, batches, others) == (1, ("a", "b"), Others((2, 3), {"shift": 4}))
    assert call.roles == ("static", "state", "batch", "replicated", "batch", "replicated")
    assert (call.static, call.static_kwargs, call.static_types) == (("add",), (("train", True),), (str, bool))
    assert call.apply(step, state, batches, others) == ("add", 1, "a", 2, "b", (3,), 4, True)
    assert Call(("state", "batch")) == Signature(lambda w, b: w, make_options()).bind((1, 2), {})[0]


class TestRoles:
    def test_every_role(self, strategy):
        def step(scale, kind, w, batch, extra, more):
            assert kind == "add"
            assert batch["x"].shape[0] * (strategy.num_replicas if strategy.transform != "jit" else 1) == 4
            assert extra["t"].shape == (4,)
            return w + scale * extra["t"].sum() + more.sum(), {"x": batch["x"].mean()}

        run = jdist.distribute(step, strategy, args=("replicated", "static", "state", "batch", "replicated"))
        extra = {"t": np.arange(4.0, dtype=np.float32)}
        state, metrics = run(jnp.float32(2), "add", 1.0, BATCH, extra, np.ones(3, np.float32))
        assert (float(state), float(metrics["x"])) == (16.0, 1.5)
        state, _ = run(0.5, "add", state, BATCH, extra, np.ones(3, np.float32))
        assert float(state) == 22.0

    def test_two_batches(self, strategy):
        def step(w, a, b):
            return w, {"product": (a["x"] * b).mean()}

        run = jdist.distribute(step, strategy, args=("state", "batch", "batch"))
        assert float(run(1.0, BATCH, np.full(4, 2.0, np.float32))[1]["product"]) == 3.0

    def test_further_arguments_and_keywords_are_replicated(self, strategy):
        def step(w, batch, key, *, scale=1.0, shift):
            assert scale.shape == ()
            return w + scale * shift.sum(), {"draw": jax.random.normal(key)}

        run = jdist.distribute(step, strategy)
        key = jax.random.key(1)
        for scale in (2.0, jnp.float32(2)):
            state, metrics = run(0.0, BATCH, key, scale=scale, shift=np.ones(3, np.float32))
            assert float(state) == 6.0
            assert float(metrics["draw"]) == pytest.approx(float(jax.random.normal(key)))

    def test_positional_arguments_by_keyword(self):
        def step(w, batch, shift, kind):
            assert kind == "add"
            return w + shift, {"x": batch["x"].mean()}

        run = jdist.distribute(step, TWO, args=("state", "batch", "replicated", "static"))
        for args, kwargs in (
            ((1.0, BATCH, 2.0), {"kind": "add"}),
            ((1.0, BATCH), {"kind": "add", "shift": 2.0}),
            ((1.0,), {"kind": "add", "shift": 2.0, "batch": BATCH}),
            ((), {"kind": "add", "shift": 2.0, "batch": BATCH, "w": 1.0}),
        ):
            state, metrics = run(*args, **kwargs)
            assert (float(state), float(metrics["x"])) == (3.0, 1.5)

    def test_another_static_value_is_traced_again_and_the_same_is_not(self):
        traced = []

        def step(w, batch, power):
            traced.append(power)
            return w, {"x": (batch["x"] ** power).mean()}

        run = jdist.distribute(step, TWO, args=("state", "batch", "static"))
        state = TWO.init(lambda: jnp.float32(1))
        results = []
        for power in (1, 2, 1, 2, 1):
            state, metrics = run(state, BATCH, power)
            results.append(metrics["x"])
        assert [float(x) for x in results] == [1.5, 3.5, 1.5, 3.5, 1.5]
        assert traced == [1, 2]

    def test_static_values_that_are_equal_but_of_another_type(self):
        run = jdist.distribute(
            lambda w, b, one: (w, {"kind": len(type(one).__name__)}), TWO, args=("state", "batch", "static")
        )
        assert [float(run(1.0, BATCH, one)[1]["kind"]) for one in (1, 1.0, True)] == [3, 5, 4]

    def test_static_keywords(self):
        traced = []

        def step(w, batch, *, train):
            traced.append(train)
            return w + (1 if train else 0), {}

        run = jdist.distribute(step, TWO, static_argnames=("train",))
        state = 0.0
        for train in (True, False, True):
            state, _ = run(state, BATCH, train=train)
        assert float(state) == 2.0
        assert traced == [True, False]

    def test_static_names_by_position(self):
        run = jdist.distribute(lambda w, batch, train: (w + (1 if train else 0), {}), TWO, static_argnames="train")
        assert float(run(0.0, BATCH, True)[0]) == 1.0

    @pytest.mark.parametrize(
        ("options", "arguments", "message"),
        [
            ({"static_argnames": "trian"}, (), "trian"),
            (
                {"args": ("state", "batch", "static")},
                (1.0, BATCH, [1]),
                "static argument of .* cannot be hashed: unhashable.*Pass it as replicated",
            ),
            ({}, (1.0,), r"step was called with 1 arguments by position; its roles are \('state', 'batch'"),
        ],
    )
    def test_what_is_refused(self, options, arguments, message):
        def step(w, batch, train):
            return w, {}

        with pytest.raises(StepError, match=message):
            jdist.distribute(step, TWO, **options)(*arguments)

    def test_the_state_alone_may_be_the_argument(self):
        assert float(jdist.distribute(lambda w: w + 1, TWO, args=("state",))(1.0)) == 2.0


class TestNamesAndRoles:
    """A parameter called `state` or `batch` that has another role is refused before any call."""

    @pytest.mark.parametrize(
        ("step", "options", "message"),
        [
            (
                lambda batch, state: 0,
                {},
                r"`batch` of <lambda> has the role 'state', as `args` is \('state', 'batch'\).*args=\('batch', 'state'\)",
            ),
            (
                lambda state, batch: 0,
                {"args": ("batch", "state")},
                r"`state` of <lambda> has the role 'batch'.*@jdist\.nnx\.distribute",
            ),
            (lambda state, key, batch: 0, {}, r"`batch` of .* 'replicated'.*args=\('state', 'replicated', 'batch'\)"),
            (
                lambda params, state, batch: 0,
                {},
                r"`state` of .* has the role 'batch'.*args=\('replicated', 'state', 'batch'\)",
            ),
            (lambda state, batch: 0, {"args": ("state",)}, r"`batch` of .* has the role 'replicated'"),
            (lambda params, opt_state, batch, key: 0, {}, r"args=\('state', 'state', 'batch', 'replicated'\)"),
        ],
    )
    def test_refused(self, step, options, message):
        with pytest.raises(StepError, match=message):
            jdist.distribute(step, TWO, **options)

    @pytest.mark.parametrize(
        ("step", "options"),
        [
            (lambda params, state, batch: 0, {"args": ("state", "replicated", "batch")}),
            (lambda state, x, batch: 0, {"args": ("state", "batch", "replicated")}),
            (lambda w, x, state: 0, {"args": ("state", "batch", "static")}),
            (lambda w, x, *, state, batch: 0, {}),
            (lambda w, x, state: 0, {"static_argnames": "state"}),
        ],
    )
    def test_other_roles_that_were_declared(self, step, options):
        assert jdist.distribute(step, TWO, **options).options.args == options.get("args", ("state", "batch"))


def test_a_call_in_words():
    signature = Signature(lambda kind, state, batch, *more: 0, make_options(args=("static", "state", "batch", "batch")))
    call, state, batches, _ = signature.bind(("add", {"w": 1.0}, BATCH["x"], BATCH["z"], 2), {})
    assert signature.taken_as(call, state, batches).splitlines() == [
        "<lambda> was called with:",
        "  argument 2 `state`, role \"state\": ['w'] float",
        '  argument 3 `batch`, role "batch": float32[4]',
        '  argument 4, role "batch": int32[4]',
    ]


ROWS = np.arange(4, dtype=np.float32)


class TestUndeclared:
    """An argument without a role that looks like a batch is refused, under every strategy."""

    def test_rows_of_the_batch(self, strategy):
        def step(w, x, y):
            return w, {"loss": ((x["x"] - y) ** 2).mean()}

        run = jdist.distribute(step, strategy)
        for y in (ROWS, jnp.asarray(ROWS), {"y": ROWS, "scale": 2.0}):
            with pytest.raises(
                StepError,
                match=r"argument 3 `y` of step, float32\[4\], has no role in `args`, and has as many rows as the batch.*"
                r"`args=\('state', 'batch', 'batch'\)`.*\"replicated\" in that place",
            ):
                run(1.0, BATCH, y)
        declared = jdist.distribute(step, strategy, args=("state", "batch", "batch"))
        assert float(declared(1.0, BATCH, ROWS)[1]["loss"]) == 0.0

    def test_one_row_a_replica(self):
        strategy = jdist.mirrored([f"cpu:{i}" for i in range(4)])
        run = jdist.distribute(lambda w, x, y: (w, {"loss": ((x - y) ** 2).mean()}), strategy)
        with pytest.raises(StepError, match="as many rows as the batch"):  # else each row would meet all four
            run(1.0, ROWS, ROWS)

    def test_declared_replicated_it_stays_so(self, strategy):
        run = jdist.distribute(lambda w, x, y: (w + y.sum(), {}), strategy, args=("state", "batch", "replicated"))
        assert float(run(0.0, BATCH, ROWS)[0]) == 6.0

    def test_out_of_a_dataset(self):
        (batch,) = TWO.distribute_dataset([BATCH])
        run = jdist.distribute(lambda w, x, y, **more: (w, {}), TWO)
        short = {"x": np.ones(2, np.float32)}
        with pytest.raises(StepError, match=r"argument 3 `y` .* comes out of `distribute_dataset`"):
            run(1.0, short, batch["y"])
        with pytest.raises(StepError, match=r"keyword argument `z` .* comes out of `distribute_dataset`"):
            run(1.0, short, 2.0, z=batch["z"])

    @pytest.mark.parametrize(
        "other",
        [
            np.ones(3),
            np.float32(2),
            {"w": np.ones((4, 3)), "b": np.ones(3)},  # a teacher's parameters, of which one happens to be as long
            jax.random.key(0),
            {},
        ],
        ids=["another length", "a number", "a tree of several lengths", "a key", "nothing"],
    )
    def test_what_is_no_batch_is_replicated(self, other):
        run = jdist.distribute(lambda w, x, other: (w, {}), TWO)
        assert float(run(1.0, BATCH, other)[0]) == 1.0

    def test_an_old_key_beside_two_rows(self):
        run = jdist.distribute(lambda w, x, key: (w, {"draw": jax.random.normal(key)}), TWO)
        run(1.0, np.ones(2, np.float32), jax.random.PRNGKey(0))

    def test_keyword_arguments(self, strategy):
        def step(w, x, *, y, scale=1.0):
            return w, {"loss": (scale * (x["x"] - y) ** 2).mean()}

        with pytest.raises(StepError, match=r"keyword argument `y` of step, .*`args=\('state', 'batch', 'batch'\)`"):
            jdist.distribute(step, strategy)(1.0, BATCH, y=ROWS)
        run = jdist.distribute(step, strategy, args=("state", "batch", "batch"))
        assert float(run(1.0, BATCH, y=ROWS)[1]["loss"]) == 0.0
        run = jdist.distribute(step, strategy, args=("state", "batch", "batch", "replicated"))
        assert float(run(1.0, BATCH, scale=np.full(4, 2.0)[:1], y=ROWS + 1)[1]["loss"]) == 2.0

    def test_a_keyword_argument_that_leaves_one_out(self, strategy):
        def step(w, x, shift=0.0, y=None):
            return w, {"loss": ((x["x"] + shift - y) ** 2).mean()}

        run = jdist.distribute(step, strategy, args=("state", "batch", "replicated", "batch"))
        assert float(run(1.0, BATCH, y=ROWS)[1]["loss"]) == 0.0

    def test_a_keyword_argument_without_a_parameter_of_its_own(self):
        run = jdist.distribute(lambda w, x, **more: (w, {}), TWO)
        with pytest.raises(StepError, match=r"`y` .*A role is said of a parameter that the step names"):
            run(1.0, BATCH, y=ROWS)

    def test_several_steps_a_call(self):
        stacked = {key: np.stack([x, x, x]) for key, x in BATCH.items()}
        run = jdist.distribute(lambda w, x, y: (w, {}), TWO, steps_per_call=3)
        for y in (ROWS, np.stack([ROWS] * 3)):
            with pytest.raises(StepError, match="as many rows as the batch"):
                run(1.0, stacked, y)
        run(1.0, stacked, np.ones(3))
