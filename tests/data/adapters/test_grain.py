"""Grain's datasets as they are: their batches, their positions, and their errors."""

import dataclasses
import itertools
import os
import traceback

import numpy as np
import pytest

import jdist
from jdist.data import from_rows
from jdist.data.adapters.grain import _written
from jdist.data.adapters.recognize import adapted
from jdist.data.position import ProcessShard
from jdist.errors import BatchError, DatasetError, PeerFailedError
from tests.by_default import some
from tests.data.adapters.positions import Counted, check_nothing_is_read_again, check_position, fed, flat, rows
from tests.data.counting import distributed_dataset
from tests.data.job import Job

grain = pytest.importorskip("grain")


def elements(source=None):
    return grain.MapDataset.source(Counted(20) if source is None else source).seed(1).shuffle()


def loader(source=None, *, index=0, count=1, batch=6):
    source = Counted(20) if source is None else source
    options = grain.sharding.ShardOptions(shard_index=index, shard_count=count)
    sampler = grain.samplers.IndexSampler(len(source), num_epochs=1, shuffle=True, seed=1, shard_options=options)
    return grain.DataLoader(
        data_source=Source(source), sampler=sampler, operations=[grain.transforms.Batch(batch)], shard_options=options
    )


class Source:
    """A data source whose `repr`, by which Grain compares data, has no address."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, number):
        return self.data[number]

    def __repr__(self):
        return f"Source({len(self)})"


KINDS = {
    "MapDataset": lambda: elements().batch(6),
    "MapDataset repeated": lambda: elements().repeat(2).batch(6, drop_remainder=True),
    "MapDataset mixed": lambda: grain.MapDataset.mix([elements(), elements()], weights=[3, 1]).batch(6),
    "MapDataset of batches": lambda: elements().batch(6).map(lambda batch: dict(batch)),
    "IterDataset": lambda: elements().to_iter_dataset().filter(lambda row: row["y"] % 3 > 0).batch(4),
    "DataLoader": loader,
    "iterator": lambda: iter(elements().batch(6).to_iter_dataset()),
    "windows": lambda: grain.experimental.WindowShuffleIterDataset(
        elements().to_iter_dataset(), window_size=5, seed=2
    ).batch(6),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_is_exact(kind):
    slow = kind in ("windows", "MapDataset repeated", "MapDataset mixed")
    first, *_ = check_position(KINDS[kind], stops=(2,) if slow else (0, 1, 4), passes=2)
    if kind != "iterator":
        assert first == [batch["y"].tolist() for batch in KINDS[kind]()], "as Grain itself gives them"


@pytest.mark.parametrize("kind", [each for each in KINDS if each.startswith("Map")])
def test_batches_are_those_of_grain_to_the_bit(kind):
    given = KINDS[kind]()
    source = dataclasses.replace(adapted(KINDS[kind]()), epochs=None)
    for number in range(2 * len(given)):  # epochs have orders of their own, by their numbers
        ours, theirs = source.batch_at(number), given[number]
        assert ours.keys() == theirs.keys()
        for name, leaf in theirs.items():
            np.testing.assert_array_equal(ours[name], leaf, strict=True)


def test_the_state_of_a_loader_is_the_one_that_grain_writes():
    source, given = adapted(loader()), iter(loader())
    batches = source.open(0, None)
    for _ in range(3):
        (_, state), _ = next(batches), next(given)
        assert isinstance(state, dict), "values, which are written when a pass is opened"
        assert _written(source.from_plain(source.to_plain(state))) == given.get_state()
    again, _ = next(source.open(0, state))
    np.testing.assert_array_equal(again["y"], next(given)["y"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_that_was_looked_at_is_the_same(kind):
    given = KINDS[kind]()
    before = adapted(given).fingerprint
    if kind != "iterator":
        next(iter(given))
        assert len(rows(fed(given)))
    assert adapted(given).fingerprint == adapted(KINDS[kind]()).fingerprint == before


def test_a_dataset_without_end_has_no_len():
    dataset = fed(elements().repeat().batch(6))
    assert dataset.is_endless
    assert dataset.num_steps is None
    assert [len(set(rows)) for rows in (b["y"].tolist() for b in itertools.islice(dataset, 3))] == [6, 6, 6]


@pytest.mark.parametrize("kind", ["map", "iter"])
def test_a_far_batch_is_reached_without_reading_those_before(kind):
    source = Counted(10**8)
    given = elements(source).batch(64)
    make = (lambda: given) if kind == "map" else (lambda: given.to_iter_dataset(grain.ReadOptions(num_threads=0)))
    dataset = fed(make(), prefetch=0)
    if kind == "map":
        dataset.go_to(100_000)
    else:
        saved = {**dataset.state(), "step": 100_000}
        saved["sources"][0]["state"] = {"next_index": 100_000}
        dataset.restore(saved)
    source.reads.clear()
    batch = next(iter(dataset))
    assert sorted(set(source.reads) - {0, 10**8 - 1}) == sorted(set(batch["y"].tolist()) - {0, 10**8 - 1})
    assert len(source.reads) <= 2 * 64 + 2  # the first batch, for its shape, and the ends, for the fingerprint


@pytest.mark.parametrize("make", [loader, lambda counted: elements(counted).batch(6).to_iter_dataset()])
def test_what_was_had_is_not_read_again(make):
    check_nothing_is_read_again(make, stop=40)


def test_each_process_reads_its_own_rows_alone():
    for index in range(2):
        source = Counted(16)
        dataset = distributed_dataset(
            elements(source).batch(8), num_replicas=4, share=ProcessShard(index=index, count=2), prefetch=0
        )
        own = [row for batch in dataset for row in batch["y"].tolist()]
        assert len(own) == 8
        assert sorted(set(source.reads) - {0, 15}) == sorted(set(own) - {0, 15})


def test_a_process_that_has_to_read_whole_batches_is_told_how_to_read_less():
    with pytest.warns(
        UserWarning, match=r"each of the 2 processes reads all batches of the grain MapDataset.*batch it last"
    ):
        (zero, one) = Job(2).batches(elements().batch(6).map(lambda batch: batch), autoshard="auto")
    assert [flat(pair) for pair in zip(*(real(part) for part in (zero, one)), strict=True)] == rows(
        fed(elements().batch(6))
    )


def real(batches):
    return [batch["y"][batch["mask"]].tolist() for batch in batches]


# ---- a part for each process


def parts(job, stop=None, saved=None, sizes=(20, 14), **options):
    """What each process is fed of loaders of its own, and the positions after `stop` batches."""

    def program(process):
        dataset = job.dataset(process, loader(Counted(sizes[process])), autoshard="off", **options)
        if saved is not None:
            dataset.restore(saved)
        iterator = iter(dataset)
        batches = list(itertools.islice(iterator, stop))
        state = dataset.state() if stop is not None else None
        return real(batches), state

    return job.run(program)


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_the_position_of_parts_is_exact_where_one_ends_before_the_other(stop):
    (whole_0, _), (whole_1, _) = parts(Job(2))
    assert [len(batch) for batch in whole_1] == [6, 6, 2, 0], "7 batches of the one and 3 of the other"
    (_, saved), (_, same) = parts(Job(2), stop)
    assert saved["sources"] == same["sources"]
    assert len(saved["sources"]) == 2
    (rest_0, _), (rest_1, _) = parts(Job(2), saved=saved)
    assert (rest_0, rest_1) == (whole_0[stop:], whole_1[stop:])


def test_a_loader_that_shards_by_process_is_read_as_its_own_part():
    job = Job(2)

    def program(process):
        return real(list(job.dataset(process, loader(index=process, count=2), autoshard="auto")))

    zero, one = job.run(program)
    assert sorted(flat(zero + one)) == [*range(20)]
    assert [len(batch) for batch in zero] == [6, 4]


def test_a_part_that_is_not_the_process_s_own_is_refused():
    job = Job(2)
    refused = job.run(lambda process: job.dataset(process, loader(index=0, count=2), autoshard="auto"))
    assert isinstance(refused[0], PeerFailedError)
    assert "gives part 0 of 2 to this process, which is process 1 of 2" in str(refused[1])
    job = Job(2)
    refused = job.run(lambda process: job.dataset(process, loader(index=process, count=2), autoshard="data"))
    assert all("so the processes share one source" in str(error) for error in refused)


def test_a_position_of_parts_fits_as_many_processes():
    (_, saved), _ = parts(Job(2), 1)
    with pytest.raises(
        DatasetError, match="is that of 2 processes with a part of the data each, and there are now one"
    ):
        fed(loader(Counted(20))).restore(saved)


# ---- bad input


def test_rows_are_refused_with_what_to_do():
    with pytest.raises(
        DatasetError, match=r"elements of a grain MapDataset are taken as batches.*single number at \['y'\]"
    ):
        fed(elements())
    with pytest.raises(DatasetError, match=r"elements of a grain IterDataset are taken as batches"):
        rows(fed(elements().to_iter_dataset()))
    with pytest.raises(ValueError, match="can not follow"):
        from_rows(elements().filter(lambda row: row["y"] > 3), global_batch=4)


def test_a_filter_between_numbers_is_refused():
    batches = elements().batch(4).filter(lambda batch: 7 not in batch["y"])
    with pytest.raises(DatasetError, match="is None: a filter has left it out"):
        rows(fed(batches))


def broken(row):
    if row["y"] == 7:
        raise ValueError("bad pixel")
    return row


def test_an_error_names_the_record_and_the_batch():
    dataset = fed(elements().map(broken).batch(6))
    with pytest.raises(ValueError, match="bad pixel") as caught:
        rows(dataset)
    order = list(range(20))
    place = [elements()[number]["y"] for number in order].index(7)
    record, batch = caught.value.__notes__
    assert record == f"while reading element {place} (from 0), record 7 of the Counted"
    assert batch == f"while making batch {place // 6} (from 0) of a grain MapDataset"


def test_an_error_in_a_file_names_the_file(tmp_path):
    module = pytest.importorskip("array_record.python.array_record_module")
    paths = []
    for number in range(2):
        paths.append(str(tmp_path / f"part-{number}.array_record"))
        writer = module.ArrayRecordWriter(paths[-1], "group_size:1")
        for i in range(4):
            writer.write(np.int64(10 * number + i).tobytes())
        writer.close()

    def decode(record):
        return broken({"y": np.frombuffer(record, np.int64)[0] - 6})

    source = grain.sources.ArrayRecordDataSource(paths)
    with pytest.raises(ValueError, match="bad pixel") as caught:
        rows(fed(grain.MapDataset.source(source).map(decode).batch(4)))
    assert caught.value.__notes__[0].endswith(f"record 7 of the ArrayRecordDataSource: record 3 of {paths[1]!r}")


def in_processes(workers):
    return grain.MultiprocessingOptions(num_workers=workers)


def broken_loader(workers):
    class Broken(grain.transforms.Map):
        def map(self, row):
            return broken(row)

    sampler = grain.samplers.IndexSampler(
        20, num_epochs=2, shuffle=True, seed=1, shard_options=grain.sharding.NoSharding()
    )
    return grain.DataLoader(
        data_source=Source(Counted(20)),
        sampler=sampler,
        operations=[Broken(), grain.transforms.Batch(6)],
        worker_count=workers,
    )


ITERATED = {
    "batched before": lambda workers: (
        elements().map(broken).batch(6).to_iter_dataset().mp_prefetch(in_processes(workers))
    ),
    "batched behind": lambda workers: (
        elements().to_iter_dataset().map(broken).batch(6).mp_prefetch(in_processes(workers))
    ),
    "repeated": lambda workers: (
        elements().repeat(3).map(broken).batch(6).to_iter_dataset().mp_prefetch(in_processes(workers))
    ),
    "DataLoader": broken_loader,
}


# With worker processes it takes 6 s each.
@pytest.mark.parametrize(
    ("kind", "workers"), some([(kind, n) for kind in ITERATED for n in (0, 2)], default=[(k, 0) for k in ITERATED])
)
def test_an_error_in_an_iteration_has_its_traceback_and_names_the_record(kind, workers):
    dataset = fed(ITERATED[kind](workers))
    batches = []
    with pytest.raises(ValueError, match="bad pixel") as caught:
        batches.extend(batch for batch in dataset)
    assert "in broken" in "".join(traceback.format_exception(caught.value))
    *_, record, batch = caught.value.__notes__
    assert record.startswith("while reading element ")
    assert record.endswith(f"(from 0), record 7 of the {'Source' if kind == 'DataLoader' else 'Counted'}")
    assert batch.startswith(f"while making batch {len(batches)} (from 0) of a grain ")


def test_an_error_of_a_batch_names_all_of_its_records():
    def broken_batch(batch):
        if 7 in batch["y"]:
            raise ValueError("bad batch")
        return batch

    with pytest.raises(ValueError, match="bad batch") as caught:
        rows(fed(grain.MapDataset.source(Counted(20)).batch(3).to_iter_dataset().map(broken_batch)))
    *_, record, _ = caught.value.__notes__
    expected = "; ".join(f"element {i} (from 0), record {i} of the Counted" for i in (6, 7, 8))
    assert record == f"while reading one of {expected}"


def test_an_error_behind_a_filter_names_the_batch_alone():
    given = elements().to_iter_dataset().filter(lambda row: row["y"] != 3).map(broken).batch(6)
    with pytest.raises(ValueError, match="bad pixel") as caught:
        rows(fed(given))
    assert not any("while reading" in note for note in caught.value.__notes__)
    assert "of a grain IterDataset" in caught.value.__notes__[-1]


def test_a_position_that_grain_refuses_is_no_error_of_a_row():
    other = fed(loader(Counted(21)))
    next(iter(other))
    dataset = fed(loader(Counted(20)))
    dataset.restore(other.state())
    with pytest.raises(ValueError, match="in checkpoint does not match") as caught:
        rows(dataset)
    assert not any("while reading" in note for note in caught.value.__notes__)


def dying(row):
    if row["y"] == 7:
        os._exit(3)
    return row


@pytest.mark.full  # starts processes
def test_a_worker_that_dies_is_named():
    given = elements().map(dying).batch(6).to_iter_dataset().mp_prefetch(in_processes(1))
    with pytest.raises(RuntimeError, match="Worker process was terminated unexpectedly with exit code 3") as caught:
        rows(fed(given))
    assert caught.value.__notes__[-1].endswith("of a grain IterDataset")


def test_rows_of_a_worker_that_died_are_not_read_again():
    source = Counted(20)
    given = elements(source).batch(6).to_iter_dataset()
    died = RuntimeError("Worker process was terminated unexpectedly with exit code -9.")
    assert adapted(given).describe_batch(0, died) is None
    assert not source.reads


def test_a_row_that_differs_within_a_batch_is_named():
    def crop(row):
        return {**row, "x": row["x"][:2]} if row["y"] == 7 else row

    with pytest.raises(
        BatchError, match=r"element 7 \(from 0\), record 7 of the Counted differs from element 6 .*\['x'\] was"
    ):
        rows(fed(grain.MapDataset.source(Counted(20)).map(crop).batch(6)))


def test_positions_of_other_data_are_refused_in_worker_processes_too():
    first, other = (
        fed(elements(Counted(20)).shuffle(seed=n).batch(6).to_iter_dataset().mp_prefetch(in_processes(2)))
        for n in (1, 2)
    )
    assert first._reader.source.fingerprint != other._reader.source.fingerprint


def test_batches_that_change_are_named():
    def change(batch):
        return batch if len(batch["y"]) == 6 else {**batch, "x": batch["x"].astype(np.int8)}

    for given in (elements().batch(6).map(change), elements().batch(6).map(change).to_iter_dataset()):
        with pytest.raises(BatchError, match=r"\['x'\] was float32\[rows, 3\] and is int8") as caught:
            rows(fed(given))
        assert caught.value.__notes__ == ["in batch 3 (from 0) of the pass"]


def test_a_position_of_another_pipeline_is_refused():
    for other in (elements().batch(5), grain.MapDataset.source(Counted(20)).shuffle(seed=2).batch(6)):
        saved = fed(elements().batch(6)).state()
        with pytest.raises(DatasetError, match=r"belongs to another dataset: .*(pipeline|global_batch)"):
            fed(other).restore(saved)
        saved = fed(elements().batch(6).to_iter_dataset()).state()
        with pytest.raises(DatasetError, match="belongs to another dataset: pipeline was"):
            fed(other.to_iter_dataset()).restore(saved)


# ---- fit


def test_fit_takes_rows_and_epochs_in_new_orders():
    seen = []

    def train_step(state, batch):
        return state + jdist.mean(batch["x"][:, 0], batch["mask"]), {"loss": state}

    callback = jdist.callbacks.Callback(on_step=lambda moment: seen.append(moment.step))
    options = {"epochs": 2, "progress": False, "log_to": None, "callbacks": [callback]}
    strategy = jdist.one_device()
    state, _history = jdist.fit(train_step, np.float32(0), elements(), strategy=strategy, global_batch=8, **options)
    assert seen == [*range(1, 7)]
    orders = [[elements()[epoch * 20 + i]["y"] for i in range(20)] for epoch in range(2)]
    assert orders[0] != orders[1]
    means = [np.mean(order[i : i + 8]) for order in orders for i in range(0, 20, 8)]
    np.testing.assert_allclose(float(state), sum(means), rtol=1e-6)
    with pytest.raises(DatasetError, match="`global_batch` is 8, but `data` is a grain MapDataset, which has batches"):
        jdist.fit(train_step, 0.0, elements().batch(4), strategy=strategy, global_batch=8, **options)
    with pytest.raises(DatasetError, match="and jdist does not shuffle that"):
        jdist.fit(train_step, 0.0, elements().batch(4), strategy=strategy, shuffle_seed=8, **options)
