"""Checkpoints under kills, damage, full disks and read-only disks: what was committed is read, or refused."""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from jdist.checkpoint import folder as disk
from jdist.checkpoint import pieces, together
from jdist.checkpoint.checkpointer import Checkpointer, CheckpointWarning
from jdist.errors import CheckpointError
from tests.checkpoint.kills import kill_at, kill_at_random
from tests.checkpoint.save_forever import check_committed


def check_after_kill(directory, committed):
    """What was committed is there, and nothing else is."""
    newest_step = check_committed(directory, committed)
    assert not [path for path in directory.iterdir() if path.name.startswith((".saving", ".deleting"))]
    return newest_step


def test_a_kill_at_each_stage_of_a_save(tmp_path):
    stages = [
        ("before write_pieces", 2),
        ("after write_pieces", 2),
        ("after write_manifest", 2),
        ("after commit", 2),
        ("inside rmtree", 1),
    ]
    committed = 0
    for stage, call in stages:
        committed = kill_at(stage, call, tmp_path, committed)
        # Before the parent cleans up, the traces of the stage: else the kill fell elsewhere.
        left = [path.name for path in tmp_path.iterdir() if path.name.startswith((".saving", ".deleting"))]
        assert [name.split("_")[0] for name in left] == (
            [] if stage == "after commit" else [".deleting"] if stage == "inside rmtree" else [".saving"]
        )
        committed = check_after_kill(tmp_path, committed)
    assert committed >= len(stages)


@pytest.mark.full
def test_kills_at_random_moments(tmp_path):
    kill_at_random(tmp_path, functools.partial(check_after_kill, tmp_path))


@pytest.fixture
def three(tmp_path):
    """Steps 1, 2 and 3, saved."""
    directory = tmp_path / "run"
    with Checkpointer(directory) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": jnp.full(500, float(step)), "n": np.int64(step)}, data={"position": step})
    return directory


def newest(directory):
    return next(path for path in directory.iterdir() if path.name.startswith("step_00000003"))


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def fill(path):
    path.write_bytes(os.urandom(path.stat().st_size))


LIKE_THREE = {"w": jnp.zeros(500), "n": np.int64(0)}


@pytest.mark.parametrize("damage", [pathlib.Path.unlink, cut, fill], ids=["deleted", "cut", "garbage"])
def test_damage_to_any_file_is_noticed_and_the_one_before_is_read(three, damage):
    pristine = three.with_name("pristine")
    shutil.copytree(newest(three), pristine)
    files = [path.relative_to(pristine) for path in files_of(pristine)]
    assert set(map(str, files)) == {"manifest.json", "pieces_0.bin"}
    for file in files:
        damage(newest(three) / file)
        with Checkpointer(three) as checkpoints:
            assert checkpoints.steps() == ([1, 2, 3] if damage is fill and file.name != "manifest.json" else [1, 2])
            with pytest.warns(CheckpointWarning, match=rf"{newest(three) / file}: .*step 2 instead"):
                restored = checkpoints.restore(LIKE_THREE)
            assert restored.step == 2
            assert checkpoints.steps() == [1, 2]  # known to be damaged, it counts no more
            assert restored.data == {"position": restored.step}
            np.testing.assert_array_equal(restored.state["w"], np.full(500, float(restored.step)))
            with pytest.raises(CheckpointError, match=str(newest(three) / file)):
                checkpoints.restore(LIKE_THREE, step=3)
        shutil.rmtree(newest(three))
        shutil.copytree(pristine, three / "step_00000003_save_00003")


def test_a_flipped_bit_in_an_array_is_noticed(three):
    needle = np.full(500, 3.0, np.float32).tobytes()
    (holder,) = [path for path in files_of(newest(three)) if needle in path.read_bytes()]
    content = bytearray(holder.read_bytes())
    content[content.index(needle) + 1001] ^= 1
    holder.write_bytes(content)
    with Checkpointer(three) as checkpoints:
        with pytest.warns(CheckpointWarning, match=rf"{holder}: its checksum does not match.*step 2 instead"):
            assert checkpoints.restore(LIKE_THREE).step == 2
        checkpoints.save(3, {"w": jnp.full(500, 3.0), "n": np.int64(3)}, data={"position": 3})
        assert checkpoints.restore(LIKE_THREE).step == 3
    assert len([path for path in three.iterdir() if path.name.startswith("step_00000003")]) == 1


