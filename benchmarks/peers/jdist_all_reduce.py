"""jdist's side of multi_worker.py: reads "MEGABYTES CALLS", all-reduces, prints the seconds as JSON."""

from __future__ import annotations

import json
import sys
import time

import jdist

strategy = jdist.multi_worker()

import jax  # noqa: E402 # multi_worker comes first
import jax.numpy as jnp  # noqa: E402

reduce = jdist.distribute(
    lambda x: jdist.all_reduce(x, "mean"),
    strategy,
    args=("state",),
    returns="state",
    non_finite="apply",
    check_replicas=0,
)
print(json.dumps({"jdist": jdist.__version__, "jax": jax.__version__}), flush=True)
for line in sys.stdin:
    megabytes, calls = map(int, line.split())
    x = strategy.init(lambda n: jnp.ones(n), megabytes * 2**18)
    jax.block_until_ready(reduce(x))
    x = reduce.last_state
    start = time.perf_counter()
    for _ in range(calls):
        x = reduce(x)
    jax.block_until_ready(x)
    print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
