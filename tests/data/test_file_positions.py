"""Positions in files, their shuffled order, and several threads that read them: the same rows, whoever reads and resumes."""

import itertools
import json
import threading

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jdist.data import from_files, shard
from jdist.data.sources.files import FilePosition, file_position
from jdist.errors import BatchError, DatasetError
from tests.data.counting import feed, real_rows
from tests.data.job import Job


class Files(dict):
    """Rows by path, counted on from file to file; remembers what was read."""

    def __init__(self, sizes):
        ends = np.cumsum(sizes)
        super().__init__(
            (f"f{i}", np.arange(end - size, end)) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
        )
        self.asked = []

    def read(self, path):
        self.asked.append(path)
        return {"x": self[path].copy()}

    def source(self, global_batch, **options):
        return from_files(self, self.read, global_batch=global_batch, **options)


def values(batches):
    return [batch["x"].tolist() for batch in batches]


def run(source, position=None):
    """Yields the batches of a pass, each with the position behind it."""
    return source.open(0, position)


def saved(position):
    source = Files([1]).source(1)
    plain = source.to_plain(position)
    assert json.loads(json.dumps(plain)) == plain, "as a checkpoint requires"
    return source.from_plain(plain)


sources = st.fixed_dictionaries(
    {
        "sizes": st.lists(st.integers(0, 7), min_size=1, max_size=7),
        "global_batch": st.integers(1, 9),
        "seed": st.none() | st.integers(0, 5),
        "window": st.integers(1, 8),
        "epochs": st.integers(1, 3),
    }
)


def make(of, workers=1, num_shards=1, index=0):
    files = Files(of["sizes"])
    window = {} if of["seed"] is None else {"shuffle_window": of["window"]}
    source = files.source(of["global_batch"], epochs=of["epochs"], shuffle_seed=of["seed"], workers=workers, **window)
    return files, shard(source, num_shards, index, policy="data")


@given(of=sources, stop=st.integers(0, 60), shards=st.sampled_from([(1, 0), (2, 0), (3, 2)]))
@settings(deadline=None, max_examples=200)
def test_resumed_anywhere_is_as_uninterrupted_and_reads_no_more_than_a_window_again(of, stop, shards):
    files, source = make(of, 1, *shards)
    try:
        whole = list(run(source))
    except DatasetError:
        assume(False)
    assume(stop < len(whole))
    _, position = whole[stop]

    again, resumed = make(of, 1, *shards)
    rest = list(run(resumed, saved(position)))
    assert values(batch for batch, _ in rest) == values(batch for batch, _ in whole[stop + 1 :])
    assert [at for _, at in rest] == [at for _, at in whole[stop + 1 :]]
    # What it reads is the end of what the uninterrupted run read, from the first file of the position's window on.
    assert again.asked == files.asked[position.epoch * len(files) + position.file :]


@given(of=sources)
@settings(deadline=None)
def test_every_row_comes_once_an_epoch_from_the_files_of_one_window_after_another(of):
    assume(sum(of["sizes"]) > 0)
    files, source = make(of)
    rows = [row for batch in values(source) for row in batch]
    count, window = sum(of["sizes"]), source.window
    for epoch in range(of["epochs"]):
        mine, read = rows[epoch * count :][:count], files.asked[epoch * len(files) :][: len(files)]
        assert sorted(read) == sorted(files)
        for first in range(0, len(read), window):
            together = np.concatenate([files[path] for path in read[first : first + window]])
            assert sorted(mine[: len(together)]) == sorted(together.tolist())
            mine = mine[len(together) :]


