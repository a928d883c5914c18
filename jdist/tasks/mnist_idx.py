"""Images in the four IDX files of MNIST, Fashion-MNIST and their kin, from a folder that you name."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jdist.errors import ConfigError
from jdist.loop.task import Task
from jdist.tasks import idx, options
from jdist.tasks.digits import ConvNet, image_task


def make(*, folder: str, width: int = 16, dropout: float = 0.3, shift: int = 2) -> Task:
    """Classification of the images in a folder, with the network and the loss of the task `digits`.

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
    place = Path(options.text("folder", folder)).expanduser()
    with options.blaming("folder"):
        train, test = load(place, "train"), load(place, "t10k")
        classes = int(train["label"].max()) + 1
        _check_match(place, train, test, classes=classes)
    model = ConvNet(
        width=options.whole("width", width),
        dropout=options.fraction("dropout", dropout),
        num_classes=classes,
    )
    return image_task(model, train=train, test=test, shift=options.whole("shift", shift, least=0))


def load(folder: Path, part: str) -> dict[str, np.ndarray]:
    """One half of the data set.

    Args:
        folder: where its files are.
        part: "train" or "t10k".

    Returns:
        {"image": float32 [rows, height, width, 1] in [0, 1], "label": int32 [rows]}.

    Raises:
        ConfigError: a file is missing or unsound, there are no rows, or images and labels differ in number.
    """
    image_path = idx.find(folder, f"{part}-images", rank=3)
    label_path = idx.find(folder, f"{part}-labels", rank=1)
    images, labels = idx.read(image_path, rank=3), idx.read(label_path, rank=1)
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
