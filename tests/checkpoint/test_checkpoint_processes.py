"""Checkpoints that two real processes save together, restored by them and by one."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jdist.train import Checkpointer, CheckpointWarning
from tests.children import run_in_two

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What save_in_processes.py leaves."""
    folder = tmp_path_factory.mktemp("saved")
    run_in_two(Path(__file__).with_name("save_in_processes.py"), folder)
    return folder


@pytest.fixture(scope="module")
def met(folder):
    """What each process met."""
    return [json.loads((folder / f"process_{process}.json").read_text()) for process in range(2)]


def test_each_writes_what_it_holds_and_reads_all(folder, met):
    assert [one["restored"] for one in met] == [{"position": 2}] * 2
    (saved,) = (folder / "run").glob("step_00000002*")
    assert sorted(path.name for path in saved.iterdir()) == ["manifest.json", "pieces_0.bin", "pieces_1.bin"]
    body = json.loads((saved / "manifest.json").read_text())["body"]
    (spread,) = [leaf for leaf in body["leaves"] if leaf["path"] == "['spread']"]
    assert [(piece["file"], piece["start"], piece["shape"]) for piece in spread["pieces"]] == [
        ("pieces_0.bin", [0, 0], [2, 3]),
        ("pieces_0.bin", [2, 0], [2, 3]),
        ("pieces_1.bin", [4, 0], [2, 3]),
        ("pieces_1.bin", [6, 0], [2, 3]),
    ]
    there = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    assert set(body["files"]) == there - {"manifest.json"}


@pytest.mark.parametrize("num_devices", [1, 8])
def test_one_process_restores_it_on_any_number_of_devices(folder, num_devices):
    mesh = jax.make_mesh((num_devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:num_devices])
    rows, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
    like = {
        "spread": jax.device_put(jnp.zeros((8, 3)), rows),
        "w": jax.device_put(jnp.zeros(5), whole),
        "rng": jax.device_put(jax.random.key(0), whole),
        "n": jax.device_put(jnp.int32(0), whole),
        "python": 0,
    }
    with Checkpointer(folder / "run") as checkpoints:
        restored = checkpoints.restore(like, step=2)
    np.testing.assert_array_equal(restored.state["spread"], np.arange(24.0, dtype=np.float32).reshape(8, 3) + 2)
    assert restored.state["spread"].sharding == rows
    np.testing.assert_array_equal(restored.state["w"], np.full(5, 2, np.float32))
    assert jax.random.key_data(restored.state["rng"]).tolist() == jax.random.key_data(jax.random.key(2)).tolist()
    assert (int(restored.state["n"]), restored.state["python"]) == (2, 2)


def test_what_one_cannot_write_is_committed_by_none(folder, met):
    for one in met:
        assert one["full disk"].startswith(f"CheckpointError: {folder}/run/step_00000003_save_00003: cannot be written")
        assert "No space left on device" in one["full disk"]
        assert one["steps"] == [1, 2, 4]
    assert "process 1: " in met[0]["full disk"]
    assert not list((folder / "run").glob(".saving*"))


def test_a_damaged_piece_is_noticed_and_the_one_before_is_read(folder, tmp_path):
    shutil.copytree(folder / "run", tmp_path / "run")
    piece = tmp_path / "run" / "step_00000004_save_00003" / "pieces_1.bin"
    piece.write_bytes(bytes(piece.stat().st_size))
    like = {"spread": np.zeros((8, 3), np.float32), "w": np.zeros(5, np.float32), "n": np.int32(0), "python": 0}
    like["rng"] = jax.random.key(0)
    with (
        Checkpointer(tmp_path / "run") as checkpoints,
        pytest.warns(CheckpointWarning, match=rf"{piece}: its checksum does not match"),
    ):
        restored = checkpoints.restore(like)
    np.testing.assert_array_equal(restored.state["spread"], np.arange(24.0).reshape(8, 3) + 2)


def test_a_folder_that_is_not_shared_is_named_on_both(folder, met):
    for one in met:
        assert f"is another folder than {folder}/own_0 of process 0" in one["not shared"]
    assert met[0]["not shared"].startswith(f"PeerFailedError: process 1: {folder}/own_1 on ")
    assert not (folder / "own_1").exists()
    assert not list((folder / "own_0").glob(".shared*"))


def test_a_spread_leaf_is_refused_where_only_one_process_saves(met):
    assert all("leaf ['spread'] is spread over processes" in one["without the others"] for one in met)
