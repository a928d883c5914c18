"""tf.distribute's side of multi_worker.py: reads "MEGABYTES CALLS", all-reduces, prints the seconds as JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import tensorflow as tf  # pyright: ignore[reportMissingImports] # of the environment of the peer

tf.get_logger().setLevel("ERROR")
options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


@tf.function
def reduce(x):
    return strategy.reduce("MEAN", strategy.run(lambda x: tf.identity(x), args=(x,)), axis=None)


print(json.dumps({"tensorflow": tf.__version__}), flush=True)
for line in sys.stdin:
    megabytes, calls = map(int, line.split())
    x = tf.ones(megabytes * 2**18)
    reduce(x).numpy()
    start = time.perf_counter()
    for _ in range(calls):
        y = reduce(x)
    y[:1].numpy()
    print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
os._exit(0)  # its servers would wait for each other
