"""Datasets that are made and read on the workers."""

import itertools
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import jdist
from jdist.errors import ClosureCancelledError, ClosureError, DatasetError, StepError, StrategyError
from jdist.ps.coordinator.datasets import name_of_function
from jdist.ps.worker.data import WorkerData
from tests.ps.flaky import InProcess, Network
from tests.ps.hidden_layer import create, loss
from tests.ps.real_cluster import local, wait_until

pytestmark = pytest.mark.xdist_group(__name__)  # they share their servers

ROWS = 50


@pytest.fixture(scope="module")
def strategy(tmp_path_factory):
    """Two workers that can import what the tests write to a folder."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "my_data.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("SHARES", str(folder))
        with local(local_workers=2, local_ps=1) as made:
            assert made.coordinator.num_workers == 2  # started here, with that environment
            yield made


MODULE = """
import itertools
import os
import numpy as np
import jdist

ROWS = 50

def mine(context):
    rows = np.arange(context.input_pipeline_id, ROWS, context.num_input_pipelines, dtype=np.float32)
    return {"x": np.stack([rows, rows, rows], 1) / ROWS, "y": np.ones(len(rows), np.float32), "number": rows}

def arrays(context):
    return jdist.data.from_arrays(mine(context), global_batch=4)

def generator(context):
    data = mine(context)
    for i in range(0, len(data["y"]), 4):
        yield {name: x[i : i + 4] for name, x in data.items()}

def unequal(context):
    data = mine(context)
    for i in range(3 if context.input_pipeline_id else 6):
        yield {name: x[:4] for name, x in data.items()}

def endless(context):
    return ({"number": np.full(2, 2 * i + context.input_pipeline_id)} for i in itertools.count())

def one_long(context):  # each share is there on its own worker only
    me = os.path.join(os.environ["SHARES"], str(context.input_pipeline_id))
    if not os.path.exists(me):
        open(me, "w").write(str(os.getpid()))
    if open(me).read() != str(os.getpid()):
        raise FileNotFoundError("this file is on another machine")
    for i in range(2 if context.input_pipeline_id else 90):
        yield {"number": np.full(2, 2 * i + context.input_pipeline_id)}

def broken(context):
    raise ValueError("the disk of this worker is empty")

def breaks_later(context):
    yield from list(generator(context))[:2]
    raise ValueError("the third batch is damaged")
"""


def train_step(state, batch):
    value, grads = jdist.value_and_grad(loss)(state.params, batch)
    return state.apply_gradients(grads=grads), {"loss": value, "rows": jdist.all_reduce(batch["mask"].sum(), "sum")}


def numbers(batch):
    return {"numbers": batch["number"], "mask": batch["mask"]}


@pytest.mark.parametrize("name", ["my_data:arrays", "my_data:generator"])
def test_every_row_is_read_once_each_time(strategy, name):
    dataset = strategy.coordinator.create_per_worker_dataset(name)
    assert dataset.element_spec["x"].shape == (4, 3)
    for _ in range(2):
        found = [strategy.coordinator.schedule(numbers, (batch,)) for batch in dataset]
        assert len(found) == 14  # 25 rows of each worker, by 4
        seen = [x for each in strategy.coordinator.fetch(found) for x in each["numbers"][each["mask"]]]
        assert sorted(seen) == list(range(ROWS))


def test_a_loop_over_workers_datasets_ends_when_every_share_is_done(strategy):
    step, state = jdist.distribute(train_step, strategy), strategy.init(lambda: create(optax.sgd(0.05)))
    rows = []
    for batch in strategy.distribute_datasets_from_function("my_data:arrays"):
        state, metrics = step(state, batch)
        rows.append(metrics["rows"])
    assert sum(int(x) for x in rows) == ROWS
    assert int(strategy.fetch(state).step) == len(rows) == 14


@pytest.mark.filterwarnings("ignore:checkpoint. `data` is a")
def test_a_run_over_workers_datasets_goes_on_in_the_epoch_that_it_was_in(strategy, tmp_path):
    def run(*callbacks):
        given = {"epochs": 3, "progress": False, "log_to": None, "verify": "off"}
        state = strategy.init(lambda: create(optax.sgd(0.05)))
        data = strategy.distribute_datasets_from_function("my_data:arrays")
        return jdist.fit(train_step, state, data, strategy=strategy, callbacks=callbacks, **given)

    stop = lambda moment: jdist.callbacks.Stop("here") if moment.step == 20 else None  # noqa: E731 - as users write one
    run(jdist.callbacks.checkpoint(tmp_path), stop)
    ended = []
    note = jdist.callbacks.Callback(on_epoch=lambda moment: ended.append((moment.step, moment.epoch)))
    state, _ = run(jdist.callbacks.checkpoint(tmp_path), note)
    assert int(strategy.fetch(state).step) == 3 * 14
    assert ended == [(28, 2), (42, 3)]


def test_shares_of_different_length(strategy):
    dataset = strategy.coordinator.create_per_worker_dataset("my_data:unequal")
    found = [strategy.coordinator.schedule(numbers, (batch,)) for batch in dataset]
    assert len(strategy.coordinator.fetch(found)) == 9


def first_of(batch):
    return batch["number"][0]


def read(strategy, batches):
    """The numbers that workers find in batches."""
    return sorted(
        int(x) for x in strategy.coordinator.fetch([strategy.coordinator.schedule(first_of, (b,)) for b in batches])
    )


ONE_LONG = sorted([*range(0, 180, 2), 1, 3])


def test_a_worker_that_is_through_leaves_the_others_share_alone(strategy):
    dataset = strategy.coordinator.create_per_worker_dataset("my_data:one_long")
    for _ in range(2):
        assert read(strategy, dataset) == ONE_LONG


def test_all_batches_are_taken_before_any_is_read(strategy):
    dataset = strategy.coordinator.create_per_worker_dataset("my_data:one_long")
    batches = list(dataset)
    assert (len(batches), read(strategy, batches)) == (92, ONE_LONG)


def test_a_share_without_an_end(strategy):
    dataset = strategy.coordinator.create_per_worker_dataset("my_data:endless")
    found = read(strategy, itertools.islice(dataset, 300))
    assert len(set(found)) == 300
    of_each = [[x for x in found if x % 2 == p] for p in (0, 1)]
    assert all(x == list(range(p, p + 2 * len(x), 2)) for p, x in enumerate(of_each))
    every_fifth = (batch for i, batch in enumerate(dataset) if i % 5 == 0)
    assert len(set(read(strategy, itertools.islice(every_fifth, 60)))) == 60


@pytest.mark.parametrize("at_once", [False, True])
def test_after_a_queue_was_cancelled_the_same_dataset_is_read_again(strategy, at_once):
    dataset = strategy.coordinator.create_per_worker_dataset("my_data:one_long")
    step, state = jdist.distribute(counting_step, strategy), strategy.init(lambda: create(optax.sgd(0.1)))
    batches = iter(dataset)
    found, refused = [], []

    def train():
        nonlocal state
        for batch in itertools.islice(batches, 20):
            refused[:] = [batch]  # the error comes with whichever call is next once it is known, or with `join`
            state, metrics = step(state, batch, np.float32("nan" if len(found) == 3 else 1))
            found.append((batch, metrics["number"]))
            refused.clear()
            if at_once and len(found) == 4:
                wait_until(lambda: found[3][1].error is not None)
        strategy.coordinator.join(60)

    with pytest.raises(ClosureError, match="NaN or infinite"):
        train()
    again = [batch for batch, number in found if isinstance(number.error, ClosureCancelledError)] + refused
    rest = read(strategy, [*again, *batches])
    done = [int(number) for _, number in found if number.error is None]
    assert len(rest) + len(done) + 1 == 92
    assert set(rest) | set(done) < set(ONE_LONG)
    with pytest.raises(DatasetError, match="was given to a second call"):
        strategy.coordinator.schedule(first_of, (found[0][0],))
    assert read(strategy, dataset) == ONE_LONG


def counting_step(state, batch, factor):
    value, grads = jdist.value_and_grad(
        lambda params: jdist.mean(batch["number"] * factor * sum(x.sum() for x in jax.tree.leaves(params)))
    )(state.params)
    return state.apply_gradients(grads=grads), {"number": jdist.all_reduce(batch["number"][0], "max"), "value": value}


@pytest.mark.parametrize("name", ["lost_data:arrays", "lost_data:generator"])
def test_the_share_of_a_worker_that_dies_is_read_by_another(tmp_path, monkeypatch, name):
    (tmp_path / "lost_data.py").write_text(MODULE.replace("ROWS = 50", "ROWS = 800"))
    monkeypatch.syspath_prepend(str(tmp_path))
    made = InProcess(Network(0), ps=1)
    coordinator = made.strategy.coordinator
    try:
        found = []
        for batch in coordinator.create_per_worker_dataset(name):
            found.append(coordinator.schedule(numbers, (batch,)))
            if len(found) == 60:
                found[20]["numbers"].result(60)
                made.servers["worker1"].stop()
            if len(found) == 150:
                found[-40]["numbers"].result(60)
                made.restart(1)
        seen = [x for each in coordinator.fetch(found) for x in each["numbers"][each["mask"]]]
        assert sorted(seen) == list(range(800))
    finally:
        coordinator.close()


def opened(name):
    """The data of a worker that has opened a dataset, and the header."""
    data, options = WorkerData(), {"partial": "pad", "with_mask": False, "prefetch": 0}
    header = {"dataset": 1, "name": name, "options": options, "pipelines": 2, "pipeline": 1}
    answer, _ = data.methods()["open"].run(header, [])
    assert "error" not in answer
    return data, header


def test_what_is_read_ahead_is_bounded_and_a_new_process_goes_on_where_the_lost_one_was(tmp_path, monkeypatch):
    (tmp_path / "bounded_data.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    data, header = opened("bounded_data:endless")

    def advance(until, asked):
        said = {**header, "pass": 0, "until": until, "asked": asked}
        return data.methods()["advance"].run(said, [])[0]

    kept = data._pipeline(1, 0, 1)._kept
    assert advance(1016, 1000) == {"available": 1016, "ended": False}
    assert len(kept) == 32
    assert advance(1500, 1000) == {"available": 1500, "ended": False}
    assert len(kept) == 64
    for i in (1000, 1001, 990, 1499, 3):
        assert data.batch((1, 0, 1, i))[-1][0] == 2 * i + 1
    assert len(kept) <= 64


def test_a_batch_that_is_asked_for_again_is_the_same_batch(tmp_path, monkeypatch):
    (tmp_path / "again_data.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("again_data:arrays", "again_data:generator"):
        data, _ = opened(name)
        first = [data.batch((1, 0, 1, i)) for i in range(5)]
        for i in (3, 1, 4):
            again = data.batch((1, 0, 1, i))
            assert all(np.array_equal(a, b) for a, b in zip(first[i], again, strict=True))
        with pytest.raises(DatasetError, match="has 7 batches, and number 9 was asked for"):
            data.batch((1, 0, 1, 9))


def test_what_a_dataset_function_fails_with_is_shown(strategy):
    with pytest.raises(DatasetError, match=r"(?s)my_data:broken failed on a worker.*the disk of this worker is empty"):
        strategy.coordinator.create_per_worker_dataset("my_data:broken")
    dataset = strategy.coordinator.create_per_worker_dataset("my_data:breaks_later")
    with pytest.raises(DatasetError, match=r"(?s)the third batch is damaged"):
        list(dataset)
    with pytest.raises(DatasetError, match=r"(?s)cannot import 'no_such_module'"):
        strategy.coordinator.create_per_worker_dataset("no_such_module:make")
    with pytest.raises(DatasetError, match=r"(?s)'my_data:nothing' names no function"):
        strategy.coordinator.create_per_worker_dataset("my_data:nothing")


def test_functions_that_workers_cannot_find_are_refused():
    def inside(context):
        return []

    assert name_of_function(name_of_function) == "jdist.ps.coordinator.datasets:name_of_function"
    assert name_of_function("a.b:c") == "a.b:c"
    for fn, why in (
        (inside, "defined inside of another function"),
        (lambda context: [], "it is a lambda"),
        ("a", "or its name 'package.module:function'"),
    ):
        with pytest.raises(DatasetError, match=why):
            name_of_function(fn)


def test_what_does_not_go_together_is_refused(strategy):
    dataset = strategy.coordinator.create_per_worker_dataset("my_data:arrays")
    first, second = itertools.islice(dataset, 2)
    with pytest.raises(DatasetError, match="two batches for workers to read"):
        strategy.coordinator.schedule(lambda a, b: a["x"] + b["x"], (first, second))
    step, state = (
        jdist.distribute(train_step, strategy, steps_per_call=2),
        strategy.init(lambda: create(optax.sgd(0.1))),
    )
    with pytest.raises(StepError, match="`steps_per_call` is for batches that the program feeds"):
        step(state, first)
    with pytest.raises(StrategyError, match=r"`strategy\.coordinator\.schedule\(fn, args\)` runs it on one worker"):
        strategy.run(lambda: 1)


SCRIPT = """
import numpy as np, optax, jdist

def make(context):
    rows = np.arange(8, dtype=np.float32) + 8 * context.input_pipeline_id
    return jdist.data.from_arrays({"x": rows}, global_batch=4)

if GUARD:
    strategy = jdist.parameter_server(local_workers=2, local_ps=1)
    found = [
        strategy.coordinator.schedule(lambda batch: batch["x"].sum(), (batch,))
        for batch in strategy.distribute_datasets_from_function(make)
    ]
    print("sum", sum(float(x) for x in found), len(found))
"""


def run(tmp_path, guard):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("GUARD", guard))
    return subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)


def test_a_function_of_the_script_itself_and_its_guard_is_respected(tmp_path):
    ended = run(tmp_path, '__name__ == "__main__"')
    assert ended.stdout == "sum 120.0 4\n", ended.stderr


def test_a_script_without_a_guard_is_told_so(tmp_path):
    ended = run(tmp_path, "True")
    assert ended.returncode == 1
    assert 'under `if __name__ == "__main__":`' in ended.stderr
