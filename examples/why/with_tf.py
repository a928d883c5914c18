"""Data-parallel training by tf.distribute."""

import jax
import tensorflow as tf
from problem import EPOCHS, ROWS, create_params, image, label

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(8)])
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(32, "relu"), tf.keras.layers.Dense(10)])
    model.build((None, 64))
    params = jax.device_get(create_params(jax.random.key(0)))
    model.set_weights([params[layer][name] for layer in ("layers_0", "layers_2") for name in ("kernel", "bias")])
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)


@tf.function
def train_step(batch, rows):
    def step(batch):
        features, labels = batch
        with tf.GradientTape() as tape:
            losses = tf.keras.losses.sparse_categorical_crossentropy(labels, model(features), from_logits=True)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=rows)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return tf.reduce_sum(losses)

    return strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)


dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((image, label)).batch(ROWS))
for epoch in range(EPOCHS):
    total = 0.0
    for batch in dataset:
        rows = sum(len(labels) for labels in strategy.experimental_local_results(batch[1]))
        total += train_step(batch, rows)
    print(f"epoch {epoch}: loss {total / len(label):.5f}")
