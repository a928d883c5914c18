"""tf.distribute's side of parameter_server.py, in TensorFlow's own environment: arguments PS PARAMETERS.

0 parameters: closures that do nothing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_FAIL_FAST": "use_caller"}

import json

import tensorflow as tf
from side import serve

tf.get_logger().setLevel("ERROR")


def end_with_parent():
    sys.stdin.read()
    os._exit(0)


if len(sys.argv) > 3:  # one of the servers
    threading.Thread(target=end_with_parent, daemon=True).start()
    _, _, cluster, role, index = sys.argv[1:]
    tf.distribute.Server(
        tf.train.ClusterSpec(json.loads(cluster)), job_name=role, task_index=int(index), protocol="grpc"
    ).join()

NUM_PS, PARAMETERS = int(sys.argv[1]), int(sys.argv[2])
LEAVES = 2 if PARAMETERS < 1000 else 10


def free_ports(count):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [f"127.0.0.1:{s.getsockname()[1]}" for s in held]
    for s in held:
        s.close()
    return ports


ports = free_ports(2 + NUM_PS)
cluster = {"worker": ports[:2], "ps": ports[2:]}
servers = [
    subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:3], json.dumps(cluster), role, str(i)], stdin=subprocess.PIPE
    )
    for role, members in cluster.items()
    for i in range(len(members))
]
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    params = [tf.Variable(tf.ones(PARAMETERS // LEAVES)) for _ in range(LEAVES)] if PARAMETERS else []
batch = tf.constant([1e-4])


@tf.function
def train_step(scale):
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.nn.l2_loss(p) for p in params]) * scale[0]  # reads each once
    for p, g in zip(params, tape.gradient(loss, params), strict=True):
        tf.raw_ops.ResourceApplyGradientDescent(var=p.handle, alpha=0.01, delta=g)
    return loss


@tf.function
def nothing(x):
    return x[0]


def run(steps):
    for _ in range(steps):
        value = coordinator.schedule(train_step if PARAMETERS else nothing, args=(batch,))
    coordinator.join()
    return float(value.fetch())


try:
    serve({"tensorflow": tf.__version__}, run)
finally:
    for server in servers:
        server.kill()
    os._exit(0)  # its threads would wait for the servers
