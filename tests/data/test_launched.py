"""Input of real processes, two with two devices each, and a position of theirs that four go on at."""

import json
from pathlib import Path

import numpy as np
import pytest

import jdist
from jdist.data import from_arrays
from tests.data import drawing

PROGRAM = Path(__file__).with_name("input_of_processes.py")
pytestmark = pytest.mark.xdist_group("processes")


def launched(folder, processes, devices, *arguments):
    """What each process wrote down."""
    result = jdist.launch(
        [str(PROGRAM), str(folder), *arguments],
        processes=processes,
        devices_per_process=devices,
        log_dir=folder / f"logs_{processes}",
    )
    assert result.exit_code == 0, result
    return [json.loads((folder / f"{processes}.{i}.json").read_text()) for i in range(processes)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("input")


@pytest.fixture(scope="module")
def two(folder):
    return launched(folder, 2, 2)


def rows_of_steps(processes, what):
    """Of each step the rows on all devices of all processes."""
    steps = zip(*(process[what] for process in processes), strict=True)
    return [[row for part in step for rows in part for row in rows] for step in steps]


def test_each_process_has_its_rows_of_a_global_batch(two):
    assert two[0]["data"] == [[[0, 1], [2, 3]], [[8, 9], [10, 11]]]
    assert two[1]["data"] == [[[4, 5], [6, 7]], [[12, 13], []]]


def test_what_each_replica_draws_meets_the_rows_of_one_process(two):
    one = drawing.losses(jdist.mirrored([f"cpu:{i}" for i in range(4)]))
    for process in two:
        np.testing.assert_allclose(process["drawing"], one, rtol=1e-6)


def test_each_process_reads_its_own_files(two):
    assert [process["reads"] for process in two] == [["3", "1"], ["2"]]
    assert two[0]["files"] == [[[3], [3]], [[3], [1]]]
    assert two[1]["files"] == [[[2], [2]], [[], []]]


def test_unequal_shares_are_masked_and_every_row_counts_once(two):
    expected = [[0, 1, 2, 3, 100, 101, 102, 103], [4, 5, 6, 7, 104], [8, 9]]
    for process in two:
        assert [rows for _, rows, _ in process["own"]] == expected, "examples are those of all processes"
        np.testing.assert_allclose([mean for mean, _, _ in process["own"]], [np.mean(rows) for rows in expected])
    assert [held for _, _, held in two[1]["own"]] == [[[100, 101], [102, 103]], [[104], []], [[], []]]


def test_what_a_dataset_tells_is_the_same_on_every_process(two):
    assert two[0]["told"] == two[1]["told"]
    shown, num_steps, global_batch, shape, state = two[0]["told"]
    assert shown == "DistributedDataset(global batch 8 = 4 replicas x 2, 3 steps, at step 0)"
    assert (num_steps, global_batch, shape) == (3, 8, [8])
    assert state["fingerprint"].startswith("processes=2 process_0.rows=10 ")


def test_prefetching_changes_nothing(two):
    for process in two:
        assert process["on_host"] == process["unhurried"] == [held for _, _, held in process["own"]]
        assert process["stacked"] == [[2, 8], [1, 8]]


def test_a_dataset_function_is_told_its_place_among_all_pipelines(two):
    assert [process["per_worker"][0] for process in two] == [[[2, 0, 4]], [[2, 1, 4]]]
    assert [process["per_worker"][1] for process in two] == [
        [[[0, 2], [4, 6]], [[8, 10], []]],
        [[[1, 3], [5, 7]], [[9, 11], []]],
    ]
    assert [process["per_replica"][0] for process in two] == [[[4, 0, 4], [4, 1, 4]], [[4, 2, 4], [4, 3, 4]]]
    assert [process["per_replica"][1] for process in two] == [
        [[[0, 4], [1, 5]], [[8, 9], []]],
        [[[2, 6], [3, 7]], [[10, 11], []]],
    ]


def test_an_error_on_one_process_is_an_error_on_all(two):
    assert two[1]["errors"][0] == "OSError: disk gone"
    assert two[0]["errors"][0] == "PeerFailedError: making batch 1 (from 0) failed on process 1: OSError: disk gone"
    assert two[0]["errors"][1] == "OSError: no such folder"
    failed = "PeerFailedError: the dataset function failed on process 0: OSError: no such folder"
    assert two[1]["errors"][1] == failed
    for process in two:
        assert "rows is 8 on process 0, and 9 on process 1" in process["errors"][2]
        assert "cannot be shared file by file" in process["errors"][3]
        assert "BatchError: batch leaf ['mask'] is a ArrayImpl that numpy cannot read" in process["errors"][4]


def test_loops_left_early_leave_nothing_in_memory(two):
    assert [process["left_behind"] for process in two] == [[0, 0, 0], [0]]


def test_four_processes_and_one_go_on_where_two_stopped(two, folder):
    state = two[0]["state"]
    assert state == two[1]["state"]
    source = from_arrays({"x": np.arange(40, dtype=np.float32)}, global_batch=8, shuffle_seed=3)
    order = [batch["x"].tolist() for batch in source]
    assert rows_of_steps(two, "saved") == order[:2]
    one = jdist.default().distribute_dataset(source)
    one.restore(state)
    assert [batch["x"].tolist() for batch in one] == order[2:]
    (folder / "state.json").write_text(json.dumps(state))
    four = launched(folder, 4, 1, str(folder / "state.json"))
    assert rows_of_steps(four, "resumed") == order[2:]
