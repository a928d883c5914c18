"""The distributed dataset: slices, positions, resuming, and what it refuses."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdist
from jdist.data import from_arrays
from jdist.data.sources.sequential import PlainSource
from jdist.errors import BatchError, DatasetError
from tests.data.counting import Counting, feed, real_rows, values


def slices(batch, num_replicas):
    """The real rows of each replica's slice."""
    parts = zip(np.split(batch["x"], num_replicas), np.split(batch["mask"], num_replicas), strict=True)
    return [x[mask].tolist() for x, mask in parts]


class Reused:
    """Yields the same buffer again and again, refilled, as many loaders do.

    It is aligned to 64 bytes: `jax.device_put` shares the memory of such arrays instead of copying.
    """

    def __iter__(self):
        memory = np.empty(4 * 64 * 4 + 64, np.uint8)
        start = -memory.ctypes.data % 64
        buffer = memory[start : start + 4 * 64 * 4].view(np.float32).reshape(4, 64)
        for number in range(12):
            buffer[:] = number
            yield {"x": buffer}


# --- slicing and padding ---


@pytest.mark.parametrize("plain", [False, True])
def test_nine_rows_in_batches_of_four_over_two_replicas(plain):
    source = from_arrays({"x": np.arange(9)}, global_batch=4)
    dataset, dropping = (feed(list(source) if plain else source, partial=partial) for partial in ("pad", "drop"))
    assert [slices(batch, 2) for batch in dataset] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]
    assert [slices(batch, 2) for batch in dropping] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert dropping.num_steps == (None if plain else 2)


@given(
    rows=st.integers(1, 40),
    global_batch=st.integers(1, 12),
    num_replicas=st.integers(1, 8),
    seed=st.none() | st.integers(0, 9),
    steps_per_call=st.integers(1, 3),
)
@settings(deadline=None)
def test_rows_and_their_order_do_not_depend_on_the_replicas(rows, global_batch, num_replicas, seed, steps_per_call):
    source = from_arrays({"x": np.arange(rows)}, global_batch=global_batch, shuffle_seed=seed, epochs=2)
    expected = [row for batch in source for row in batch["x"].tolist()]
    dataset = feed(source, num_replicas=num_replicas, steps_per_call=steps_per_call, prefetch=0)
    assert real_rows(dataset) == expected
    assert real_rows(feed(list(source), num_replicas=num_replicas, prefetch=0)) == expected


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("num_replicas", [1, 4])
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_source_that_refills_its_buffer_gives_right_batches_on_the_devices(prefetch, num_replicas, steps_per_call):
    mesh = Mesh(jax.devices()[:num_replicas], ("replica",))
    spec = PartitionSpec("replica") if steps_per_call == 1 else PartitionSpec(None, "replica")
    sharding = NamedSharding(mesh, spec)
    dataset = feed(
        Reused(),
        num_replicas=num_replicas,
        place=lambda batch: jax.device_put(batch, sharding),
        prefetch=prefetch,
        steps_per_call=steps_per_call,
    )
    batches = list(dataset)
    assert all(batch["x"].sharding == sharding for batch in batches)
    expected = np.repeat(np.arange(12, dtype=np.float32), 4 * 64).reshape(-1)
    np.testing.assert_array_equal(np.concatenate([np.ravel(batch["x"]) for batch in batches]), expected)


def test_a_source_that_refills_its_buffer_gives_right_batches_on_the_host():
    assert [batch["x"][0, 0] for batch in list(feed(Reused()))] == list(range(12))


