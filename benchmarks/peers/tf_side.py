"""tf.distribute's side of `mirrored.py`: argument 1 is the number of devices. Runs in TensorFlow's own environment."""

import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
from side import serve

N, GLOBAL_BATCH = int(sys.argv[1]), 1024
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * N)
# ReductionToOneDevice is what MirroredStrategy itself falls back to on CPUs.
strategy = tf.distribute.MirroredStrategy(
    [f"CPU:{i}" for i in range(N)], cross_device_ops=tf.distribute.ReductionToOneDevice()
)
with strategy.scope():
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [layers.Input((784,)), layers.Dense(512, "relu"), layers.Dense(512, "relu"), layers.Dense(10)]
    )
    optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)


def replica_step(x, y):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        loss = tf.reduce_sum(losses) / GLOBAL_BATCH
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def train_step(x, y):
    return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)


rng = np.random.default_rng(0)
x, y = rng.normal(size=(GLOBAL_BATCH, 784)).astype("f"), rng.integers(0, 10, GLOBAL_BATCH).astype("i4")


def distributed(array):
    rows = GLOBAL_BATCH // N
    return strategy.experimental_distribute_values_from_function(
        lambda c: tf.constant(array[c.replica_id_in_sync_group * rows : (c.replica_id_in_sync_group + 1) * rows])
    )


batch = distributed(x), distributed(y)


def run(steps):
    for _ in range(steps):
        loss = train_step(*batch)
    return float(loss)


serve({"tensorflow": tf.__version__, "python": sys.version.split()[0]}, run)
