import contextlib
import dataclasses
import json
import queue
import socket
import threading
import time

import pytest

from jdist.cluster import exit_status
from jdist.cluster.watch import client as watch_client
from jdist.cluster.watch import server as watch_server
from jdist.cluster.watch.client import Identity, Watch
from jdist.cluster.watch.messages import MOST_BYTES
from jdist.cluster.watch.server import WatchServer
from jdist.errors import ClusterError, ClusterTimeoutError
from jdist.support.versions import versions

SOON_S = 30.0  # for what happens at once
SILENCE_S = 1.0


class Job:
    """Several `Watch` objects in one process, each as a process of a job has it."""

    def __init__(self, count, *, silence_s=SOON_S, start_timeout_s=SOON_S, token="secret", host="127.0.0.1"):
        self.count, self.silence_s, self.start_timeout_s, self.token = count, silence_s, start_timeout_s, token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family)
        self.host, self.port = host, server.getsockname()[1]
        self.server = WatchServer(server, count, silence_s=silence_s, start_timeout_s=start_timeout_s, token=token)
        self.watches, self.losses = {}, {i: queue.SimpleQueue() for i in range(count)}

    def identity(self, process, **changed):
        addresses = tuple(f"n{i}:1" for i in range(self.count))
        given = {"process": process, "addresses": addresses, "host": self.host, "port": self.port, "token": self.token}
        return Identity(**given | changed)

    def watch(self, process, *, is_waiting=lambda: False, wall_s=time.time, say=print, **changed):
        return Watch(
            self.identity(process, **changed),
            start_timeout_s=self.start_timeout_s,
            silence_s=self.silence_s,
            on_lost=self.losses[process].put,
            is_waiting=is_waiting,
            wall_s=wall_s,
            say=say,
        )

    def start(self, *processes, **options):
        """The watches of these processes, or of all; each is made in a thread, as it waits for the others."""
        made = each(lambda i: self.watch(i, **options), processes or range(self.count))
        self.watches |= made
        return self

    def lost(self, process):
        """What this process was told of a loss."""
        return self.losses[process].get(timeout=SOON_S)

    def stranger(self):
        """A connection to the port."""
        connection = socket.create_connection((self.host, self.port), SOON_S)
        connection.settimeout(SOON_S)
        return connection


def of_two(port):
    """Process 1 of two, for a process 0 that is not there."""
    return Identity(process=1, addresses=(None, None), host="127.0.0.1", port=port, token="")


def in_thread(call, *arguments):
    """The call goes on in a thread; `result()` gives what it returned, or the `ClusterError` that it raised."""
    found = queue.SimpleQueue()

    def run():
        try:
            found.put(call(*arguments))
        except ClusterError as exc:
            found.put(exc)

    threading.Thread(target=run, daemon=True).start()
    return lambda: found.get(timeout=SOON_S)


def each(call, arguments):
    """The results of a call for each argument, all at once, by argument."""
    results = {argument: in_thread(call, argument) for argument in arguments}
    return {argument: result() for argument, result in results.items()}


@pytest.fixture
def job():
    jobs = []

    def make(*args, **options):
        jobs.append(Job(*args, **options))
        return jobs[-1]

    yield make
    for made in jobs:
        for watch in made.watches.values():
            if isinstance(watch, Watch):
                watch.close()
        made.server.close()


def until(condition, message):
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.005)


# ---- coming together


def test_process_0_hears_last_as_it_may_stop_before_others_have_heard(job, monkeypatch):
    order, send = [], WatchServer._send

    def noted(self, peer, message):
        if message["type"] == "welcome":
            order.append(peer.process)
        send(self, peer, message)

    monkeypatch.setattr(WatchServer, "_send", noted)
    job(3).start()
    assert order[-1] == 0
    assert sorted(order) == [0, 1, 2]


def test_all_know_where_all_are(job):
    started = job(3).start()
    assert {watch.addresses for watch in started.watches.values()} == {("n0:1", "n1:1", "n2:1")}


def test_an_address_that_is_not_known_is_where_the_process_comes_from(job):
    made = job(2)
    made.start(addresses=(None, None))
    assert all(address.startswith("127.0.0.1:") for address in made.watches[0].addresses)


def test_ipv6(job):
    try:
        made = job(2, host="::1")
    except OSError as exc:
        pytest.skip(f"no IPv6 here: {exc}")
    assert made.start().watches[1].addresses == ("n0:1", "n1:1")


def test_process_0_may_come_last(job):
    made = job(2)
    early = in_thread(made.start, 1)
    until(lambda: 1 in made.server._state.members, "process 1 did not come")
    made.start(0)
    early()
    assert made.watches[1].addresses == ("n0:1", "n1:1")


def test_all_are_told_who_is_missing(job):
    made = job(3, silence_s=5.0, start_timeout_s=0.5)
    errors = each(made.watch, [0, 2])
    for error in errors.values():
        assert str(error).startswith(
            "not all of the 3 processes came in time; missing: process 1 (n1:1). Look at their logs"
        )


def test_one_of_a_job_of_another_size_is_no_matter_of_time(job):
    """To start all again leads to the same: exit code 2, where one that only came too late would be 75."""
    made = job(2, silence_s=5.0, start_timeout_s=2.0)
    larger = {"addresses": ("n0:1", "n1:1", "n2:1")}
    errors = each(lambda i: made.watch(i, **(larger if i else {})), [0, 1])
    assert "process 0 (n0:1) refused process 1: it was started as one of 3 processes, process 0" in str(errors[1])
    assert "missing: process 1 (n1:1). But one from" in str(errors[0])
    assert [exit_status.of(errors[i]) for i in (0, 1)] == [exit_status.USAGE] * 2


def test_other_versions_end_the_start_at_once_and_all_processes_name_them(job, monkeypatch):
    made, ours = job(3), versions()
    first = in_thread(made.watch, 0)
    until(lambda: 0 in made.server._peers, "process 0 did not come")
    with monkeypatch.context() as patched:
        patched.setattr(watch_client, "versions", lambda: ours | {"jax": "0.9.1", "host": "old"})
        errors = {1: in_thread(made.watch, 1)(), 0: first()}
    errors[2] = in_thread(made.watch, 2)()
    for process, beginning in {
        0: "not all of the 3 processes came; missing: process 1 (n1:1), process 2 (n2:1). But one from 127.0.0.1 was",
        1: "process 0 (n0:1) refused process 1: jax is",
        2: "process 0 (n0:1) refused process 2: not all processes came, and the job ends; one from 127.0.0.1 was",
    }.items():
        assert str(errors[process]).startswith(beginning)
        assert f"jax is 0.9.1 on old and {ours['jax']} on {ours['host']}. Install the same" in str(errors[process])
        assert exit_status.of(errors[process]) == exit_status.USAGE


def test_a_port_that_nobody_listens_on():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(
        ClusterError, match=rf"process 1 did not reach process 0 at 127.0.0.1:{port} within 0.3 s \(.*refused"
    ):
        Watch(of_two(port), start_timeout_s=0.3, silence_s=1.0, on_lost=print)


def test_a_port_that_another_program_listens_on():
    def answer(server):
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        answered = in_thread(answer, server)
        place = of_two(server.getsockname()[1])
        with pytest.raises(ClusterError, match=r"the program at .* is not jdist's process 0"):
            Watch(place, start_timeout_s=SOON_S, silence_s=SOON_S, on_lost=print)
        answered()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"token": "other"}, "its JDIST_TOKEN is not that of process 0"),
        ({"token": ""}, "its JDIST_TOKEN is not that of process 0"),
        ({"addresses": ("n0:1", "n1:1", "n2:1")}, "it was started as one of 3 processes, process 0 as one of 2"),
    ],
)
def test_who_does_not_fit_in_is_told_why_and_the_others_go_on(job, changed, why):
    made = job(2)
    with pytest.raises(ClusterError, match=rf"process 0 \(n0:1\) refused process 1: {why}\."):
        made.watch(1, **changed)
    assert made.start().watches[0].addresses == ("n0:1", "n1:1")


def test_the_second_process_of_an_index_is_refused_and_the_first_stays(job):
    made = job(2).start()
    with pytest.raises(ClusterError, match="another process, at n1:1, is process 1 already"):
        made.watch(1)
    assert each(lambda i: made.watches[i].exchanges.exchange("k", i, SOON_S), [0, 1]) == {0: [0, 1], 1: [0, 1]}


# ---- strangers


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01" + b"\0" * 100 + b"\n",
        b'{"type": "bye"}\n',
        b'{"type": "hello"}\n',
        b'{"type": "hello", "token": "\\ud800"}\n',
        b'{"type": "hello", "token": "secret", "process": {}, "count": []}\n',
        b'{"type": "hello", "token": "secret", "process": 1, "count": 1e999}\n',
        b"x" * 5000,
        b"[" * 4000 + b"\n",
    ],
)
def test_strangers_are_sent_away_and_the_job_goes_on(job, said):
    made = job(2)
    with made.stranger() as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                answer += piece
    assert answer == b"" or json.loads(answer)["type"] == "refused"
    assert made.start().watches[0].addresses == ("n0:1", "n1:1")


def test_strangers_are_logged_by_address_at_growing_intervals(job, caplog):
    made, address = job(2), ""
    for _ in range(101):
        with made.stranger() as connection:
            address = address or "{}:{}".format(*connection.getsockname())
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
    made.start()
    lines = [each.getMessage() for each in caplog.records if each.name == watch_server.__name__]
    assert len(lines) == 3
    assert f"connection from {address} (" in lines[0]
    assert [int(line.split()[-4]) for line in lines] == [1, 10, 100]


def test_who_says_nothing_is_sent_away(job, monkeypatch):
    monkeypatch.setattr(watch_server, "_HELLO_S", 0.1)
    made = job(2, silence_s=SILENCE_S)
    with made.stranger() as connection:
        assert connection.recv(1) == b""


def test_many_silent_strangers_do_not_keep_a_process_out(job):
    made = job(2)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(made.stranger()) for _ in range(watch_server._MOST_STRANGERS + 10)]
        made.start()
        assert strangers[0].recv(1) == b""  # the oldest made way
    assert made.watches[1].addresses == ("n0:1", "n1:1")


# ---- while it runs


def test_exchanges_of_all_sizes_and_at_once(job):
    made = job(3).start()
    large = "x" * (MOST_BYTES - 1000)

    def talk(i):
        watch = made.watches[i]
        return [watch.exchanges.exchange("large", large, SOON_S)[i] == large, watch.exchanges.exchange("i", i, SOON_S)]

    assert each(talk, [0, 1, 2]) == {i: [True, [0, 1, 2]] for i in range(3)}


def test_a_value_that_is_too_large_is_refused(job):
    made = job(1).start()
    with pytest.raises(
        ClusterError, match=r"what this process says about 'k' takes 2,0\d\d,\d\d\d bytes; at most 1,048,576"
    ):
        made.watches[0].exchanges.exchange("k", "x" * 2_000_000, SOON_S)


# ---- losses


def test_a_line_that_breaks_is_a_loss_to_all_others(job):
    made = job(3).start()
    made.watches[1].progress(7)
    each(lambda i: made.watches[i].exchanges.exchange("k", i, SOON_S), range(3))
    made.watches[1].close()
    for i in (0, 2):
        lost = made.lost(i)
        assert (lost.process, lost.address) == (1, "n1:1")
        assert "its connection broke" in str(lost)
    assert made.losses[1].empty()


def test_the_end_of_process_0_is_a_loss_to_all_others(job):
    made = job(3).start()
    made.server.close()
    assert [made.lost(i).process for i in (1, 2)] == [0, 0]


def test_a_loss_ends_every_wait(job):
    made = job(2).start()
    watch = made.watches[0]
    waits = [in_thread(watch.exchanges.exchange, "k", 0, SOON_S), in_thread(watch.say_bye)]
    made.watches[1].close()
    lost = made.lost(0)
    assert [end() for end in waits] == [lost, lost]
    assert watch.wait_for_loss(SOON_S) is lost


def test_a_loss_is_recorded_before_the_program_is_woken(job):
    made, was_woken = job(2).start(), queue.SimpleQueue()
    watch = made.watches[0]
    waiter = threading.Thread(target=watch.wait_for_loss, args=(SOON_S,))

    def record(lost):
        waiter.join(0.3)  # long enough for one that was woken
        was_woken.put(not waiter.is_alive())

    watch._on_lost = record
    waiter.start()
    made.watches[1].close()
    assert was_woken.get(timeout=SOON_S) is False
    waiter.join(SOON_S)
    assert not waiter.is_alive()


def test_a_silent_stranger_at_the_port_is_named_in_time():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        place = of_two(port)
        losses = queue.SimpleQueue()
        with pytest.raises(
            ClusterTimeoutError, match=rf"127.0.0.1:{port} accepts connections, but has not answered for 1 s"
        ):
            Watch(place, start_timeout_s=SOON_S, silence_s=SILENCE_S, on_lost=losses.put)
    assert losses.empty()  # else it would end the process


@pytest.mark.parametrize(("process", "still"), [(1, "stands still"), (0, "stood still")])
def test_a_process_0_that_stands_still_is_lost(process, still):
    def beat(server):
        connection, _ = server.accept()
        connection.sendall(b'{"type": "beat"}\n')
        return connection

    with socket.create_server(("127.0.0.1", 0)) as server:
        losses = queue.SimpleQueue()
        answered = in_thread(beat, server)
        place = dataclasses.replace(of_two(server.getsockname()[1]), process=process)
        watch = Watch(place, start_timeout_s=SOON_S, silence_s=SILENCE_S, on_lost=losses.put)
        lost = losses.get(timeout=SOON_S)
        watch.close()
        answered().close()
    assert (lost.process, lost.address) == (0, f"127.0.0.1:{place.port}")
    assert lost.cause == f"nothing was heard of it for 1 s: it {still}"


def test_a_process_that_waits_for_one_that_has_left_gives_up(job):
    made = job(2, silence_s=SILENCE_S)
    waits = threading.Event()
    made.start(is_waiting=waits.is_set)
    leaving = in_thread(made.watches[1].say_bye)
    until(lambda: made.watches[0]._left, "process 1 did not leave")
    assert made.watches[0].wait_for_loss(1.5 * SILENCE_S) is None  # it computes by itself
    waits.set()
    lost = made.lost(0)
    assert (lost.process, lost.cause) == (1, "its program has ended, while process 0 waits for it")
    assert leaving().process == 1


# ---- parting


def test_all_part_and_nobody_is_lost(job):
    made = job(3, silence_s=SILENCE_S).start()

    def leave(i):
        made.watches[i].say_bye()
        if i == 0:
            made.server.wait_until_alone(SOON_S)
        made.watches[i].part()

    before = time.monotonic()
    each(leave, [0, 1, 2])
    made.server.close()
    assert time.monotonic() - before < SOON_S
    assert all(losses.empty() for losses in made.losses.values())


def test_who_leaves_waits_for_the_others(job):
    made = job(2).start()
    said = []
    leaving = in_thread(lambda: (made.watches[1].say_bye(), said.append("left")))
    until(lambda: made.watches[0]._left, "process 1 did not leave")
    said.append("still there")
    made.watches[0].say_bye()
    leaving()
    assert said == ["still there", "left"]


def test_nothing_is_left_of_a_job(job):
    before = set(threading.enumerate())
    made = job(2).start()
    for watch in made.watches.values():
        watch.close()
    made.server.close()
    assert set(threading.enumerate()) <= before
    with socket.create_server((made.host, made.port)):
        pass
