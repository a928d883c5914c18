"""The IDX reader and the task on it, with small files made here."""

import gzip
import struct

import jax
import numpy as np
import optax
import pytest

from examples.tasks import mnist_idx
from jdist.errors import ConfigError
from jdist.tasks.options import OptionError
from tests.toys import state_of

NAMES = {
    "train-images-idx3-ubyte": ("image", 24),
    "train-labels-idx1-ubyte": ("label", 24),
    "t10k-images-idx3-ubyte": ("image", 10),
    "t10k-labels-idx1-ubyte": ("label", 10),
}


def encode(values):
    return struct.pack(f">{1 + values.ndim}I", 0x0800 | values.ndim, *values.shape) + values.tobytes()


def contents(kind, rows, *, size=12):
    if kind == "label":
        return np.arange(rows, dtype=np.uint8) % 3
    return np.random.default_rng(rows).integers(0, 256, (rows, size, size), np.uint8)


@pytest.fixture
def folder(tmp_path):
    for name, (kind, rows) in NAMES.items():
        (tmp_path / name).write_bytes(encode(contents(kind, rows)))
    return tmp_path


def test_the_task_reads_the_four_files_and_trains(folder):
    task = mnist_idx.make(folder=str(folder), width=4, dropout=0.0, shift=0)
    batch = task.train_data(24, 0, 1).batch_at(0)
    assert batch["image"].shape == (24, 12, 12, 1)
    assert batch["image"].dtype == np.float32
    assert batch["image"].max() <= 1.0
    batch["mask"] = np.ones(24, bool)
    state, step = state_of(task, optax.adam(1e-2)), jax.jit(task.train_step)
    assert state.params["Dense_1"]["bias"].shape == (3,)
    losses = []
    for _ in range(15):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    assert len(task.eval_data(10).batch_at(0)["label"]) == 10


def test_compressed_files_and_the_spelling_with_a_dot_are_found(folder):
    plain = mnist_idx.read_idx(folder / "train-images-idx3-ubyte", rank=3)
    (folder / "train-images-idx3-ubyte").rename(folder / "train-images.idx3-ubyte")
    for name in ("train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        (folder / name).unlink()
    assert mnist_idx.find_idx(folder, "train-images", rank=3).name == "train-images.idx3-ubyte"
    np.testing.assert_array_equal(plain, contents("image", 24))
    part = mnist_idx.load(folder, "t10k")
    np.testing.assert_array_equal(part["label"], contents("label", 10))
    np.testing.assert_allclose(part["image"][..., 0] * 255, contents("image", 10), atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"does not hold {name}"):
        mnist_idx.make(folder=str(folder))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(
        OptionError, match=r"^task\.options\.folder: the folder .*/nowhere with .* files does not exist\.$"
    ):
        mnist_idx.make(folder=str(tmp_path / "nowhere"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mnist_data").mkdir()
    with pytest.raises(ConfigError, match=rf"Did you mean {tmp_path}/mnist_data\?$"):
        mnist_idx.make(folder=str(tmp_path / "mnist-data"))


def test_of_a_missing_file_only_its_own_under_another_name_is_told(folder):
    (folder / "train-images-idx3-ubyte").rename(folder / "train-images.zip")
    with pytest.raises(ConfigError, match=r"does not hold .*\. Rename or unpack train-images\.zip\.$"):
        mnist_idx.make(folder=str(folder))
    (folder / "train-images.zip").unlink()
    with pytest.raises(ConfigError, match=r"looked for [^.]*train-images-idx3-ubyte, .*ubyte\.gz\.$"):
        mnist_idx.make(folder=str(folder))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep", [0, 3, 6, -1])
def test_a_truncated_file_is_named(folder, name, keep):
    path = folder / name
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=f"{name}: truncated"):
        mnist_idx.make(folder=str(folder))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-9], "truncated: the compressed stream ends too early"),
        (lambda content: b"no gzip at all", "not a sound gzip file"),
        (lambda content: content[:40] + b"\0\0\0\0\0\0" + content[46:], "not a sound gzip file"),
        (lambda content: b"", "truncated"),
    ],
)
def test_a_damaged_compressed_file_is_named(folder, damage, message):
    path = folder / "train-images-idx3-ubyte"
    content = gzip.compress(path.read_bytes(), mtime=0)
    path.unlink()
    path.with_name(f"{path.name}.gz").write_bytes(damage(content))
    with pytest.raises(ConfigError, match=rf"train-images-idx3-ubyte\.gz: {message}"):
        mnist_idx.make(folder=str(folder))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train-images-idx3-ubyte",
            encode(contents("label", 24)),
            "train-images-idx3-ubyte: the magic number is 0x00000801",
        ),
        ("t10k-labels-idx1-ubyte", encode(contents("label", 10)) + b"\0", "t10k-labels-idx1-ubyte: too long"),
        ("train-labels-idx1-ubyte", encode(np.zeros(23, np.uint8)), "holds 24 images.* holds 23 labels"),
        ("t10k-labels-idx1-ubyte", encode(np.full(10, 7, np.uint8)), "test labels go up to 7"),
        ("t10k-images-idx3-ubyte", encode(np.zeros((10, 9, 9), np.uint8)), "12 x 12 pixels, the test images 9 x 9"),
    ],
)
def test_files_that_are_not_right_or_do_not_fit_each_other_are_refused(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(OptionError, match=rf"^task\.options\.folder: .*{message}"):
        mnist_idx.make(folder=str(folder))
