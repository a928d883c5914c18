"""`strategy.init(lambda: params)` of parameters that exist, against `jax.device_put` of the same: seconds and ratios.

    python benchmarks/init.py [--devices 1 4] [--rounds 7]

500 MB in five leaves, from numpy and from JAX arrays. The reference is timed twice; its ratio to itself is the noise.
"""

from __future__ import annotations

from typing import Any

from pairs import alternate, compare, on_cpu_devices

LEAVES, FLOATS = 5, 25_000_000


def measure(rounds: int) -> None:
    """Measure and print."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jdist

    strategy = jdist.mirrored()
    host = {f"w{i}": np.full(FLOATS, i, np.float32) for i in range(LEAVES)}

    def put(params: Any) -> None:
        jax.block_until_ready(jax.device_put(params, strategy.replicated_sharding))

    def init(params: Any) -> None:
        jax.block_until_ready(strategy.init(lambda: params))

    print(f"{len(jax.devices())} devices", "seconds", "ratio", "95 % of the ratio", sep="\t")
    for kind, params in (("numpy", host), ("jax", jax.tree.map(jnp.asarray, host))):
        times = alternate(
            {
                "device_put": lambda p=params: put(p),
                "again": lambda p=params: put(p),
                "init": lambda p=params: init(p),
            },
            rounds,
        )
        for name in ("again", "init"):
            found = compare(times[name], times["device_put"])
            print(
                f"{kind}, {name}",
                f"{found.seconds:.2f}",
                f"{found.ratio:.2f}",
                f"{found.ratio_low:.2f} to {found.ratio_high:.2f}",
                sep="\t",
            )


if __name__ == "__main__":
    on_cpu_devices(measure, __doc__, __file__, devices=[1, 4], rounds=7)
