"""Threads that carry out what they are given, and do not keep the program from ending."""

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from jdist.ps.transport.threads import Threads
from tests.ps.servers import environment


def test_work_is_done_at_the_same_time_and_its_result_or_error_is_told():
    threads, barrier = Threads(2, "test"), threading.Barrier(2, timeout=30)
    both = [threads.submit(barrier.wait) for _ in range(2)]
    assert sorted(future.result(30) for future in both) == [0, 1]
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(30)
    assert threads.submit(divmod, 7, 2).result(30) == (3, 1)
    threads.close()
    threads.join(30)


def test_after_the_end_nothing_is_begun_and_what_is_under_way_goes_on():
    threads, began, may_end = Threads(1, "test"), threading.Event(), threading.Event()
    first = threads.submit(lambda: (began.set(), may_end.wait(30))[1])
    second = threads.submit(int)
    assert began.wait(30)
    threads.close()
    third = threads.submit(int)
    may_end.set()
    assert first.result(30) is True
    for future in (second, third):
        with pytest.raises(CancelledError):
            future.result(30)
    threads.close()
    threads.join(30)
    assert not [t for t in threading.enumerate() if t.name == "test-0"]


LATE = """
import threading
from jdist.ps.transport.interface import Method, ask_until_one_answers
from jdist.ps.transport.threads import Threads
from tests.ps.fake_transport import FakeChannel, FakeServer
threads = Threads(1, "test")
server = FakeServer("a", {"status": Method(lambda header, arrays: ({"is": "there"}, []))})
threads.submit(int).result()
stuck = Threads(1, "stuck")
stuck.submit(threading.Event().wait)
def late():
    threading.main_thread().join()
    print(threads.submit(lambda: "done").result())
    print(ask_until_one_answers([lambda: FakeChannel(server)], 20, give_up_s=20))
threading.Thread(target=late).start()
"""


def test_they_work_until_the_program_ends_and_do_not_keep_it():
    found = subprocess.run(
        [sys.executable, "-c", LATE], env=environment({}), capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "done\n[{'is': 'there'}]\n", "")
