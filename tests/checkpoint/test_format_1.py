"""Checkpoints that jdist saved when Orbax wrote their whole leaves: they are still read, and can be refused in words."""

import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from jdist.checkpoint.checkpointer import Checkpointer
from jdist.errors import CheckpointError
from tests.checkpoint.save_format_1 import spread_values, whole_leaves
from tests.checkpoint.test_checkpoint import assert_same


@pytest.fixture
def saved(tmp_path):
    """The checkpoint that save_format_1.py left, in a folder of its own."""
    with tarfile.open(Path(__file__).with_name("format_1.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "step_00000003_save_00001"


def like():
    return {"spread": np.zeros((8, 3), np.float32), **whole_leaves()}


def test_every_leaf_comes_back_to_the_bit_and_the_next_save_has_todays_format(saved):
    with Checkpointer(saved.parent) as checkpoints:
        restored = checkpoints.restore(like())
        assert_same(restored.state, {"spread": spread_values(), **whole_leaves()})
        assert (restored.step, restored.data, restored.metrics) == (3, {"position": 3}, {"loss": 0.5})
        checkpoints.save(4, restored.state, wait=True)
        assert checkpoints.steps() == [3, 4]
        assert_same(checkpoints.restore(like()).state, restored.state)
    with Checkpointer(saved.parent, keep=1) as checkpoints:  # and it is removed in its turn
        checkpoints.save(5, restored.state, wait=True)
    assert not saved.exists()


@pytest.mark.parametrize("file", ["pieces_1/19_0.bin", "arrays/manifest.ocdbt"])
def test_damage_is_noticed(saved, file):
    content = bytearray((saved / file).read_bytes())
    content[7] ^= 1
    (saved / file).write_bytes(content)
    with Checkpointer(saved.parent) as checkpoints, pytest.raises(CheckpointError, match=f"{file}: its checksum"):
        checkpoints.restore(like())
    (saved / file).unlink()
    with Checkpointer(saved.parent) as checkpoints:
        assert checkpoints.steps() == []


def test_without_orbax_it_is_refused_and_not_passed_over(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with (
        Checkpointer(saved.parent) as checkpoints,
        pytest.raises(CheckpointError, match="pip install orbax-checkpoint"),
    ):
        checkpoints.restore(like())
