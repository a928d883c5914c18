"""What processes say to all: exchanges that complete, that one leaves, and that leave nothing behind."""

import pytest

from jdist.errors import ClusterError, PeerLostError
from tests.cluster.processes_in_one import Network, run


@pytest.fixture
def network():
    return Network(3)


def say(network, key, processes=(0, 1, 2)):
    for process in processes:
        network.exchanges[process].say(key, process)


def test_everyone_hears_what_all_have_said_by_index(network):
    assert (
        run(3, lambda i: network.exchanges[i].exchange("a", {"from": i}, 20.0)) == [[{"from": i} for i in range(3)]] * 3
    )
    assert network.state.values == {}


def test_whoever_hears_nothing_yet_asks_again(network):
    say(network, "a", [0, 1])
    assert network.exchanges[0].hear("a", 0.0) is None
    say(network, "a", [2])
    assert network.exchanges[0].hear("a", 0.0) == [0, 1, 2]


def test_an_exchange_that_nobody_else_comes_to_ends_in_time(network):
    with pytest.raises(ClusterError, match=r"did not reach 'a' within 0 s"):
        network.exchanges[1].exchange("a", 1, 0.0)
    say(network, "a", [0, 2])
    assert network.exchanges[1]._answers == {}, "an answer that comes late is not kept"


def test_an_exchange_that_one_has_left_is_given_up_at_once(network):
    say(network, "pass 0, step 5", [0, 2])
    network.exchanges[1].forget("pass 0, ")
    network.beat()
    for process in (0, 2):
        with pytest.raises(ClusterError, match="process 1 will not reach 'pass 0, step 5': it left that loop"):
            network.exchanges[process].hear("pass 0, step 5", 20.0)


def test_whoever_comes_to_what_one_has_left_is_told(network):
    network.exchanges[1].forget("pass 0, ")
    network.beat()
    with pytest.raises(ClusterError, match="process 1 will not reach"):
        network.exchanges[0].exchange("pass 0, step 5", 0, 20.0)
    say(network, "pass 01, step 5")
    assert network.exchanges[0].hear("pass 01, step 5", 0.0) == [0, 1, 2], "another beginning is another matter"


def test_what_is_complete_can_be_heard_though_one_has_left(network):
    say(network, "pass 0, step 5")
    network.exchanges[1].forget("pass 0, ")
    network.beat()
    assert network.exchanges[0].hear("pass 0, step 5", 0.0) == [0, 1, 2]


def test_nothing_is_kept_once_all_have_left(network):
    for process in range(3):
        say(network, f"pass 0, step {process}", range(process + 1))
        network.exchanges[process].forget("pass 0, ")
    assert network.state.values != {}
    network.beat()
    assert (network.state.values, network.state.forgotten) == ({}, {})
    assert [exchanges._answers for exchanges in network.exchanges] == [{}, {}, {}]


def test_one_whose_program_has_ended_counts_as_having_left(network):
    say(network, "a", [0])
    network.exchanges[0].forget("b")
    network.beat()
    network.send(2, {"type": "bye"})
    with pytest.raises(ClusterError, match=r"process 2 will not reach 'a': .* its program has ended"):
        network.exchanges[0].hear("a", 20.0)
    network.exchanges[1].forget("b")
    network.beat()
    assert network.state.forgotten == {}


def test_one_that_leaves_an_exchange_after_its_program_has_ended_is_not_kept_for_ever(network):
    for process in (0, 1):
        network.exchanges[process].forget("a")
    network.beat()
    network.send(2, {"type": "bye"})
    network.exchanges[2].forget("a")
    network.beat()
    assert network.state.forgotten == {}


def test_a_loss_ends_all_waits(network):
    lost = PeerLostError(2, "host2:1", 7, "it was killed")

    def program(process):
        return network.exchanges[0].end(lost) if process else network.exchanges[0].exchange("a", 0, 20.0)

    assert run(2, program) == [lost, None]
