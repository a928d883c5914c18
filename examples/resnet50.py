"""ResNet-50 on a set of the shape of ImageNet: image files of all sizes, in ArrayRecord files, which Grain decodes and crops.

`python -m examples.resnet50 FOLDER FILE` writes such a file of a folder that has a folder of images for each class.
"""

from __future__ import annotations

import glob
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import grain
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image, ImageOps

import jdist
from examples.models.resnet import ResNet
from jdist.tasks import Task, options

MEAN, STD = np.array([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], np.float32)  # of ImageNet's pixels


class Crop(grain.transforms.RandomMap):
    """Decodes a record and cuts out a random square, `least` of the largest one's area or more; half are mirrored."""

    def __init__(self, size: int, least: float):
        self.size = size
        self.least = least

    def random_map(self, element: bytes, rng: np.random.Generator):
        image, label = decode(element)
        side = min(image.size) * rng.uniform(self.least, 1) ** 0.5
        left, top = rng.uniform(0, image.width - side), rng.uniform(0, image.height - side)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
        image = ImageOps.mirror(image) if rng.random() < 0.5 else image
        return {"image": np.asarray(image), "label": label}


def middle(record: bytes, size: int) -> dict[str, object]:
    """Decodes a record and cuts out the middle, seven eighths of the shorter side."""
    image, label = decode(record)
    return {"image": np.asarray(ImageOps.fit(image, (size, size), bleed=1 / 16)), "label": label}


def decode(record: bytes) -> tuple[Image.Image, np.int32]:
    """Decodes a record's image file."""
    row = msgpack.unpackb(record)
    return Image.open(io.BytesIO(row["image"])).convert("RGB"), np.int32(row["label"])


def make(
    *,
    train: str,
    test: str,
    classes: int = 1000,
    size: int = 224,
    least: float = 0.08,
    workers: int = 16,
    depths: Sequence[int] = (3, 4, 6, 3),
    features: Sequence[int] = (256, 512, 1024, 2048),
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
) -> Task:
    """Makes the task.

    Args:
        train: glob pattern of the ArrayRecord files to train on.
        test: of those to evaluate on.
        classes: number of labels.
        size: pixels of a side of what is cut out.
        least: the least share of an image's largest square that is cut out in training.
        workers: threads that decode.
        depths: of the model; ResNet-50's are 3, 4, 6, 3.
        features: of each stage's output.
        dtype: of the activations; parameters are float32.
    """
    model = ResNet(classes, depths=tuple(depths), features=tuple(features), dtype=jnp.dtype(dtype))
    top1, top5 = jdist.metrics.accuracy(), jdist.metrics.top_k(5)

    def create_state(key, tx):
        variables = model.init(key, jnp.zeros((1, size, size, 3)))
        return jdist.TrainState.create(
            apply_fn=model.apply,
            params=variables["params"],
            tx=tx,
            batch_stats=variables["batch_stats"],
            aggregation={"batch_stats": "mean"},  # over the replicas, which normalise their own rows
        )

    def pixels(batch):
        return (batch["image"] / 255 - MEAN) / STD

    def train_step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.extra["batch_stats"]}
            logits, new = state.apply_fn(variables, pixels(batch), train=True, mutable=["batch_stats"])
            labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], classes), 0.1)
            loss = jdist.mean(optax.softmax_cross_entropy(logits, labels), batch["mask"])
            kernels = [x for x in jax.tree.leaves(params) if x.ndim > 1]  # scales and biases do not decay
            return loss + 1e-4 * sum(optax.l2_loss(x).sum() for x in kernels), new["batch_stats"]

        (loss, stats), grads = jdist.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), {"loss": loss}

    def eval_step(state, batch):
        logits = state.apply_fn({"params": state.params, **state.extra}, pixels(batch))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        rows = (logits, batch["label"], batch["mask"])
        return {"loss": jdist.mean(losses, batch["mask"]), "top1": top1.update(*rows), "top5": top5.update(*rows)}

    def train_data(global_batch, seed, epochs):
        rows = records("train", train).seed(seed).random_map(Crop(size, least))
        order = {"shuffle_seed": seed, "epochs": epochs}
        return jdist.data.from_rows(rows, global_batch=global_batch, workers=workers, **order)

    return Task(
        create_state=create_state,
        train_step=train_step,
        eval_step=eval_step,
        train_data=train_data,
        eval_data=lambda rows: records("test", test).map(lambda record: middle(record, size)).batch(rows),
        metrics={"top1": top1, "top5": top5},
    )


def records(option: str, pattern: str) -> grain.MapDataset:
    """Opens the ArrayRecord files that an option's pattern matches."""
    if not (paths := sorted(glob.glob(pattern))):
        raise options.OptionError(option, f"{pattern!r} matches no file")
    return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))


def write(folder: str, file: str) -> None:
    """Writes the images of a folder's folders as one file; a label is the number of its folder in the order of their names."""
    writer = ArrayRecordWriter(file, "group_size:1")
    for label, each in enumerate(sorted(path for path in Path(folder).iterdir() if path.is_dir())):
        for image in sorted(each.iterdir()):
            writer.write(msgpack.packb({"image": image.read_bytes(), "label": label}))
    writer.close()


if __name__ == "__main__":
    write(*sys.argv[1:])