@given(of=sources, workers=st.integers(2, 4), stop=st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_several_workers_give_what_one_gives(of, workers, stop):
    assume(sum(of["sizes"]) > 0)
    whole = list(run(make(of)[1]))
    same = list(run(make(of, workers)[1]))
    assert values(batch for batch, _ in same) == values(batch for batch, _ in whole)
    _, position = same[min(stop, len(same) - 1)]
    assert values(batch for batch, _ in run(make(of, workers)[1], saved(position))) == values(
        batch for batch, _ in whole[stop + 1 :]
    )


@given(of=sources, num_shards=st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_shards_of_shuffled_files_are_disjoint_and_whole_and_keep_their_rows(of, num_shards):
    assume(sum(of["sizes"]) > 0)
    of = of | {"seed": of["seed"] or 0, "epochs": 2}
    parts = []
    for index in range(num_shards):
        try:
            parts.append(sorted(row for batch in values(make(of, 1, num_shards, index)[1]) for row in batch))
        except DatasetError:
            parts.append([])  # no row is left for it
    assert sorted(itertools.chain(*parts)) == sorted([*range(sum(of["sizes"]))] * 2)
    assert all(part[::2] == part[1::2] for part in parts)


def test_epochs_have_orders_of_their_own_and_a_seed_has_one():
    options = {"shuffle_seed": 1, "shuffle_window": 2, "epochs": 2}
    first, second = np.split(np.concatenate(values(Files([8] * 6).source(8, **options))), 2)
    assert first.tolist() != second.tolist()
    assert first.tolist() != list(range(48))
    assert values(Files([8] * 6).source(8, **options)) == values(Files([8] * 6).source(8, **options))
    assert values(Files([8] * 6).source(8, **options)) != values(
        Files([8] * 6).source(8, **options | {"shuffle_seed": 2})
    )


def test_the_order_is_the_one_of_saved_positions():
    source = Files([3, 2, 4]).source(9, shuffle_seed=3, shuffle_window=2)
    assert values(source) == [[8, 6, 3, 5, 7, 4, 0, 2, 1]]


def test_the_files_of_a_position_must_be_as_long_as_they_were():
    files = Files([4, 4])
    batches = run(files.source(3))
    next(batches)
    _, position = next(batches)
    files["f1"] = np.arange(3)
    with pytest.raises(DatasetError, match="the saved position is in 'f1', which had 4 rows then and has 3 now"):
        list(run(files.source(3), position))


@pytest.mark.parametrize(
    "broken",
    [None, {}, {"epoch": 0}, {**FilePosition()._asdict(), "file": -1}, {**FilePosition()._asdict(), "counts": 3}],
)
def test_what_is_no_position_is_refused(broken):
    with pytest.raises(DatasetError, match="not a saved position in files"):
        file_position(broken)


# --- of a dataset, in one process and in several ---


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_dataset_goes_on_at_a_saved_row_in_every_pass(prefetch):
    def dataset():
        source = Files([3, 4, 0, 5]).source(4, shuffle_seed=1, shuffle_window=2, epochs=2)
        return feed(source, num_replicas=1, prefetch=prefetch)

    whole = dataset()
    passes = [real_rows(whole) for _ in range(4)]
    assert len({tuple(rows[start:][:12]) for rows in passes for start in (0, 12)}) == 8, "each epoch has its own order"
    for number, rows in enumerate(passes[:3]):
        first = dataset()
        for _ in range(number):
            list(first)
        states = [first.state()] * bool(not number) + [first.state() for _ in first]
        for state in states:
            again = dataset()
            again.restore(json.loads(json.dumps(state)))
            assert again.position == state["step"]
            left = real_rows(again)
            assert left == rows[len(rows) - len(left) :]
            assert len(left) == 4 * (6 - state["step"])
            assert real_rows(again) == passes[number + 1]


def test_a_position_of_other_files_or_another_order_is_refused_by_name():
    saved = feed(Files([2, 2]).source(2, shuffle_seed=0)).state()
    for source, message in (
        (Files([2, 2]).source(2, shuffle_seed=1), "shuffle_seed was 0 and is 1"),
        (Files([2, 2]).source(2, shuffle_seed=0, shuffle_window=1), "shuffle_window was 2 and is 1"),
        (Files([2, 2]).source(2), "shuffle_seed was 0 and is None; shuffle_window was 2 and is not there"),
        (Files([2, 2, 2]).source(2, shuffle_seed=0), "files was 2 and is 3; names was"),
        (Files([2, 2]).source(3, shuffle_seed=0), "global_batch was 2 and is 3"),
    ):
        with pytest.raises(DatasetError, match=f"belongs to another dataset: .*{message}"):
            feed(source).restore(saved)


def test_a_run_may_be_prolonged_but_not_shortened():
    dataset = feed(Files([2, 2]).source(2, epochs=2), prefetch=0)
    *_, state = [dataset.state() for _ in itertools.islice(dataset, 4)]
    longer = feed(Files([2, 2]).source(2, epochs=3), prefetch=0)
    longer.restore(state)
    assert real_rows(longer) == [0, 1, 2, 3]
    shorter = feed(Files([2, 2]).source(2, epochs=1), prefetch=0)
    shorter.restore(state)
    with pytest.raises(DatasetError, match="is in epoch 2, but pass 0 of a source of 1 epochs goes from 0 to 1"):
        list(shorter)


@pytest.mark.parametrize("autoshard", ["data", "file", "off"])
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_processes_go_on_together_each_in_its_own_files(autoshard, stop):
    def program(job, saved=None, stop=None):
        def on(process):
            files = Files([3, 4, 0, 5, 9])
            if autoshard == "off":  # unequally many rows, too
                files = Files([7, 4]) if process else Files([2, 3, 3])
            dataset = job.dataset(process, files.source(4, shuffle_seed=1, shuffle_window=2), autoshard=autoshard)
            if saved is not None:
                dataset.restore(saved[process])
            batches = iter(dataset)
            rows = [real_rows([batch]) for batch in itertools.islice(batches, stop)]
            state = None if stop is None else json.loads(json.dumps(dataset.state()))
            dataset.close()
            return rows, state

        return job.run(on)

    whole = program(Job(2))
    first = program(Job(2), stop=stop)
    # As a checkpoint has it: what process 0 wrote is read by all.
    rest = program(Job(2), saved=[first[0][1]] * 2)
    assert [a + b for (a, _), (b, _) in zip(first, rest, strict=True)] == [rows for rows, _ in whole]
    assert sum(len(rows) for rows, _ in first) > 0 or stop == 0


def test_the_position_of_all_rows_fits_any_number_of_processes_and_one_of_own_files_as_many():
    files = Files([4, 4, 4])
    one = feed(files.source(6, shuffle_seed=1))
    next(batches := iter(one))
    state, rest = one.state(), real_rows(batches)

    def on(job, autoshard):
        def program(process):
            dataset = job.dataset(process, Files([4, 4, 4]).source(6, shuffle_seed=1), autoshard=autoshard)
            dataset.restore(state)
            return [real_rows([batch]) for batch in dataset]

        return job.run(program)

    parts = on(Job(3), "data")
    assert sorted(row for part in parts for rows in part for row in rows) == sorted(rest)
    for refused in on(Job(3), "file"):
        assert "one source, the same in all processes, and there are now 3 processes with a part" in str(refused)


# --- several threads ---


def test_as_many_files_are_read_at_once_as_there_are_workers():
    files, together = Files([2] * 6), threading.Barrier(3, timeout=60)

    def read(path):
        together.wait()  # broken, and an error, if fewer than three wait here
        return files.read(path)

    source = from_files(files, read, global_batch=4, workers=3)
    assert values(source) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("options", [{}, {"workers": 3}, {"shuffle_seed": 0, "workers": 2}])
def test_what_raises_in_a_thread_has_its_traceback_and_names_file_and_row(options):
    files = Files([2, 2, 2, 2])

    def decode(path):
        if path == "f2":
            raise OSError("image 7 is truncated")
        return files.read(path)

    seen = []
    with pytest.raises(OSError, match="image 7 is truncated") as raised:
        seen.extend(from_files(files, decode, global_batch=2, **options))
    assert raised.traceback[-1].name == "decode"
    (note,) = raised.value.__notes__
    if "shuffle_seed" in options:
        assert note.startswith("while reading 'f2': file ")
    else:
        assert note == "while reading 'f2': file 3 of 4 of epoch 0, behind 4 rows of it"
        assert values(seen) == [[0, 1], [2, 3]]  # those before it came


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("harm", ["vanishes", "is cut off", "is empty"])
def test_a_file_that_is_damaged_while_others_are_read_is_named_with_its_row(tmp_path, harm, workers):
    for number in range(5):
        np.save(tmp_path / f"{number}.npy", np.arange(3) + 3 * number)
    last = tmp_path / "4.npy"
    source = from_files(sorted(tmp_path.iterdir()), np.load, global_batch=3, workers=workers)
    batches = iter(source)
    assert next(batches).tolist() == [0, 1, 2]
    content = last.read_bytes()
    last.unlink()
    if harm != "vanishes":
        last.write_bytes(content[:-1] if harm == "is cut off" else b"")
    seen = []
    with pytest.raises((FileNotFoundError, ValueError, EOFError)) as raised:
        seen.extend(batch.tolist() for batch in batches)
    assert raised.value.__notes__ == [f"while reading {str(last)!r}: file 5 of 5 of epoch 0, behind 12 rows of it"]
    assert seen == [[3, 4, 5], [6, 7, 8], [9, 10, 11]], "nothing before it is lost"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_reader_that_raises_stop_iteration_does_not_end_the_data(workers):
    files = Files([2, 2])

    def read(path):
        return next(iter([])) if path == "f1" else files.read(path)

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(from_files(files, read, global_batch=2, workers=workers))


def test_threads_end_with_the_loop():
    before = set(threading.enumerate())
    batches = iter(Files([2] * 9).source(2, workers=3, epochs=None))
    next(batches)
    threads = [each for each in threading.enumerate() if each.name == "jdist-prefetch" and each not in before]
    assert len(threads) == 3
    del batches
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.mark.parametrize("options", [{"shuffle_seed": 0}, {"workers": 2}])
def test_a_reader_that_refills_its_memory_while_it_is_in_use_is_refused(options):
    memory = np.zeros(2, np.int32)
    with pytest.raises(BatchError, match=r"`read` returned the same memory for 'a' and 'b'|for 'b' and 'a'"):
        list(from_files(["a", "b"], lambda path: memory, global_batch=2, **options))
    memory.flags.writeable = False
    assert len(list(from_files(["a", "b"], lambda path: memory, global_batch=2, **options))) == 2
