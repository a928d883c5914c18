"""Hugging Face's datasets as they are: their batches, their positions, and their errors."""

import numpy as np
import pytest

import jdist
from jdist.checkpoint import CheckpointWarning
from jdist.data import from_rows
from jdist.data.adapters.recognize import adapted
from jdist.data.position import ProcessShard
from jdist.errors import BatchError, DatasetError
from tests.data.adapters.positions import check_position, fed, flat, rows
from tests.data.counting import distributed_dataset
from tests.data.job import Job

datasets = pytest.importorskip(
    "datasets", reason='Hugging Face datasets are not installed: pip install "jdist[loaders]"'
)
from datasets.distributed import split_dataset_by_node  # noqa: E402 - where they are

datasets.disable_progress_bars()


def given(count=20):
    return datasets.Dataset.from_dict({"x": np.arange(2 * count).reshape(count, 2), "y": np.arange(count)})


def streamed(**options):
    return given(**options).to_iterable_dataset(num_shards=4)


KINDS = {
    "Dataset of batches": lambda: given().batch(6),
    "Dataset": lambda: from_rows(given(), global_batch=6, shuffle_seed=3),
    "IterableDataset": lambda: streamed().batch(6),
    "IterableDataset with numpy": lambda: streamed().with_format("numpy").batch(6),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_is_exact(kind):
    check_position(KINDS[kind], stops=(0, 1, 4))


def test_rows_and_tables_become_arrays():
    (batch,) = from_rows(given(2), global_batch=2)
    assert batch["x"].tolist() == [[0, 1], [2, 3]]
    assert batch["y"].dtype == np.int64
    in_float32 = given(2).with_format("numpy", columns=["x"], dtype=np.float32)
    (batch,) = from_rows(in_float32, global_batch=2)
    assert [*batch] == ["x"]
    assert batch["x"].dtype == np.float32


def counted(dataset, reads):
    def transform(rows):
        reads.extend(int(row) for row in rows["y"])
        return {name: np.asarray(column) for name, column in rows.items()}

    return dataset.with_transform(transform)


def test_a_far_batch_reads_its_own_rows_alone():
    reads = []
    dataset = fed(from_rows(counted(given(1000), reads), global_batch=4, epochs=None, shuffle_seed=0), prefetch=0)
    dataset.go_to(100_000)
    batch = next(iter(dataset))
    assert sorted(reads) == sorted(batch["y"].tolist())
    assert len(reads) == 4


def test_each_of_several_processes_reads_its_own_rows_alone():
    for index in range(2):
        reads = []
        source = from_rows(counted(given(16), reads), global_batch=8, shuffle_seed=1)
        share = ProcessShard(index=index, count=2)
        own = [
            row
            for batch in distributed_dataset(source, num_replicas=4, share=share, prefetch=0)
            for row in batch["y"].tolist()
        ]
        assert reads == own
        assert len(own) == 8


def test_a_part_for_each_process_is_recognised_and_its_position_is_exact():
    def make(process):
        return split_dataset_by_node(streamed(), rank=process, world_size=2).batch(3)

    def program(job, saved=None, stop=None):
        def run(process):
            dataset = job.dataset(process, make(process), autoshard="auto")
            if saved is not None:
                dataset.restore(saved)
            iterator = iter(dataset)
            had = [next(iterator)["y"].tolist() for _ in range(stop or 0)]
            return had if stop is None else dataset.state(), rows(dataset)

        return job.run(run)

    (_, whole_0), (_, whole_1) = program(Job(2))
    assert sorted(flat(whole_0 + whole_1)) == [*range(20)]
    (saved, rest_0), (_, rest_1) = program(Job(2), stop=2)
    assert (rest_0, rest_1) == (whole_0[2:], whole_1[2:])
    (_, rest_0), (_, rest_1) = program(Job(2), saved=saved)
    assert (rest_0, rest_1) == (whole_0[2:], whole_1[2:])


def test_a_shuffle_buffer_has_no_position_and_fit_says_so(tmp_path):
    shuffled = streamed().shuffle(seed=1, buffer_size=8)
    assert not fed(shuffled.batch(5)).is_resumable

    def train_step(state, batch):
        return state + batch["y"].sum(), {"loss": state}

    with pytest.warns(CheckpointWarning, match="leaves out the rows in the buffer of `shuffle`.*map-style"):
        jdist.fit(
            train_step,
            np.int32(0),
            shuffled,
            strategy=jdist.one_device(),
            global_batch=5,
            progress=False,
            log_to=None,
            verify="off",
            callbacks=[jdist.callbacks.checkpoint(tmp_path)],
        )


@pytest.mark.filterwarnings("ignore::jdist.checkpoint.CheckpointWarning")
def test_fit_reads_a_pass_without_a_position_again_in_the_order_of_that_pass(tmp_path):
    def run(steps, callbacks=()):
        shuffled = streamed().shuffle(seed=1, buffer_size=8)
        return jdist.fit(
            lambda state, batch: (31 * state + (batch["y"] * np.arange(5)).sum(), {"loss": state}),
            np.int32(0),
            shuffled,
            strategy=jdist.one_device(),
            steps=steps,
            global_batch=5,
            progress=False,
            log_to=None,
            verify="off",
            callbacks=callbacks,
        )[0]

    for stopped in (3, 4, 6, 8):
        for steps in (stopped, 11):
            state = run(steps, [jdist.callbacks.checkpoint(tmp_path / f"{stopped}")])
        assert int(state) == int(run(11)), f"stopped at step {stopped}"


def test_rows_are_refused_with_what_to_do():
    with pytest.raises(DatasetError, match=r"Hugging Face Dataset are taken as batches.*from_rows"):
        fed(given())
    with pytest.raises(DatasetError, match=r"Hugging Face IterableDataset are taken as batches"):
        rows(fed(streamed()))
    with pytest.raises(
        DatasetError, match=r"a DatasetDict has several splits, \['train'\]; take one: `dataset\['train'\]`"
    ):
        fed(datasets.DatasetDict(train=given()))


def test_what_a_device_cannot_hold_is_named():
    named = datasets.Dataset.from_dict({"y": [1, 2], "name": ["a", "b"]})
    with pytest.raises(BatchError, match=r"\['name'\].*dtype <U1.*leave it out"):
        rows(fed(from_rows(named, global_batch=2)))
    ragged = datasets.Dataset.from_dict({"y": [[1], [1, 2]]})
    with pytest.raises(
        BatchError, match=r"\['y'\].*dtype object.* row 0 of the batch is of shape \(1,\), and row 1 of shape \(2,\)"
    ):
        rows(fed(from_rows(ragged, global_batch=2)))


def with_null(number, kind=None):
    values = [None if row == number else row for row in range(8)]
    return datasets.Dataset.from_dict({"y": values}).with_format(kind)


@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
def test_a_null_among_integers_is_named_and_does_not_make_floats_of_them(kind):
    for number in (1, 5):
        with pytest.raises(
            BatchError, match=rf"column 'y' have a null in row {number} \(from 0\).*dataset\.with_format\(None\)\.map"
        ) as caught:
            rows(fed(from_rows(with_null(number, kind), global_batch=4)))
        assert caught.value.__notes__ == [f"while making batch {number // 4} (from 0) of a Hugging Face Dataset"]
    with pytest.raises(BatchError, match="column 'y' have a null in value 1"):
        rows(fed(with_null(5, kind).batch(4)))
    filled = with_null(5, kind).with_format(None).map(lambda row: {"y": -1 if row["y"] is None else row["y"]})
    assert flat(rows(fed(from_rows(filled, global_batch=4)))) == [0, 1, 2, 3, 4, -1, 6, 7]
    as_floats = datasets.Dataset.from_dict({"y": [0, 1]}).with_format("numpy", dtype=np.float32)
    assert flat(rows(fed(from_rows(as_floats, global_batch=2)))) == [0, 1]


def test_a_null_among_the_integers_of_a_stream_or_of_lists_is_named():
    with pytest.raises(BatchError, match=r"a null in row 1 \(from 0\) of the batch") as caught:
        rows(fed(adapted(with_null(5).to_iterable_dataset(), 4)))
    assert caught.value.__notes__ == ["while making batch 1 (from 0) of a Hugging Face IterableDataset"]
    lists = datasets.Dataset.from_dict({"y": [[1, 2], [3, None]], "x": [None, [1]]})
    with pytest.raises(BatchError, match=r"column 'y' have a null in row 1"):
        rows(fed(from_rows(lists.select_columns("y"), global_batch=2)))
    with pytest.raises(
        BatchError,
        match=r"row 1 \(from 0\) of the dataset differs from row 0 \(from 0\) of the dataset: \['x'\] is new",
    ):
        rows(fed(from_rows(lists.select_columns("x"), global_batch=2)))


@pytest.mark.parametrize(
    "batched", [lambda rows: rows.batch(3), lambda rows: rows.with_format("numpy").batch(3).map(dict)]
)
def test_a_global_batch_of_batches_of_a_stream_is_refused(batched):
    with pytest.raises(DatasetError, match=r"`global_batch` is 6, .* Leave `global_batch` out"):
        adapted(batched(streamed()), 6)
    one_by_one = batched(streamed()).map(lambda batch: {"y": batch["y"]}, batched=True, remove_columns=["x"])
    assert adapted(one_by_one, 6) is not None


def test_rows_that_change_in_a_stream_are_named_with_their_batch():
    def streamed_with(row):
        def generate():
            yield from ({"x": np.zeros(3), "y": number} for number in range(7))
            yield row

        return datasets.IterableDataset.from_generator(generate).batch(4)

    changes = {
        r"row 3 of shape \(2,\)": {"x": np.zeros(2), "y": 7},
        r"row 3 missing \(None\)": {"y": 7},
    }
    for message, row in changes.items():
        with pytest.raises(BatchError, match=message) as caught:
            rows(fed(streamed_with(row)))
        assert caught.value.__notes__ == ["while making batch 1 (from 0) of a Hugging Face IterableDataset"]


def test_an_error_names_the_row_and_the_batch():
    def transform(batch):
        if 7 in batch["y"]:
            raise ValueError("bad pixel")
        return {name: np.asarray(column) for name, column in batch.items()}

    source = from_rows(given().with_transform(transform), global_batch=6)
    with pytest.raises(ValueError, match="bad pixel") as caught:
        rows(fed(source))
    assert caught.value.__notes__ == [
        "while reading row 7 (from 0) of the dataset",
        "while making batch 1 (from 0) of a Hugging Face Dataset",
    ]


def test_a_position_of_other_data_is_refused():
    saved = fed(from_rows(given(), global_batch=6)).state()
    with pytest.raises(DatasetError, match=r"content was .* and is"):
        fed(from_rows(given().map(lambda row: {"y": row["y"] + 1}), global_batch=6)).restore(saved)
    with pytest.raises(DatasetError, match="rows was 20 and is 19"):
        fed(from_rows(given(19), global_batch=6)).restore(saved)
    assert adapted(given(), 6).fingerprint == adapted(given(), 6).fingerprint
