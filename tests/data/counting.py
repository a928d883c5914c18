"""A source that remembers what it was asked for, and what is fed from it."""

import numpy as np

import jdist
from jdist import data


def distributed_dataset(source, **options):
    """Feeds a source with options of `FeedOptions` and of `InputOptions`."""
    own = {name: options.pop(name) for name in ("prefetch", "prefetch_to_device", "autoshard") if name in options}
    return data.distributed_dataset(source, data.FeedOptions(**options, input=jdist.InputOptions(**own)))


def feed(source, *, num_replicas=2, **options):
    return distributed_dataset(source, num_replicas=num_replicas, **options)


def values(dataset):
    return [batch["x"].tolist() for batch in dataset]


def real_rows(batches):
    return [row for batch in batches for row in batch["x"][batch["mask"]].tolist()]


class Counting:
    """A random-access source that remembers which batches were asked for."""

    def __init__(self, *, num_steps: int | None = 10, short_at=()):
        self.num_steps = num_steps
        self.global_batch = 2
        self.fingerprint = "counting"
        self.short_at = short_at
        self.asked = []

    def batch_at(self, step):
        self.asked.append(step)
        return {"x": np.array([step] if step in self.short_at else [step, step])}
