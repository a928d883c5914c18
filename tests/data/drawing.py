"""A step whose loss is of rows that each replica draws for itself, as dropout does."""

import jax
import numpy as np

import jdist


def losses(strategy):
    """The loss of each batch of an epoch that ends on a short one."""

    @jdist.distribute(strategy, args=("batch",), returns="metrics")
    def step(batch):
        kept = jax.random.bernoulli(jdist.replica_rng(jax.random.key(0)), 0.5, batch["x"].shape)
        return {"loss": jdist.mean(batch["x"] * kept, batch["mask"])}

    source = jdist.data.from_arrays({"x": np.arange(1.0, 15.0, dtype=np.float32)}, global_batch=8)
    return [float(step(batch)["loss"]) for batch in strategy.distribute_dataset(source)]
