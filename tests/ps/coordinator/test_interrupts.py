"""An interrupt in the middle of what must be done whole."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jdist.ps.transport.threads import uninterrupted


@pytest.fixture
def interruptible():
    """As in a program of one's own; a test runner may ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_waits_for_the_end_of_the_block(interruptible):
    reached = []

    def block():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_leaves_the_handler_as_it_was(interruptible):
    with pytest.raises(ValueError, match="of the block"), uninterrupted():
        raise ValueError("of the block")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_threads_beside_the_main_one_touch_no_handler(interruptible):
    def seen():
        with uninterrupted():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(seen).result(10) is signal.default_int_handler


def test_a_loop_that_is_interrupted_loses_no_closure_and_does_not_hang():
    program = Path(__file__).parent / "interrupted_loop.py"
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=True)
    returned, caught, done = map(int, ended.stdout.split())
    assert caught > 5
    # What was scheduled took effect; of an interrupted call the program does not know whether it was.
    assert returned <= done <= returned + caught
