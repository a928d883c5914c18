"""Checkpoints behind the interfaces of S3 and Google Cloud Storage, by emulators on this machine: `make remote`."""

import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import jax.numpy as jnp
import pytest

import jdist
from jdist.checkpoint.checkpointer import Checkpointer
from jdist.errors import CheckpointError
from tests.checkpoint import stores
from tests.checkpoint.kills import child, kill_at, kill_at_random
from tests.checkpoint.save_forever import KEEP, state_at
from tests.checkpoint.test_buckets import STAGES, check_after_kill, save_two, unfinished

pytestmark = [
    pytest.mark.full,
    pytest.mark.xdist_group("buckets"),
    # Of the clients' connections, which end with their process; and of libraries about themselves.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
STORES = {"s3": stores.s3, "gs": stores.gs}


def enter(patch, env):
    """Lets this process, too, find the emulator."""
    for name, value in env.items():
        patch.setenv(name, value)
    fsspec.config.conf.clear()
    fsspec.config.set_conf_env(fsspec.config.conf)


@pytest.fixture(scope="module", params=STORES)
def store(request):
    """A running emulator: its protocol, the environment of its clients, the server."""
    with STORES[request.param]() as (env, server), pytest.MonkeyPatch.context() as patch:
        enter(patch, env)
        fsspec.filesystem(request.param).clear_instance_cache()
        yield request.param, env, server
    fsspec.config.conf.clear()


@pytest.fixture
def url(store, request):
    return f"{store[0]}://{stores.BUCKET}/{abs(hash(request.node.name))}/run"


@pytest.mark.parametrize(("stage", "call", "leaves_something"), STAGES)
def test_a_kill_at_each_stage(store, url, stage, call, leaves_something):
    save_two(url)
    committed = kill_at(stage, call, url, 2, **store[1])
    assert bool(unfinished(url)) == (leaves_something and stage != "inside write_pieces")
    check_after_kill(url, committed)


def test_kills_at_random_moments(store, url):
    kill_at_random(url, functools.partial(check_after_kill, url), **store[1])


def test_many_megabytes_go_in_several_parts(url):
    state = {"w": jnp.arange(2e7), "b": jnp.ones(3)}  # 80 MB
    with Checkpointer(url) as checkpoints:
        checkpoints.save(1, state, wait=True)
        restored = checkpoints.restore(state).state
    assert (restored["w"] == state["w"]).all()
    assert (restored["b"] == 1).all()


def test_a_bucket_that_is_not_there(store):
    with pytest.raises(
        CheckpointError, match=rf"{store[0]}://no-such-bucket/run: the bucket 'no-such-bucket' does not exist"
    ):
        Checkpointer(f"{store[0]}://no-such-bucket/run")


@pytest.mark.parametrize(
    ("victim", "point"), [(0, "save=before"), (0, "save=in"), (0, "save=after"), (1, "save=in"), (1, "save=after")]
)
def test_two_processes_go_on_after_one_is_killed(store, url, tmp_path, victim, point, monkeypatch):
    """Each writes its part; after a kill at each point of the third save the job is started again, and loses nothing."""
    script = Path(__file__).with_name("save_in_bucket.py")
    monkeypatch.setenv("JDIST_FAILPOINTS", f"process={victim}:{point}:kill@3")
    launched = jdist.launch(
        [str(script), url, str(tmp_path)], processes=2, devices_per_process=2, max_restarts=1, log_dir=tmp_path / "logs"
    )
    assert launched.exit_code == 0, launched
    notes = [json.loads((tmp_path / f"process_{process}.json").read_text()) for process in range(2)]
    # The first attempt has committed steps 1 and 2, and 3 if it was killed behind that.
    assert all(note["begun_at"] in ((2, 3) if point == "save=after" else (2,)) for note in notes)
    assert notes[0]["begun_at"] == notes[1]["begun_at"]
    assert [note["steps"] for note in notes] == [[4, 5]] * 2
    assert unfinished(url) == []


def test_a_server_that_vanishes_in_mid_save(store, url):
    """Nothing of the failed save is taken for a checkpoint once the server is back; what was there is."""
    with STORES[store[0]]() as (env, server), pytest.MonkeyPatch.context() as patch:
        enter(patch, env)
        fsspec.filesystem(store[0]).clear_instance_cache()
        with Checkpointer(url, keep=KEEP) as checkpoints:
            checkpoints.save(1, state_at(1), wait=True)
            server.stop()
            begun_s = time.monotonic()
            checkpoints.save(2, state_at(2))
            with pytest.raises(CheckpointError, match=r"step_00000002.*cannot be written.*Mend the bucket or the way"):
                checkpoints.wait()
            assert time.monotonic() - begun_s < 120  # the client's own patience
    enter(pytest.MonkeyPatch(), store[1])


def test_a_bucket_that_vanishes(store, url):
    """A run that goes on does not take it for a new one, nor is a save into nothing taken for done."""
    other = url.replace(stores.BUCKET, "another-bucket")
    fs = fsspec.filesystem(store[0], use_listings_cache=False)
    fs.mkdir("another-bucket")
    with Checkpointer(other) as checkpoints:
        checkpoints.save(1, state_at(1), wait=True)
        fs.rm("another-bucket", recursive=True)
        checkpoints.save(2, state_at(2))
        with pytest.raises(
            CheckpointError, match=r"step_00000002.*cannot be written.*bucket 'another-bucket' does not exist"
        ):
            checkpoints.wait()
        for work in (lambda: checkpoints.restore(state_at(0)), checkpoints.steps, lambda: Checkpointer(other)):
            with pytest.raises(CheckpointError, match="the bucket 'another-bucket' does not exist"):
                work()


def test_a_bucket_without_credentials(monkeypatch, tmp_path):
    with stores.s3() as (env, _):
        keys = [name for name in os.environ if name.startswith("AWS_")]
        for name in keys:
            monkeypatch.delenv(name)
        enter(monkeypatch, {"HOME": str(tmp_path), **{k: v for k, v in env.items() if "ACCESS" not in k}})
        with pytest.raises(CheckpointError, match=r"cannot be listed: NoCredentialsError.* Give credentials that may"):
            Checkpointer(f"s3://{stores.BUCKET}/run")


@pytest.mark.parametrize("protocol", STORES)
def test_a_store_that_refuses(protocol):
    before = dict(fsspec.config.conf)
    with stores.refusing(protocol) as env, pytest.MonkeyPatch.context() as patch:
        enter(patch, env)
        fsspec.filesystem(protocol).clear_instance_cache()
        says = (
            rf"{protocol}://bucket/run: cannot be listed: .*(Denied|access)\. Give credentials that may read and write"
        )
        with pytest.raises(CheckpointError, match=says) as caught:
            Checkpointer(f"{protocol}://bucket/run")
        assert "\n" not in str(caught.value)
    fsspec.config.conf.clear()
    fsspec.config.conf.update(before)


SAVES_TWICE = """
import sys
from jdist.train import Checkpointer
from tests.checkpoint.save_forever import state_at
with Checkpointer(sys.argv[1], timeout_s=10.0) as checkpoints:
    checkpoints.save(1, state_at(1), wait=True)
    print("saved", flush=True)
    sys.stdin.readline()
    checkpoints.save(2, state_at(2), wait=True)
"""


@pytest.mark.parametrize("protocol", STORES)
def test_a_server_that_falls_silent_in_mid_save(protocol):
    """It takes connections and never answers: the wait ends by its deadline, and then the process ends."""
    url = f"{protocol}://{stores.BUCKET}/run"
    with STORES[protocol]() as (env, server):
        line = [sys.executable, "-c", SAVES_TWICE, url]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(line, text=True, env=child(**env), **pipes) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "saved\n"
            server.stop()
            port = urlsplit(env.get("STORAGE_EMULATOR_HOST") or env["FSSPEC_S3_ENDPOINT_URL"]).port
            with socket.create_server(("127.0.0.1", port)):
                _, errors = process.communicate("\n", timeout=120)
    assert process.returncode == 1
    # Of the one answer or of the whole save, whose waits end almost at once.
    assert re.search(rf"CheckpointError: .*{url}.*: not done after 10 s", errors)
