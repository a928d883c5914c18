"""The newest state of a step, taken or not yet."""

import numpy as np

from jdist.core.step_state import pack
from jdist.step.in_flight import NewestState

TOKEN, OLD, NEW = np.zeros(2, np.int32), {"w": np.zeros(3)}, {"w": np.ones(3)}


def with_results(state, *, hold_state=True):
    newest = NewestState()
    newest.state = newest.packed = OLD
    newest.begin_with(pack(OLD))
    newest.results_hold_state = hold_state
    newest.results.append((TOKEN, state, ()))
    return newest


def test_nothing_is_there_before_the_first_call():
    assert NewestState().look() is None


def test_results_are_seen_before_they_are_taken():
    newest = with_results(NEW)
    assert newest.look() == NEW
    assert newest.state is OLD
    newest.take()
    assert newest.state is newest.packed is NEW
    assert not newest.results


def test_results_without_a_state_leave_the_one_before():
    newest = with_results(NEW, hold_state=False)
    assert newest.look() is OLD
    newest.take()
    assert newest.state is OLD


def test_constants_come_back_to_callers_and_programs_keep_them_apart():
    state = {"w": np.ones(3), "apply_fn": len}
    newest = NewestState()
    newest.begin_with(pack(state))
    newest.results_hold_state = True
    newest.results.append((TOKEN, pack(state), ()))
    newest.take()
    assert newest.state["apply_fn"] is len
    assert newest.packed["apply_fn"] is not len
