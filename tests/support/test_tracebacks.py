"""A user's mistake is shown where it was made, without jdist's own frames."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdist
from jdist.errors import DatasetError, DeviceError, JDistError, StepError
from jdist.support.tracebacks import hide_own_frames, without_own_frames

OWN = str(Path(jdist.__file__).parent)
ROWS = {"x": np.ones((8, 3), np.float32)}
QUIET: dict[str, Any] = {"progress": False, "log_to": None}


@pytest.fixture(autouse=True)
def filtering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JDIST_TRACEBACK_FILTERING", "on")


def strategy() -> jdist.Strategy:
    return jdist.mirrored(jax.devices()[:2])


def wrong(state: Any, batch: Any) -> Any:
    return helper(state, batch), {}


def helper(state: Any, batch: Any) -> Any:
    loss, _ = jdist.value_and_grad(loss_of)(jnp.ones(3), batch)
    return loss


def loss_of(w: Any, batch: Any) -> Any:
    raise KeyError("labels")


def decorated() -> None:
    batch = next(iter(strategy().distribute_dataset(jdist.data.from_arrays(ROWS, global_batch=8))))
    jdist.distribute(wrong, strategy())(jnp.zeros(()), batch)


def fitted() -> None:
    jdist.fit(wrong, jnp.zeros(()), ROWS, strategy=strategy(), global_batch=8, **QUIET)


def accumulated() -> None:
    step = jdist.distribute(wrong, strategy(), accumulate=2)
    jdist.fit(step, jnp.zeros(()), ROWS, global_batch=8, **QUIET)


def as_nnx() -> None:
    def step(model: Any, batch: Any) -> Any:
        return {"loss": helper(None, batch)}

    jdist.nnx.distribute(strategy())(step)(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), ROWS)


def run() -> None:
    strategy().run(lambda: helper(None, None))


def initialised() -> None:
    strategy().init(lambda: loss_of(None, None))


def evaluated() -> None:
    jdist.evaluate(lambda state, batch: helper(state, batch), 0.0, ROWS, global_batch=8)


def fed() -> None:
    def batches() -> Any:
        yield {"x": np.ones((8, 3), np.float32)}
        loss_of(None, None)

    list(strategy().distribute_dataset(batches()))


def called_back() -> None:
    jdist.fit(
        lambda state, batch: (state, {}),
        jnp.zeros(()),
        ROWS,
        global_batch=8,
        callbacks=[lambda moment: loss_of(None, None)],
        verify="off",
        **QUIET,
    )


def fed_nothing() -> None:
    def batches() -> Any:
        loss_of(None, None)
        yield

    list(strategy().distribute_dataset(batches()))


def without_a_strategy() -> None:
    jdist.grad(loss_of)(jnp.ones(3), None)


WAYS = [
    without_a_strategy,
    fed_nothing,
    decorated,
    fitted,
    accumulated,
    as_nnx,
    run,
    initialised,
    evaluated,
    fed,
    called_back,
]


def frames_of(exc: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(exc.__traceback__))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.* returns the state unchanged")
def test_a_mistake_is_shown_by_the_users_frames_alone(way):
    with pytest.raises(KeyError, match="labels") as raised:
        way()
    frames = frames_of(raised.value)
    assert [frame.filename for frame in frames if frame.filename.startswith(OWN)] == []
    assert frames[-1].name == "loss_of"
    assert frames[0].name == "test_a_mistake_is_shown_by_the_users_frames_alone"
    assert way.__name__ in [frame.name for frame in frames]
    printed = "".join(traceback.format_exception(raised.value))
    assert f'File "{OWN}' not in printed


@pytest.mark.parametrize("way", [decorated, fitted])
def test_the_variable_shows_all(way, monkeypatch):
    monkeypatch.setenv("JDIST_TRACEBACK_FILTERING", "off")
    with pytest.raises(KeyError) as raised:
        way()
    assert [frame for frame in frames_of(raised.value) if frame.filename.startswith(OWN)]


def test_what_jdist_refuses_is_shown_where_it_was_called():
    with pytest.raises(StepError) as raised:
        jdist.fit(wrong, 0.0, ROWS, epochs=1, steps=1)
    assert [frame.name for frame in frames_of(raised.value)] == ["test_what_jdist_refuses_is_shown_where_it_was_called"]
    assert not getattr(raised.value, "__notes__", [])


@pytest.mark.parametrize(
    "make",
    [
        lambda: jdist.mirrored(["cpu:99"]),
        lambda: jdist.one_device("cpu:99"),
        lambda: jdist.central_storage(["cpu:99"]),
        lambda: jdist.tpu(topology="x"),
        lambda: jdist.multi_worker(all_reduce="x"),  # pyright: ignore[reportArgumentType]
        lambda: jdist.parameter_server(local_workers=-1),
        lambda: jdist.make_strategy("x"),
        lambda: jdist.distribute(strategy(), steps_per_call=0),
        lambda: jdist.nnx.distribute(strategy(), metrics={int: "x"}),  # pyright: ignore[reportArgumentType]
        lambda: jdist.nnx.distribute(strategy(), steps_per_call=0)(loss_of),
    ],
)
def test_an_argument_that_is_refused_is_shown_by_the_users_line_alone(make):
    with pytest.raises(JDistError) as raised:
        make()
    assert {frame.filename for frame in frames_of(raised.value)} == {__file__}


def test_a_warning_names_the_line_that_called_jdist(monkeypatch):
    def is_missing(chip: str) -> None:
        raise DeviceError("no plugin")

    monkeypatch.setattr("jdist.strategies.gpu_topology._check_plugin", is_missing)
    with pytest.warns(UserWarning, match="h100:9 is one host with 9 GPUs") as warned, pytest.raises(JDistError):
        jdist.mirrored(topology="h100:9")
    assert [each.filename for each in warned] == [__file__]


def test_a_cause_stays_and_loses_its_frames_too():
    with pytest.raises(StepError) as raised:
        jdist.distribute(lambda state, batch: jax.lax.psum(state, "data"), strategy())(jnp.zeros(()), ROWS)
    assert isinstance(raised.value.__cause__, NameError)
    for exc in (raised.value, raised.value.__cause__):
        assert not [frame for frame in frames_of(exc) if frame.filename.startswith(OWN)]
    assert frames_of(raised.value.__cause__)[-1].name == "<lambda>"


def test_an_exception_of_several_loses_them_in_each():
    def batches() -> Any:
        raise ExceptionGroup("two", [made(decorated), made(fitted)])
        yield

    with pytest.raises(ExceptionGroup) as raised:
        list(strategy().distribute_dataset(batches()))
    for exc in raised.value.exceptions:
        assert not [frame for frame in frames_of(exc) if frame.filename.startswith(OWN)]


def made(way: Any) -> Exception:
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JDIST_TRACEBACK_FILTERING", "off")
            way()
    except KeyError as exc:
        return exc
    raise AssertionError


def test_notes_stay_and_only_an_error_that_jdist_did_not_mean_to_raise_gets_one(monkeypatch):
    @without_own_frames
    def call(error: Exception) -> None:
        error.add_note("a note")
        raise error

    with pytest.raises(ValueError, match="of the user") as raised:
        call(ValueError("of the user"))
    assert raised.value.__notes__ == ["a note"]

    with pytest.raises(TypeError) as broken:
        jdist.evaluate(lambda state, batch: {}, 0.0, ROWS, global_batch=8, unknown=1)
    assert any("JDIST_TRACEBACK_FILTERING=off" in note for note in broken.value.__notes__)
    assert frames_of(broken.value)

    monkeypatch.setenv("JDIST_TRACEBACK_FILTERING", "of")
    with pytest.raises(ValueError, match="of the user") as raised:
        call(ValueError("of the user"))
    assert any("is 'of'; it must be 'on' or 'off'" in note for note in raised.value.__notes__)


def test_an_exception_that_caused_itself_ends():
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    with contextlib.suppress(DatasetError):
        hide_own_frames(first)
    assert first.__context__ is second