def test_a_bit_flipped_between_memory_and_file_is_noticed(tmp_path, monkeypatch):
    crc32 = zlib.crc32

    def flip_after(data):
        checksum = crc32(data)
        data[1001] ^= 1
        return checksum

    state = {"w": jnp.arange(500.0)}
    with Checkpointer(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(pieces.zlib, "crc32", flip_after)
            checkpoints.save(1, state, wait=True)
        with pytest.raises(CheckpointError, match=r"its checksum does not match at leaf \['w'\]"):
            checkpoints.restore(state)


def test_a_changed_data_position_is_noticed(three):
    manifest = newest(three) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"position": 3', '"position": 4'))
    with Checkpointer(three) as checkpoints, pytest.warns(CheckpointWarning, match=f"{manifest}: its checksum"):
        assert checkpoints.restore(LIKE_THREE).data == {"position": 2}


def test_damaged_checkpoints_do_not_displace_whole_ones(three):
    cut(newest(three) / "manifest.json")
    with Checkpointer(three, keep=2) as checkpoints:
        checkpoints.save(4, {"w": jnp.full(500, 4.0), "n": np.int64(4)}, wait=True)
        assert checkpoints.steps() == [2, 4]


def test_with_none_left_the_error_names_each(three):
    for folder in three.glob("step_*"):
        cut(folder / "manifest.json")
    with Checkpointer(three) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(LIKE_THREE)
    assert str(caught.value).startswith(f"{three}: no checkpoint can be read")
    assert all(str(folder / "manifest.json") in str(caught.value) for folder in three.glob("step_*"))


@pytest.mark.parametrize("number", [1, 3])
def test_another_format_is_refused_not_passed_over(three, number):
    manifest = newest(three) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": number}))
    with Checkpointer(three) as checkpoints, pytest.raises(CheckpointError, match=f"{manifest}: has format {number}"):
        checkpoints.restore(LIKE_THREE)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB."""
    mount = shutil.which("mount")
    path = tmp_path / "disk"
    path.mkdir()
    asked = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], capture_output=True, timeout=60
    )
    if not asked or asked.returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True, timeout=60)


def test_a_full_disk(small_disk):
    small, large = {"w": [jnp.arange(10.0)] * 5}, {"w": [jnp.arange(2e5)] * 5}
    with Checkpointer(small_disk / "run") as checkpoints:
        checkpoints.save(1, small, wait=True)
        with pytest.raises(
            CheckpointError, match=rf"{small_disk}/run/step_00000002.*No space left on device: 4,000,000 bytes needed"
        ):
            checkpoints.save(2, large, wait=True)
        assert checkpoints.restore(small).step == 1
        assert sorted(path.name for path in (small_disk / "run").iterdir()) == [
            ".job",
            ".lock",
            "step_00000001_save_00001",
        ]
        checkpoints.save(3, small, wait=True)  # and once there is room again, it goes on
        assert checkpoints.steps() == [1, 3]


def test_a_disk_that_fills_during_the_save_is_told_at_the_next_call_and_once(small_disk, monkeypatch):
    monkeypatch.setattr(disk, "check_room", lambda *_: None)
    with Checkpointer(small_disk) as checkpoints:
        checkpoints.save(1, {"w": jnp.arange(1e6)})
        with pytest.raises(CheckpointError, match=r"step_00000001.*: No space left on device\. Free"):
            checkpoints.save(2, {"w": jnp.arange(10.0)})
        checkpoints.save(2, {"w": jnp.arange(10.0)})
    assert checkpoints.steps() == [2]


def test_a_read_only_disk(small_disk):
    state = {"w": jnp.arange(10.0)}
    with Checkpointer(small_disk) as checkpoints:
        checkpoints.save(1, state, wait=True)
    (small_disk / ".saving_step_00000002_save_00002").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True, timeout=60)
    with Checkpointer(small_disk) as checkpoints:
        assert checkpoints.restore(state).step == 1
        with pytest.raises(CheckpointError, match=rf"{small_disk}/step_00000002.*Read-only file system"):
            checkpoints.save(2, state, wait=True)
        assert checkpoints.steps() == [1]


@pytest.mark.parametrize(("module", "stage"), [(together, "write_pieces"), (disk, "write_manifest"), (disk, "commit")])
def test_an_error_of_the_disk_at_any_stage(tmp_path, monkeypatch, module, stage):
    state = {"w": jnp.arange(10.0)}

    def fail(*_):
        raise OSError(5, "Input/output error", "/dev/disk")

    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(module, stage, fail)
            with pytest.raises(CheckpointError, match=rf"{tmp_path}/step_00000002.*Input/output error \(/dev/disk\)"):
                checkpoints.save(2, state, wait=True)
        assert checkpoints.restore(state).step == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == [".job", ".lock", "step_00000001_save_00001"]


def test_a_file_where_the_directory_should_be(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/run: cannot be made: File exists"):
        Checkpointer(tmp_path / "run")


def test_only_what_is_jdists_own_is_deleted(tmp_path):
    dead = tmp_path / ".saving_step_00000007_save_00001"
    (dead / "arrays").mkdir(parents=True)
    (dead / "pieces_1.bin").write_bytes(b"1")
    (dead / "manifest.json").write_text("{")
    thesis = tmp_path / ".deleting_step_00000008_save_00002" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / ".saving_step_00000009_save_00003"
    link.symlink_to(elsewhere)
    other = tmp_path / ".saving_notes"
    other.mkdir()
    with pytest.warns(CheckpointWarning, match=r"not removed.*\.deleting_step_00000008"):
        checkpoints = Checkpointer(tmp_path, keep=1)
    assert not dead.exists()
    assert all(path.exists() for path in (thesis, elsewhere, link, other))
    with checkpoints:
        checkpoints.save(1, {"n": 1}, wait=True)
        (note,) = [folder / "note.txt" for folder in tmp_path.glob("step_*")]
        note.write_text("the good one")
        checkpoints.save(2, {"n": 2}, wait=True)
        checkpoints.save(3, {"n": 3}, wait=True)
        assert checkpoints.steps() == [1, 3]  # somebody's note is not pruned with its folder
    assert note.read_text() == "the good one"
