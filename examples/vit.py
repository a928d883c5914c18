"""A vision transformer that others trained, fine-tuned on images in folders, one folder for each class.

The config's `init_from` reads its weights: safetensors under the names of Hugging Face's transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image, ImageOps

import jdist
from examples.models.vit import ViT
from jdist.tasks import Task, options


class Images:
    """The images of a folder's folders, cut to squares; a label is the number of its folder in the order of their names."""

    def __init__(self, folder: str, size: int):
        self.size = size
        self.paths = sorted(Path(folder).glob("*/*"))
        self.classes = sorted({path.parent.name for path in self.paths})

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> dict[str, np.ndarray | int]:
        path = self.paths[number]
        with Image.open(path) as image:
            pixels = np.asarray(ImageOps.fit(image.convert("RGB"), (self.size, self.size)))
        return {"image": pixels, "label": self.classes.index(path.parent.name)}


def make(
    *,
    train: str,
    test: str,
    size: int = 224,
    patch: int = 16,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    hidden: int = 3072,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    workers: int = 8,
) -> Task:
    """Makes the task.

    Args:
        train: folder of folders of images to train on.
        test: of those to evaluate on, with folders of the same names.
        size: pixels of a side, the weights' own.
        patch: pixels of a patch's side, also the weights' own; as are the next four.
        layers: of the model.
        width: features of a patch.
        heads: of each layer's attention.
        hidden: features within the feed-forward networks.
        dtype: of the activations; parameters are float32.
        workers: threads that decode.
    """
    images = {"train": Images(train, size), "test": Images(test, size)}
    classes = images["train"].classes
    for option, each in images.items():
        if not each.classes or each.classes != classes:
            folders = ", ".join(each.classes) or "none"
            raise options.OptionError(
                option, f"the folders with images are {folders}, in training {', '.join(classes) or 'none'}"
            )
    activations = jnp.dtype(dtype)
    model = ViT(len(classes), patch, layers, width, heads, hidden, dtype=activations)
    accuracy = jdist.metrics.accuracy()

    def create_state(key, tx):
        params = model.init(key, jnp.zeros((1, size, size, 3)))["params"]
        return jdist.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def logits_and_losses(state, params, batch):
        logits = state.apply_fn({"params": params}, batch["image"] / 127.5 - 1)  # as these models were trained
        return logits, optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    def train_step(state, batch):
        def loss_fn(params):
            return jdist.mean(logits_and_losses(state, params, batch)[1], batch["mask"])

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def eval_step(state, batch):
        logits, losses = logits_and_losses(state, state.params, batch)
        right = accuracy.update(logits, batch["label"], batch["mask"])
        return {"loss": jdist.mean(losses, batch["mask"]), "accuracy": right}

    def train_data(global_batch, seed, epochs):
        order = {"shuffle_seed": seed, "epochs": epochs}
        return jdist.data.from_rows(images["train"], global_batch=global_batch, workers=workers, **order)

    return Task(
        create_state=create_state,
        train_step=train_step,
        eval_step=eval_step,
        train_data=train_data,
        eval_data=lambda rows: jdist.data.from_rows(images["test"], global_batch=rows, workers=workers),
        metrics={"accuracy": accuracy},
        baselines=lambda: {"accuracy of a guess": 1 / len(classes)},
    )
