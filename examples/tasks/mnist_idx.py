"""Images in the four IDX files of MNIST, Fashion-MNIST and their kin, from a folder that you name.

An IDX file has a magic number, the dimensions, then the values, all big-endian.

Source: the format's description at the end of https://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from jdist.errors import ConfigError
from jdist.loop.task import Task
from jdist.tasks import options
from jdist.tasks.digits import ConvNet, image_task
from jdist.tasks.options import OptionError, near

_UNSIGNED_BYTE = 0x08
_AGAIN = "Fetch the file again, or make it again."


def find_idx(folder: Path, stem: str, *, rank: int) -> Path:
    """Finds the first of `STEM-idxN-ubyte`, `STEM.idxN-ubyte` (N: rank) and both with `.gz`."""
    plain = (f"{stem}-idx{rank}-ubyte", f"{stem}.idx{rank}-ubyte")
    candidates = [folder / f"{name}{suffix}" for suffix in ("", ".gz") for name in plain]
    for path in candidates:
        if path.is_file():
            return path
    if not folder.is_dir():
        raise OptionError(
            "folder", f"the folder {folder.resolve()} with the four IDX files does not exist", remedy=near(folder)
        )
    # No nearest name here: to a comparison of letters the labels are near to the images.
    alike = sorted(path.name for path in folder.iterdir() if path.name.lower().startswith(stem))
    raise OptionError(
        "folder",
        f"{folder.resolve()} does not hold {plain[0]}; looked for {', '.join(path.name for path in candidates)}",
        remedy=f" Rename or unpack {', '.join(alike[:3])}." if alike else "",
    )


def read_idx(path: Path, *, rank: int) -> np.ndarray:
    """Reads an IDX file of unsigned bytes and `rank` dimensions, plain or `.gz`."""
    content = _content(path)
    header_bytes = 4 + 4 * rank
    if len(content) < header_bytes:
        raise ConfigError(f"{path}: truncated: {len(content)} bytes, but the header alone has {header_bytes}. {_AGAIN}")
    magic, *shape = struct.unpack(f">{1 + rank}I", content[:header_bytes])
    expected = (_UNSIGNED_BYTE << 8) | rank
    if magic != expected:
        raise ConfigError(
            f"{path}: the magic number is {magic:#010x}, but an IDX file of unsigned bytes with {rank} "
            f"dimension(s) starts with {expected:#010x}. It may be another file under this name, or "
            "compressed without `.gz`."
        )
    size = math.prod(shape)
    if len(content) != header_bytes + size:
        what = "truncated" if len(content) < header_bytes + size else "too long"
        raise ConfigError(
            f"{path}: {what}: the header declares {' x '.join(map(str, shape))} = {size} bytes of values, "
            f"but {len(content) - header_bytes} follow it. {_AGAIN}"
        )
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as file:
            return file.read()
    except EOFError as error:
        raise ConfigError(f"{path}: truncated: the compressed stream ends too early. {_AGAIN}") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path}: not a sound gzip file ({error}). {_AGAIN}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from error


@options.checked
def make(
    *,
    folder: options.Text,
    width: options.Count = 16,
    dropout: options.Fraction = 0.3,
    shift: options.Natural = 2,
) -> Task:
    """Makes the classification of the images in a folder, with the network and the loss of the task `digits`.

    Args:
        folder: holds train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and
            t10k-labels-idx1-ubyte, each plain or `.gz`; `train-images.idx3-ubyte` and so on are found too.
        width: features of the first convolution; the second has twice as many, the hidden layer four times.
        dropout: share of the hidden layer dropped in training.
        shift: training images are moved at random by up to so many pixels each way; 0 for none.

    Returns:
        A task with batches {"image": float32 [rows, height, width, 1] in [0, 1], "label": int32 [rows]}.
        There are as many classes as the largest training label says.

    Raises:
        ConfigError: an option is out of range, or a file is missing, cut short or does not fit the others.

    Example:
        task = make(folder="data/mnist")
    """
    place = Path(folder).expanduser()
    with options.blaming("folder"):
        train, test = load(place, "train"), load(place, "t10k")
        classes = int(train["label"].max()) + 1
        _check_match(place, train, test, classes=classes)
    return image_task(ConvNet(width, dropout, num_classes=classes), train=train, test=test, shift=shift)


def load(folder: Path, part: str) -> dict[str, np.ndarray]:
    """Loads the half "train" or "t10k": float32 images in [0, 1], int32 labels."""
    image_path = find_idx(folder, f"{part}-images", rank=3)
    label_path = find_idx(folder, f"{part}-labels", rank=1)
    images, labels = read_idx(image_path, rank=3), read_idx(label_path, rank=1)
    if len(images) != len(labels):
        raise ConfigError(
            f"{image_path} holds {len(images)} images, but {label_path} holds {len(labels)} labels; there "
            "must be one label an image. Take both from the same data set."
        )
    if images.size == 0:
        raise ConfigError(
            f"{image_path} declares the shape {images.shape}: there is nothing in it. Take the files of a whole data set."
        )
    return {"image": (images / np.float32(255))[..., None], "label": labels.astype(np.int32)}


def _check_match(folder: Path, train: dict[str, np.ndarray], test: dict[str, np.ndarray], *, classes: int) -> None:
    train_shape, test_shape = train["image"].shape[1:3], test["image"].shape[1:3]
    if train_shape != test_shape:
        raise ConfigError(
            f"{folder}: the training images are {train_shape[0]} x {train_shape[1]} pixels, the test images "
            f"{test_shape[0]} x {test_shape[1]}; they must agree. Take all four files from the same data set."
        )
    if min(train_shape) < 4:
        raise ConfigError(
            f"{folder}: the images are {train_shape[0]} x {train_shape[1]} pixels; the network halves them "
            "twice and needs at least 4 x 4."
        )
    largest = int(test["label"].max())
    if largest >= classes:
        raise ConfigError(
            f"{folder}: the test labels go up to {largest}, the training labels only to {classes - 1}; a "
            "class that is never trained can't be learnt. Take all four files from the same data set."
        )
