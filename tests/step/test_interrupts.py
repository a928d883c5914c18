"""An interrupt at any moment leaves the newest state, although the one passed in was donated."""

import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdist
from jdist.core.context import own_settings, plain_jax, run_under_mesh
from tests.toys import ON_ALL_DEVICES


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("strategy", ON_ALL_DEVICES[:-1], ids=lambda s: f"{s.name}-{s.transform}")
def test_last_state_outlives_an_interrupt_at_any_moment(strategy):

    def step(state, batch):
        loss, grad = jdist.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state["w"])
        return {"w": state["w"] - 1e-3 * grad, "n": state["n"] + 1}, {"loss": loss}

    def interrupt(*_):
        raise Interrupted

    def train_until_interrupted(state, after_s):
        signal.setitimer(signal.ITIMER_REAL, after_s)
        while True:
            state, _ = train_step(state, batch)

    train_step = jdist.distribute(step, strategy)
    batch = jax.device_put({"x": np.ones((16, 32), np.float32)}, strategy.batch_sharding)
    state = strategy.init(lambda: {"w": jnp.ones((32, 32)), "n": jnp.int32(0)})
    state, _ = train_step(state, batch)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(40):
            calls = int(state["n"])
            with pytest.raises(Interrupted):
                train_until_interrupted(state, 0.002 + 0.0005 * i)
            assert jax.sharding.get_mesh().empty
            newest = train_step.last_state
            assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(newest))
            assert int(newest["n"]) >= calls
            state = newest
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    state, _ = train_step(state, batch)
    assert np.isfinite(strategy.fetch(state)["w"]).all()


def enter(settings):
    with settings:
        pass


@pytest.mark.parametrize("outside", [None, "data"])
@pytest.mark.parametrize(
    "run",
    [
        lambda strategy: run_under_mesh(strategy, lambda: None),
        lambda strategy: enter(own_settings(strategy)),
        lambda strategy: enter(plain_jax()),
    ],
    ids=["run_under_mesh", "own_settings", "plain_jax"],
)
def test_an_interrupt_at_any_moment_leaves_the_mesh_in_context(run, outside):
    strategy = jdist.mirrored(transform="jit")
    mesh = outside and jax.make_mesh((2,), (outside,), devices=jax.devices()[:2])
    place = 0

    def interrupt(frame, event, arg):
        """Raises at the instruction number `place` of what sets and restores meshes."""
        nonlocal passed
        code = frame.f_code
        if "jdist/core" not in code.co_filename and code.co_name not in ("__init__", "__enter__", "__exit__"):
            return interrupt
        frame.f_trace_opcodes = True
        if event == "opcode":
            passed += 1
            if passed > place:
                sys.settrace(None)
                raise Interrupted
        return interrupt

    with jax.set_mesh(mesh):
        found = jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()
        ends = False
        while not ends:
            passed, place = 0, place + 1
            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                run(strategy)
                ends = passed > 0  # Python 3.12 traces no instructions the first time
            except Interrupted:
                pass
            finally:
                sys.settrace(before)
            assert (jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()) == found, place
    assert place > 100


def test_an_interrupt_arrives():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_arrives_in_a_suite_that_was_started_in_the_background():
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::test_an_interrupt_arrives"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", ignoring, *test],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr
