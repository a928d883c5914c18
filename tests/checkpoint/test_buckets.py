"""Checkpoints in an object store: kills, damage, a second job, a store that fails or never answers.

Here a folder stands for the store; `test_emulated_buckets.py` has S3's and Google's interfaces.
"""

import json
import sys
import threading
import time

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileOpener
from pydantic import ValidationError

import jdist
from jdist.callbacks.checkpoint import _BucketHistory as BucketHistory
from jdist.checkpoint import bucket, locks
from jdist.checkpoint.bucket import open_path
from jdist.checkpoint.checkpointer import Checkpointer, CheckpointWarning
from jdist.cluster.runtime import Runtime
from jdist.cluster.spec import ClusterSpec
from jdist.errors import CheckpointError, StepError
from jdist.experiment.config import LogSection
from tests.by_default import some
from tests.checkpoint.kills import kill_at
from tests.checkpoint.save_forever import KEEP, check_committed, state_at
from tests.checkpoint.stores import FolderStore

LIKE = state_at(0)
# Where a save or the removal after it is killed, the how many-th time, and what is left of it for the next job to remove.
STAGES = [
    ("before write_pieces", 2, False),
    ("inside write_pieces", 2, True),  # of a folder; a bucket shows no part of an object
    ("after write_pieces", 2, True),
    ("before write_manifest", 2, True),
    ("after write_manifest", 2, False),
    ("after commit", 2, False),  # of a folder; in a bucket the manifest is it
    ("inside remove", 1, True),
    ("after remove", 1, False),
]


def objects(url):
    """The names of all objects below a URL."""
    fs, path = fsspec.url_to_fs(url, use_listings_cache=False)
    return sorted(name.removeprefix(path).strip("/") for name in fs.find(path))


def unfinished(url):
    """Folders of checkpoints without a manifest."""
    names = [name.split("/") for name in objects(url) if "/" in name]
    folders = {folder for folder, _ in names}
    return sorted(folders - {folder for folder, name in names if name == "manifest.json"})


def check_after_kill(url, committed):
    """What was committed is there, and nothing else is."""
    newest_step = check_committed(url, committed)
    assert unfinished(url) == []
    return newest_step


@pytest.fixture
def url(tmp_path):
    return f"folderstore://{tmp_path}/bucket/run"


def save_two(url):
    with Checkpointer(url, keep=KEEP) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_at(step), data={"position": step}, wait=True)


@pytest.mark.parametrize(("stage", "call", "leaves_something"), some(STAGES, default=[STAGES[2], STAGES[5]]))
def test_a_kill_at_each_stage(url, stage, call, leaves_something):
    save_two(url)
    committed = kill_at(stage, call, url, 2)
    assert bool(unfinished(url)) == leaves_something  # else the kill fell elsewhere
    check_after_kill(url, committed)


def test_a_checkpoint_is_pruned_saved_again_and_the_best_kept(url):
    with Checkpointer(url, keep=1, best_metric="loss", best_mode="min") as checkpoints:
        assert checkpoints.restore(LIKE) is None
        for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (3, 2.5)]:
            checkpoints.save(step, state_at(step), data={"loss": loss}, metrics={"loss": loss}, wait=True)
        assert checkpoints.steps() == [2, 3]
        assert checkpoints.best_step == 2
        assert checkpoints.restore(LIKE).data == {"loss": 2.5}
    assert [name[: len("step_00000002_save_00002")] for name in objects(url) if name.endswith("manifest.json")] == [
        "step_00000002_save_00002",
        "step_00000003_save_00004",
    ]


def test_keys_scalars_and_arrays_come_back_to_the_bit(url):
    state = {"key": jax.random.key(3), "n": 5, "x": jnp.arange(6.0).reshape(2, 3), "none": jnp.zeros((0, 2))}
    with Checkpointer(url) as checkpoints:
        checkpoints.save(1, state, wait=True)
        restored = checkpoints.restore(state).state
    assert jax.random.key_data(restored["key"]).tolist() == jax.random.key_data(state["key"]).tolist()
    assert (restored["n"], restored["x"].tolist(), restored["none"].shape) == (5, [[0, 1, 2], [3, 4, 5]], (0, 2))


def damaged(url, change):
    fs, _ = fsspec.url_to_fs(url)
    (name,) = [name for name in objects(url) if "step_00000002" in name and "pieces" in name]
    change(fs, f"{url}/{name}")


@pytest.mark.parametrize(
    "change",
    [
        lambda fs, path: fs.rm_file(path),
        lambda fs, path: fs.pipe_file(path, fs.cat_file(path)[:-1]),
        lambda fs, path: fs.pipe_file(path, b"\0" * fs.size(path)),
    ],
    ids=["removed", "cut", "zeros"],
)
def test_a_damaged_checkpoint_is_passed_over(url, change):
    save_two(url)
    damaged(url, change)
    with Checkpointer(url) as checkpoints, pytest.warns(CheckpointWarning, match=r"step 1 instead"):
        assert checkpoints.restore(LIKE).step == 1


def test_the_job_that_came_last_holds_the_directory(url):
    with Checkpointer(url) as first:
        first.save(1, state_at(1), wait=True)
        fs, _ = fsspec.url_to_fs(url)
        fs.pipe_file(f"{url}/.job", json.dumps({"token": "another", "who": "process 7 on host-b"}).encode())
        with pytest.raises(
            CheckpointError, match=r"process 7 on host-b has since begun to save here.*This save was not committed"
        ):
            first.save(2, state_at(2), wait=True)
        assert first.steps() == [1]
    assert unfinished(url) == []  # what it had written it has removed
    with Checkpointer(url) as third:  # a job that begins later takes over
        third.save(2, state_at(2), wait=True)
        assert third.steps() == [1, 2]


def test_a_fenced_job_that_wakes_up_late_touches_nothing_of_its_successor(url, monkeypatch):
    """Both save step 2, each as its second save."""
    is_writing, goes_on = threading.Event(), threading.Event()
    module = sys.modules["jdist.checkpoint.together"]
    write_pieces = module.write_pieces

    def stalled(*args):
        is_writing.set()
        assert goes_on.wait(60)
        return write_pieces(*args)

    with Checkpointer(url) as first:
        first.save(1, state_at(1), wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_pieces", stalled)
            first.save(2, state_at(2))
            assert is_writing.wait(60)
        with monkeypatch.context() as patch:  # as if in another process
            patch.setattr(locks, "_token", lambda _: "another")
            patch.setattr(locks, "_saving", {})
            with Checkpointer(url) as second:
                second.save(2, state_at(2), wait=True)
        goes_on.set()
        with pytest.raises(CheckpointError, match="has since begun to save here"):
            first.wait()
        assert first.steps() == [1, 2]
        assert first.restore(LIKE).step == 2
    assert unfinished(url) == []


def test_large_values_are_read_and_written_by_blocks(url, monkeypatch):
    """fsspec's files copy what they are asked for, so a whole leaf would be in memory twice more."""
    sizes = []
    for name in ("readinto", "write"):

        def counted(self, data, name=name):
            if "pieces" in self.path:
                sizes.append(len(data))
            return getattr(self.f, name)(data)

        monkeypatch.setattr(LocalFileOpener, name, counted, raising=False)
    monkeypatch.setattr(bucket, "_BLOCK_BYTES", 64)
    state = {"x": jnp.arange(100.0)}
    with Checkpointer(url) as checkpoints:
        checkpoints.save(1, state, wait=True)
        assert checkpoints.restore({"x": jnp.zeros(100)}).state["x"].tolist() == state["x"].tolist()
    assert max(sizes) == 64
    assert sum(sizes) == 2 * state["x"].nbytes


class Failing:
    """Makes the operations of a store fail or hang from now on."""

    def __init__(self, monkeypatch):
        self._patch = monkeypatch

    def fail(self, error, *names):
        for name in names:
            self._patch.setattr(FolderStore, name, lambda *_, **__: (_ for _ in ()).throw(error))

    def hang(self, name, until):
        self._patch.setattr(FolderStore, name, lambda *_, **__: until.wait(60))


ALL = ("ls", "open", "cat_file", "pipe_file", "rm_file")


def test_a_store_that_vanishes_in_mid_save_is_told_once_and_saving_goes_on(url, monkeypatch):
    with Checkpointer(url) as checkpoints:
        checkpoints.save(1, state_at(1), wait=True)
        with monkeypatch.context() as patch:
            Failing(patch).fail(ConnectionError("the network is unreachable"), *ALL)
            checkpoints.save(2, state_at(2))
            match = (
                rf"^{url}/step_00000002.*: cannot be written; the checkpoints saved before are untouched: {url}.*"
                r"ConnectionError: the network is unreachable\. Mend the bucket or the way to it\.$"
            )
            with pytest.raises(CheckpointError, match=match):
                checkpoints.wait()
            # An unreachable store is neither empty nor damaged: nothing begins anew, and no older checkpoint is taken.
            with pytest.raises(CheckpointError, match="cannot be listed: ConnectionError"):
                checkpoints.restore(LIKE)
        checkpoints.save(3, state_at(3), wait=True)
        assert checkpoints.steps() == [1, 3]


def test_a_store_that_fails_while_it_is_read_is_no_damage(url, monkeypatch):
    save_two(url)
    with Checkpointer(url) as checkpoints:
        Failing(monkeypatch).fail(PermissionError("Forbidden"), "open")
        with pytest.raises(
            CheckpointError, match=r"step_00000002.*cannot be read: PermissionError: Forbidden.* Give credentials"
        ):
            checkpoints.restore(LIKE)


def test_a_store_that_never_answers_is_given_up_after_the_deadline(url, monkeypatch):
    save_two(url)
    answered = threading.Event()
    with Checkpointer(url, timeout_s=0.3) as checkpoints, monkeypatch.context() as patch:
        Failing(patch).hang("ls", answered)
        for work in (checkpoints.steps, lambda: checkpoints.restore(LIKE)):
            begun_s = time.monotonic()
            with pytest.raises(CheckpointError, match=rf"{url}: to be listed: not done after 0.3 s"):
                work()
            assert time.monotonic() - begun_s < 30
        answered.set()


def test_what_is_not_installed_is_named_with_the_extra(monkeypatch):
    def missing(*_, **__):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(CheckpointError, match=r'Install s3fs.*pip install "jdist\[remote\]"'):
        Checkpointer("s3://bucket/run")


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (ConnectionError("oauth2.googleapis.com: access token"), "cannot be opened: ConnectionError.*Give credentials"),
        (FileNotFoundError(2, "No such file", "/keys.json"), r"cannot be opened: FileNotFoundError.*/keys.json'$"),
        (ValueError("Must provide an account name"), "cannot be opened: ValueError: Must provide an account name"),
    ],
)
def test_credentials_that_cannot_be_had_are_named(url, monkeypatch, error, match):
    """Google's file system looks for them, in the network too, when it is made."""
    monkeypatch.setattr(fsspec, "url_to_fs", lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(bucket.BucketError, match=match):
        Checkpointer(url)


def test_credentials_are_looked_for_until_the_deadline(url, monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(fsspec, "url_to_fs", lambda *_, **__: answered.wait(60))
    with pytest.raises(bucket.BucketError, match=r"to be opened: not done after 0\.3 s"):
        Checkpointer(url, timeout_s=0.3)
    answered.set()


def test_credentials_for_the_folder_alone_are_enough(url, monkeypatch):
    ls = FolderStore.ls

    def limited(self, path, **options):
        if "/bucket" not in path:
            raise PermissionError("Access Denied")
        return ls(self, path, **options)

    monkeypatch.setattr(FolderStore, "ls", limited)
    with Checkpointer(url) as checkpoints:
        assert checkpoints.restore(LIKE) is None
        checkpoints.save(1, state_at(1), wait=True)
        assert checkpoints.steps() == [1]


class Pair(Runtime):
    """Process 0 of two, of which the other says what this one says."""

    def __init__(self):
        super().__init__(ClusterSpec(jobs={"worker": ("a:1", "b:1")}, task_type="worker", task_index=0), 60)
        self.said = {}

    def exchange(self, what, value, timeout_s):
        self.said[what] = value
        return [value, value]


def test_a_store_that_process_0_cannot_list_is_an_error_of_all(url, monkeypatch):
    pair = Pair()
    with Checkpointer(url, cluster=pair) as checkpoints:
        Failing(monkeypatch).fail(PermissionError("Forbidden"), "ls")
        with pytest.raises(CheckpointError, match="cannot be listed"):
            checkpoints.restore(LIKE)
    (failure,) = [value for what, value in pair.said.items() if what.endswith("listing")]
    assert "cannot be listed: PermissionError" in failure[0]


def train(url, steps, *callbacks):
    """Trains a line with a checkpoint in a bucket."""

    @jdist.distribute(jdist.mirrored(jax.devices()[:2]))
    def step(state, batch):
        grads = jdist.grad(lambda w: jdist.mean((w * batch["x"] - batch["y"]) ** 2, batch["mask"]))(state["w"])
        return {"w": state["w"] - 0.1 * grads, "n": state["n"] + 1}, {"w": state["w"]}

    x = np.linspace(-1, 1, 32, dtype=np.float32)
    data = jdist.data.from_arrays({"x": x, "y": 3 * x}, global_batch=8, shuffle_seed=0, epochs=None)
    state = {"w": jnp.float32(0), "n": jnp.int32(0)}
    saves = jdist.callbacks.checkpoint(url, every=3)
    return jdist.fit(step, state, data, steps=steps, log_every=3, callbacks=[saves, *callbacks])


def test_fit_goes_on_from_a_bucket_with_its_history(url, tmp_path):
    whole = train(f"{url}_whole", 6)
    train(url, 3)
    resumed = train(url, 6)
    assert np.asarray(resumed[0]["w"]).tobytes() == np.asarray(whole[0]["w"]).tobytes()
    fs, _ = fsspec.url_to_fs(url)
    files = [fs.cat_file(f"{folder}/history.jsonl").decode().splitlines() for folder in (url, f"{url}_whole")]
    rows = [[(row["step"], row.get("w")) for row in map(json.loads, file)] for file in files]
    assert rows[0] == rows[1]
    assert [step for step, _ in rows[0]] == [3, 4, 6]
    with pytest.raises(StepError, match=r"`resume=False` cannot rename folderstore://.*, which is in a bucket"):
        jdist.callbacks.checkpoint(url, resume=False)


def test_fit_names_a_bucket_that_vanishes_and_goes_on_from_what_it_holds(url, monkeypatch):
    whole = train(f"{url}_whole", 9)
    with monkeypatch.context() as patch:

        def vanish(moment):
            if moment.step == 5:
                fs, path = fsspec.url_to_fs(url)
                until = time.monotonic() + 60
                while not any(name.endswith("/manifest.json") for name in fs.find(path)):  # step 3 is being saved
                    assert time.monotonic() < until
                    time.sleep(0.01)
                Failing(patch).fail(ConnectionError("the network is unreachable"), *ALL)

        with pytest.raises(CheckpointError, match=rf"{url}.*cannot be .*: ConnectionError: the network is unreachable"):
            train(url, 9, jdist.callbacks.Callback(on_step=vanish))
    begun = []
    resumed = train(url, 9, jdist.callbacks.Callback(on_start=lambda moment: begun.append(moment.step)))
    assert begun == [3]
    assert np.asarray(resumed[0]["w"]).tobytes() == np.asarray(whole[0]["w"]).tobytes()
    values = [[(row["step"], row.get("w")) for row in history.rows] for _, history in (resumed, whole)]
    assert values[0] == values[1]


def test_a_fenced_job_leaves_the_history_of_its_successor(url):
    place = open_path(url, 60) / "history.jsonl"
    with Checkpointer(url) as checkpoints:
        checkpoints.claim()
        history = BucketHistory(place, [])
        history.write(1, {"loss": 3.0})
        history.sync()
        assert place.read_text().count("\n") == 1
        (place.parent / ".job").write_text(json.dumps({"token": "another", "who": "process 7 on host-b"}))
        place.write_text("of the successor")
        history.write(2, {"loss": 2.0})
        with pytest.raises(CheckpointError, match="process 7 on host-b has since begun to save here"):
            history.sync()
    assert place.read_text() == "of the successor"


def test_what_needs_a_disk_refuses_a_url():
    step = jdist.distribute(jdist.one_device())(lambda state, batch: (state, {}))
    with pytest.raises(StepError, match=r"`log_to` is s3://bucket/logs; rows are appended"):
        jdist.fit(step, {"w": jnp.zeros(())}, [{"x": jnp.ones(2)}], steps=1, log_to="s3://bucket/logs")
    with pytest.raises(CheckpointError, match=r"`checkpoints`: s3://bucket/run is a bucket"):
        jdist.train_and_evaluate(
            lambda: None, lambda _: None, checkpoints="s3://bucket/run", like=lambda: None, final_step=1
        )
    with pytest.raises(ValidationError, match="which a bucket cannot do: name a folder on a disk"):
        LogSection(folder="gs://bucket/runs")
