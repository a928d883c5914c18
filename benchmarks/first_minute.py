"""From the start of a process to step 20 of a default `jdist.fit`, against the same program hand-written.

    python benchmarks/first_minute.py [--devices 2] [--rounds 7] [--model mlp|conv]

Each side is a new process: imports, a state, 20 steps at global batch 1,024 from arrays in memory. All take turns; the
hand-written side runs twice (the noise of A against A). Printed are the seconds of each part, as medians and as a ratio
round by round, and each program that XLA compiles, by name. jdist's side has the defaults of `fit`: the first batch is
verified, the replicas are compared after the first step, gradients are looked at, rows go to a file and to the output. The
hand-written side does none of that: it reads the loss at step 20. Target: start to step 20 at most 1.25 of hand-written, and
at most 3 compilations more.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from pairs import compare

STEPS, ROWS = 20, 1024
_EVENT = "/jax/core/compile/"
_TRACED, _LOWERED, _COMPILED = (
    f"{_EVENT}{x}_duration" for x in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)
SIDES = ("jdist", "hand-written", "hand-written again")
PARTS = ("import", "init", "trace", "lower", "compile", "verify", "replica check", "first step", "total", "processor")


class Events:
    """The durations that JAX reports while it compiles, and the names of the programs."""

    def __init__(self) -> None:
        import jax

        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.programs: list[tuple[str, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **about: Any) -> None:
        part = {_TRACED: "trace", _LOWERED: "lower", _COMPILED: "compile"}.get(event)
        if part is not None:
            self.seconds[part] += duration_secs
        if event == _COMPILED:
            self.programs.append((f"{about.get('fun_name')}", duration_secs))


def model(name: str) -> Any:
    import flax.linen as nn

    if name == "mlp":
        return nn.Sequential([nn.Dense(512), nn.relu, nn.Dense(512), nn.relu, nn.Dense(10)])
    layers: list[Any] = [lambda x: x.reshape(-1, 28, 28, 1)]
    for width in (16, 32, 64):
        layers += [nn.Conv(width, (3, 3), strides=(2, 2)), nn.LayerNorm(), nn.relu]
    return nn.Sequential([*layers, lambda x: x.mean((1, 2)), nn.Dense(10)])


def arrays() -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    n = STEPS * ROWS
    return {"image": rng.normal(size=(n, 784)).astype(np.float32), "label": rng.integers(0, 10, n).astype(np.int32)}


def jdist_side(name: str, begun: float) -> dict[str, Any]:
    import flax.linen  # noqa: F401 - as a user's script does
    import jax
    import jax.numpy as jnp
    import optax

    import jdist
    from jdist.step import mesh_step

    events, took = Events(), {}
    _ = jdist.mirrored, jdist.fit, jdist.TrainState  # public names are imported at their first use
    took["import"] = time.time() - begun
    data, net = arrays(), model(name)

    def create_state(key: Any) -> Any:
        params = net.init(key, jnp.zeros((1, 784)))["params"]
        return jdist.TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.01, momentum=0.9))

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, batch["image"])
            return jdist.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]), batch["mask"])

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.time()
            try:
                return function(*args, **kwargs)
            finally:
                took[part] = took.get(part, 0.0) + time.time() - start

        return run

    step_class = mesh_step.DistributedStep
    setattr(step_class, "_verify_first", timed("verify", getattr(step_class, "_verify_first")))  # noqa: B009, B010
    setattr(step_class, "_check_replicas", timed("replica check", getattr(step_class, "_check_replicas")))  # noqa: B009, B010
    start = time.time()
    strategy = jdist.mirrored()
    state = jax.block_until_ready(strategy.init(create_state, jax.random.key(0)))
    took["init"] = time.time() - start

    def first(moment: Any) -> None:
        if moment.step == 1:
            jax.block_until_ready(moment.state)
            took["first step"] = time.time() - begun

    state, history = jdist.fit(
        train_step, state, data, strategy=strategy, steps=STEPS, global_batch=ROWS, callbacks=[first]
    )
    jax.block_until_ready(state)
    took["total"], took["processor"] = time.time() - begun, time.process_time()
    return {"took": {**events.seconds, **took}, "programs": events.programs, "loss": history.rows[-1]["loss"]}


def by_hand(name: str, begun: float) -> dict[str, Any]:
    import flax.linen  # noqa: F401
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    events, took = Events(), {}
    took["import"] = time.time() - begun
    data, net, tx = arrays(), model(name), optax.sgd(0.01, momentum=0.9)

    def create_state(key: Any) -> Any:
        params = net.init(key, jnp.zeros((1, 784)))["params"]
        return {"params": params, "opt": tx.init(params)}

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = net.apply({"params": params}, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.lax.pmean(jax.value_and_grad(loss_fn)(state["params"]), "replica")
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    start = time.time()
    mesh = jax.make_mesh((len(jax.devices()),), ("replica",))
    whole, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))
    state = jax.block_until_ready(jax.jit(create_state, out_shardings=whole)(jax.random.key(0)))
    took["init"] = time.time() - start
    mapped = jax.shard_map(train_step, mesh=mesh, in_specs=(P(), P("replica")), out_specs=(P(), P()), check_vma=False)
    step = jax.jit(mapped, donate_argnums=0)
    metrics: Any = None
    for i in range(STEPS):
        rows = slice(i * ROWS, (i + 1) * ROWS)
        batch = jax.device_put({key: np.ascontiguousarray(x[rows]) for key, x in data.items()}, by_rows)
        state, metrics = step(state, batch)
        if i == 0:
            jax.block_until_ready(state)
            took["first step"] = time.time() - begun
    loss = float(metrics["loss"])
    jax.block_until_ready(state)
    took["total"], took["processor"] = time.time() - begun, time.process_time()
    return {"took": {**events.seconds, **took}, "programs": events.programs, "loss": loss}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="number of virtual CPU devices")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", choices=("mlp", "conv"), default="mlp")
    parser.add_argument("--side", help="be one of the sides")
    args = parser.parse_args()
    if args.side:
        begun = float(os.environ["BEGUN"])
        side = jdist_side if args.side == "jdist" else by_hand
        print(json.dumps(side(args.model, begun)))
        return
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(args.rounds + 1):
        for side in SIDES[number % 3 :] + SIDES[: number % 3]:
            ran = _run(side, args)
            if number:  # the first round fills the system's file caches
                found[side].append(ran)
    for side, rounds in found.items():
        seconds = zip(*([took for _, took in ran["programs"]] for ran in rounds), strict=True)
        each = zip([name for name, _ in rounds[0]["programs"]], map(statistics.median, seconds), strict=True)
        listed = ", ".join(f"{name} {took:.2f} s" for name, took in each)
        print(f"{side}: {len(rounds[0]['programs'])} compilations: {listed}; loss {rounds[0]['loss']:.6f}")
    for part in PARTS:
        reference = [ran["took"].get(part, 0.0) for ran in found["hand-written"]]
        for side in SIDES:
            measured = [ran["took"].get(part, 0.0) for ran in found[side]]
            if side == "hand-written" or not any(measured):
                continue
            c = compare(measured, [max(x, 1e-6) for x in reference])
            by = f"ratio {c.ratio:.2f} [{c.ratio_low:.2f}, {c.ratio_high:.2f}]" if any(reference) else "jdist's alone"
            print(f"{part:14s} {side:18s} {c.seconds:6.3f} s, {c.difference:+.3f} s, {by}", flush=True)


def _run(side: str, args: argparse.Namespace) -> dict[str, Any]:
    flags = f"--xla_force_host_platform_device_count={args.devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, os.path.abspath(__file__), "--side", side, "--model", args.model]
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            command, env=env | {"BEGUN": repr(time.time())}, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(ran.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
