"""PyTorch's loaders as they are; `make test-loaders` runs this where PyTorch is not installed."""

import os

import numpy as np
import pytest

import jdist
from jdist.checkpoint import CheckpointWarning
from jdist.data import from_rows
from jdist.errors import BatchError, DatasetError
from tests.data.adapters.positions import check_nothing_is_read_again, check_position, fed, flat, rows
from tests.data.job import Job

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-loaders` runs these tests")
loaders = pytest.importorskip("torchdata.stateful_dataloader")

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's own call
    pytest.mark.filterwarnings("ignore:.*os.fork:RuntimeWarning"),  # workers are forked unless a context is given
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"
    ),  # the same, where it cannot be raised
]


class Rows(torch.utils.data.Dataset):
    broken: int | None = None

    def __len__(self):
        return 20

    def __getitem__(self, number):
        if number == self.broken:
            raise ValueError("bad pixel")
        return {"x": torch.full((3,), float(number)), "y": number}


class Broken(Rows):
    broken = 7


class Stream(torch.utils.data.IterableDataset):
    """Rows in their order, of which it knows the next one."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 20:
            self.next += 1
            yield {"y": self.next - 1}
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def stateful(data=None, **options):
    return loaders.StatefulDataLoader(Rows() if data is None else data, batch_size=6, **options)


def shuffled(**options):
    return stateful(shuffle=True, generator=torch.Generator().manual_seed(1), **options)


def own_sampler(**options):
    order = torch.Generator().manual_seed(1)
    return stateful(sampler=torch.utils.data.RandomSampler(Rows(), generator=order), generator=order, **options)


KINDS = {
    "in order": stateful,
    "shuffled": shuffled,
    "workers": lambda: shuffled(num_workers=2),
    "workers that stay": lambda: shuffled(num_workers=2, persistent_workers=True),
    "with replacement": lambda: stateful(
        sampler=loaders.sampler.RandomSampler(
            Rows(), replacement=True, num_samples=20, generator=torch.Generator().manual_seed(1)
        )
    ),
    "PyTorch's own sampler": lambda: own_sampler(),
    "PyTorch's own sampler, workers": lambda: own_sampler(num_workers=2),
    "stream": lambda: stateful(Stream()),
    "distributed sampler": lambda: stateful(
        sampler=loaders.sampler.StatefulDistributedSampler(Rows(), num_replicas=1, rank=0, seed=3)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_is_exact_in_this_pass_and_the_next_ones(kind):
    passes = check_position(KINDS[kind], stops=(0, 2, 4))
    assert all(sorted(flat(each)) == [*range(20)] for each in passes) or kind == "with replacement"
    assert (passes[0] != passes[1]) == (kind not in ("in order", "stream"))


def test_what_was_had_is_not_read_again():
    check_nothing_is_read_again(lambda counted: shuffled(data=counted), stop=40)


def test_processes_whose_loaders_end_unequally_end_together():
    def program(process):
        return rows(
            job.dataset(process, stateful(torch.utils.data.Subset(Rows(), range((20, 8)[process]))), autoshard="off")
        )

    job = Job(2)
    zero, one = job.run(program)
    assert (flat(zero), flat(one)) == ([*range(20)], [*range(8)])
    assert [len(batch) for batch in one] == [6, 2, 0, 0]


class Dying(Rows):
    def __getitem__(self, number):
        if number == 7:
            os._exit(3)
        return super().__getitem__(number)


def test_a_worker_that_dies_is_named():
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* exited unexpectedly") as caught:
        rows(fed(stateful(Dying(), num_workers=1)))
    assert caught.value.__notes__[-1].endswith("of a StatefulDataLoader")


def test_batches_that_change_are_named():
    class Changing(Rows):
        def __getitem__(self, number):
            row = super().__getitem__(number)
            return row if number < 12 else {**row, "x": row["x"].to(torch.int8)}

    with pytest.raises(BatchError, match=r"\['x'\] was float32\[rows, 3\] and is int8") as caught:
        rows(fed(stateful(Changing())))
    assert caught.value.__notes__ == ["in batch 2 (from 0) of the pass"]


def test_len_and_epochs():
    assert len(fed(stateful())) == 4
    assert fed(stateful(Stream())).steps_per_pass is None
    assert len(fed(torch.utils.data.DataLoader(Rows(), batch_size=6))) == 4


def test_parts_of_a_distributed_sampler_are_recognised():
    def program(process):
        sampler = torch.utils.data.DistributedSampler(Rows(), num_replicas=2, rank=process, shuffle=False)
        dataset = job.dataset(process, stateful(sampler=sampler), autoshard="auto")
        return rows(dataset)

    job = Job(2)
    zero, one = job.run(program)
    assert (flat(zero), flat(one)) == ([*range(0, 20, 2)], [*range(1, 20, 2)])


def test_a_plain_loader_has_no_position_and_fit_says_so(tmp_path):
    loader = torch.utils.data.DataLoader(Rows(), batch_size=6)
    assert rows(fed(loader)) == [[*range(start, min(start + 6, 20))] for start in range(0, 20, 6)]
    with pytest.warns(CheckpointWarning, match="a DataLoader of PyTorch has no state.*StatefulDataLoader"):
        jdist.fit(
            lambda state, batch: (state + batch["x"].sum(), {"loss": state}),
            np.float32(0),
            loader,
            strategy=jdist.one_device(),
            progress=False,
            log_to=None,
            verify="off",
            callbacks=[jdist.callbacks.checkpoint(tmp_path)],
        )


def test_a_dataset_without_a_loader_has_rows():
    with pytest.raises(DatasetError, match=r"a Rows is a dataset of PyTorch.*StatefulDataLoader\(Rows"):
        fed(Rows())
    assert rows(fed(from_rows(Rows(), global_batch=12)))[1] == [*range(12, 20)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_has_the_traceback_of_the_worker(workers):
    with pytest.raises(ValueError, match="bad pixel") as caught:
        rows(fed(stateful(Broken(), num_workers=workers)))
    if workers:
        assert "in DataLoader worker process" in str(caught.value)
        assert "__getitem__" in str(caught.value)
    assert "while making batch 1 (from 0) of a StatefulDataLoader" in caught.value.__notes__


KINDS_OF_LOADERS = [torch.utils.data.DataLoader, loaders.StatefulDataLoader]


@pytest.mark.parametrize("kind", KINDS_OF_LOADERS)
def test_the_row_that_cannot_be_read_is_named(kind):
    order = [5, 2, 7, 1]
    with pytest.raises(ValueError, match="bad pixel") as caught:
        rows(fed(kind(Broken(), batch_size=2, sampler=order)))
    assert caught.value.__notes__ == [
        "while reading row 7 (from 0)",
        f"while making batch 1 (from 0) of a {kind.__name__}",
    ]


@pytest.mark.parametrize("kind", KINDS_OF_LOADERS)
@pytest.mark.parametrize(
    ("bad", "difference"),
    [
        ({"x": np.zeros(2)}, r"['x'] was float64[rows, 3] and is float64[rows, 2]"),
        ({"x": "a"}, r"['x'] was float64[rows, 3] and is <U1[rows, 1]"),
        ({"x": None}, r"['x'] is missing"),
        (None, r"['x'] is missing"),
        ({"y": np.zeros(3)}, r"['x'] is missing; ['y'] is new"),
    ],
)
def test_the_row_that_cannot_be_stacked_is_named(kind, bad, difference):
    data = [{"x": np.zeros(3)} for _ in range(6)]
    data[5] = bad
    with pytest.raises(Exception) as caught:  # noqa: PT011 - as default_collate happens to fail
        list(fed(kind(data, batch_size=4)))
    assert caught.value.__notes__[0] == f"while reading row 5 (from 0), which differs from row 4 (from 0): {difference}"


def test_a_row_of_a_stream_that_cannot_be_stacked_is_named_by_its_place():
    class Ragged(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from (torch.zeros(size) for size in (3, 3, 3, 3, 2))

    with pytest.raises(RuntimeError, match="equal size") as caught:
        list(fed(torch.utils.data.DataLoader(Ragged(), batch_size=3)))
    assert caught.value.__notes__[0].startswith("while reading row 1 (from 0) of the batch, which differs from row 0")


@pytest.mark.filterwarnings("ignore::jdist.checkpoint.CheckpointWarning")
def test_fit_reads_the_first_pass_of_a_plain_loader_again_in_the_same_order(tmp_path):
    def run(callbacks=()):
        order = torch.Generator().manual_seed(3)
        loader = torch.utils.data.DataLoader(Rows(), batch_size=5, shuffle=True, generator=order)
        return jdist.fit(
            lambda state, batch: (31 * state + (batch["y"] * np.arange(5)).sum(), {"loss": state}),
            np.int32(0),
            loader,
            strategy=jdist.one_device(),
            progress=False,
            log_to=None,
            verify="off",
            callbacks=callbacks,
        )[0]

    stop = jdist.callbacks.Callback(on_step=lambda moment: jdist.callbacks.Stop("enough") if moment.step == 2 else None)
    run([jdist.callbacks.checkpoint(tmp_path), stop])
    assert int(run([jdist.callbacks.checkpoint(tmp_path)])) == int(run())