def test_steps_per_call_stacks_and_ends_with_a_smaller_stack():
    dataset = feed(from_arrays({"x": np.arange(9)}, global_batch=2), steps_per_call=3)
    first, last = list(dataset)
    assert first["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert last["x"].tolist() == [[6, 7], [8, 8]]
    assert last["mask"].tolist() == [[True, True], [True, False]]
    assert dataset.element_spec["x"].shape == (3, 2)


def test_the_place_function_receives_every_batch_once():
    placed = []
    dataset = feed([{"x": np.arange(2)}] * 3, place=lambda batch: placed.append(batch) or len(placed))
    assert list(dataset) == [1, 2, 3]
    assert [sorted(batch) for batch in placed] == [["mask", "x"]] * 3


def test_batches_without_rows_are_skipped():
    empty = {"x": np.arange(0)}
    assert values(feed([empty, {"x": np.arange(2)}, empty, {"x": np.arange(2)}, empty])) == [[0, 1], [0, 1]]


# --- element_spec and repr ---


def test_element_spec_of_a_plain_iterable_loses_no_batch():
    dataset = feed(iter([{"x": np.arange(3)}, {"x": np.arange(3)}]))
    assert dataset.element_spec["x"].shape == (4,)
    assert real_rows(dataset) == [0, 1, 2, 0, 1, 2]


def test_element_spec_before_the_first_batch_does_not_move_the_position():
    dataset = feed(from_arrays({"x": np.arange(5)}, global_batch=2))
    assert dataset.element_spec == {
        "mask": jax.ShapeDtypeStruct((2,), np.bool_),
        "x": jax.ShapeDtypeStruct((2,), jax.numpy.asarray(np.arange(2)).dtype),
    }
    assert dataset.position == 0


def test_place_spec_maps_the_element_spec():
    dataset = feed(from_arrays({"x": np.arange(5)}, global_batch=2), place_spec=sorted)
    assert dataset.element_spec == ["mask", "x"]


def test_repr_shows_the_arithmetic():
    dataset = feed(from_arrays({"x": np.zeros(7000)}, global_batch=1024), num_replicas=8)
    assert repr(dataset) == ("DistributedDataset(global batch 1,024 = 8 replicas x 128, 7 steps, at step 0)")
    next(iter(dataset))
    assert repr(dataset).endswith("at step 1)")


def test_repr_of_padded_endless_and_plain_datasets():
    endless = feed(from_arrays({"x": np.zeros(20)}, global_batch=9, epochs=None), steps_per_call=4)
    assert "global batch 9 padded to 10 = 2 replicas x 5, endless, 4 steps a call" in repr(endless)
    plain = feed([{"x": np.zeros(2)}], num_replicas=1)
    assert repr(plain) == "DistributedDataset(1 replica, global batch known after the first batch, plain iterable)"
    list(plain)
    assert "global batch 2 = 1 replica x 2, plain iterable" in repr(plain)


# --- what is refused ---


def test_a_tuple_of_arrays_of_one_kind_is_a_list_of_batches():
    assert len(list(feed((np.ones(4), np.ones(4)), num_replicas=2))) == 2


def test_dropping_everything_is_refused():
    with pytest.raises(
        DatasetError, match=r"5 rows of the ArraySource are fewer than the global batch of 6.*at most 5"
    ):
        feed(from_arrays({"x": np.arange(5)}, global_batch=6), partial="drop")
    with pytest.raises(DatasetError, match="'drop' left out every batch as short of 2 rows"):
        list(feed(Counting(num_steps=2, short_at=(0, 1)), partial="drop"))


def test_a_short_batch_under_error_is_refused_when_it_comes():
    iterator = iter(feed(from_arrays({"x": np.arange(5)}, global_batch=4), partial="error"))
    next(iterator)
    with pytest.raises(BatchError, match="1 rows instead of 4"):
        next(iterator)


NINE = from_arrays({"x": np.arange(20)}, global_batch=9)
UNLIKE = r"a tuple of 2 arrays of different kinds.* `jdist\.data\.from_arrays\(\(x, y\)"


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ({"x": np.arange(4)}, {}, DatasetError, "a dict is not a source of batches.*from_arrays"),
        (np.arange(4), {}, DatasetError, "a ndarray is not a source of batches.*from_arrays"),
        (3, {}, DatasetError, "a int is not a source of batches"),
        ("path", {}, DatasetError, "a str is not a source"),
        ((np.ones((8, 3)), np.ones(8)), {}, DatasetError, UNLIKE),
        ((np.ones(4), np.arange(4)), {}, DatasetError, UNLIKE),
        (Counting(num_steps=0), {}, DatasetError, "the dataset is empty.*num_steps=0"),
        (NINE, {"partial": "drop"}, BatchError, "9 rows does not divide by 2 replicas.*8 or 10"),
        (NINE, {"partial": "error"}, BatchError, "9 rows does not divide by 2 replicas.*8 or 10"),
        ([], {"partial": "padd"}, DatasetError, "`partial` is 'padd'; .* 'pad', 'drop', 'error'. Did you mean 'pad'"),
        ([], {"prefetch": -1}, DatasetError, "`prefetch` is -1; .* 0 or more"),
        ([], {"steps_per_call": 0}, DatasetError, "`steps_per_call` is 0; .* 1 or more"),
        ([], {"num_replicas": 0}, DatasetError, "`num_replicas` is 0; .* 1 or more"),
    ],
)
def test_what_is_refused_at_construction(source, options, error, message):
    with pytest.raises(error, match=message):
        feed(source, **options)


@pytest.mark.parametrize("source", [[], iter(()), [{"x": np.arange(0)}]])
def test_empty_iterables_are_refused(source):
    with pytest.raises(DatasetError, match="the dataset is empty"):
        list(feed(source))


@pytest.mark.parametrize(
    ("source", "options", "length"),
    [
        (from_arrays({"x": np.arange(9)}, global_batch=4), {}, 3),
        (from_arrays({"x": np.arange(9)}, global_batch=4, epochs=2), {}, 6),
        (from_arrays({"x": np.arange(9)}, global_batch=4, epochs=2), {"partial": "drop"}, 4),
        (from_arrays({"x": np.arange(9)}, global_batch=2), {"steps_per_call": 2}, 3),
        ([{"x": np.arange(4)}] * 5, {}, 5),
    ],
)
def test_the_length_is_how_many_batches_a_pass_hands_out(source, options, length):
    dataset = feed(source, **options)
    assert len(dataset) == length == len(list(dataset))


@pytest.mark.parametrize(
    ("source", "options", "why"),
    [
        (from_arrays({"x": np.arange(9)}, global_batch=4, epochs=None), {}, "ArraySource, is without end"),
        (({"x": np.arange(4)} for _ in range(5)), {}, "generator, does not tell how many batches it has"),
        (
            [{"x": np.arange(4)}, {"x": np.arange(3)}],
            {"partial": "drop"},
            'and partial="drop" leaves out the short ones',
        ),
    ],
)
def test_a_length_that_is_not_known_is_a_type_error(source, options, why):
    dataset = feed(source, **options)
    with pytest.raises(TypeError, match=f"this dataset has no len.*{why}"):
        len(dataset)
    assert dataset  # its truth needs no length


@pytest.mark.parametrize("again", ["distributed again", "looped over again"])
def test_a_shuffled_source_that_gives_its_first_order_again_is_told_once(caplog, again):
    def distribute(strategy, epochs=1):
        source = jdist.data.from_arrays({"x": np.arange(6)}, global_batch=3, shuffle_seed=0, epochs=epochs)
        return strategy.distribute_dataset(source)

    strategy = jdist.one_device()
    dataset = distribute(strategy)
    passes = []
    for _ in range(3):
        dataset = distribute(strategy) if again == "distributed again" else dataset
        passes.append([batch["x"].tolist() for batch in dataset])
    assert passes[0] == passes[1] == passes[2]
    assert [record.getMessage()[:41] for record in caplog.records] == ["the rows come in the same order as in an "]
    caplog.clear()
    list(distribute(jdist.one_device(), epochs=3))
    assert not caplog.records


def test_a_source_that_raises_stop_iteration_does_not_end_the_data():
    class Stopping(Counting):
        def batch_at(self, step):
            return next(iter([])) if step == 2 else super().batch_at(step)

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(feed(Stopping(), prefetch=0))


def test_a_loader_without_places_counts_its_passes():
    begun = []

    def begin(number):
        begun.append(number)
        return iter([])

    source = PlainSource(kind="loader", begin=begin, advice="", how_to_share="")
    for _ in range(2):
        list(source)
    assert begun == [0, 1]


def test_an_iterable_may_say_its_length_by_num_steps():
    class Batches:
        num_steps = 3

        def __iter__(self):
            return iter([{"x": np.ones(2)}] * 3)

    class WithoutLength(Batches):
        def __len__(self):
            raise NotImplementedError

    assert len(feed(Batches())) == 3
    assert len(feed(WithoutLength())) == 3


def test_an_iterator_that_was_looked_at_keeps_its_first_batch_when_a_pass_is_named():
    dataset = feed(iter([{"x": np.full(2, i)} for i in range(4)]), prefetch=0)
    assert dataset.element_spec["x"].shape == (2,)
    dataset.skip(1, number=1)
    assert values(dataset)[0] == [1, 1]
