"""How long a job of several processes stands still when one of its processes dies or stalls.

    python benchmarks/restart.py [--processes 2] [--rounds 3] [--layers 0]

Each round launches a small training run on loopback, which saves every 10 steps. After step 35 one process kills (SIGKILL) or
stops (SIGSTOP) itself; the launcher starts the job again, and it goes on from step 30. Printed are the seconds from the
signal to the end of the first step after it: the medians and the extremes of the rounds; and how long the first call of the
step took, which compiles, and that of the restarted job. With `--layers` the step has as many unrolled layers more, which take
long to compile: the restarted job reads them from the compiled programs that `jdist.launch` keeps.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

STEPS, AT = 60, 35


def train(folder: Path, who: int, signal_name: str, layers: int) -> None:
    """The part of every process."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jdist
    from jdist.train import Checkpointer

    strategy = jdist.multi_worker()
    again = (folder / "signalled").exists()
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    dataset = strategy.distribute_dataset(
        jdist.data.from_arrays({"x": x, "y": 3 * x + 1}, global_batch=16, epochs=STEPS // 4)
    )

    @jdist.distribute(strategy)
    def train_step(state, batch):
        def loss_fn(p):
            x = y = p["w"] * batch["x"] + p["b"]
            for i in range(layers):
                y = jnp.sin(jnp.outer(y, y) @ y + i)
            return jdist.mean((x + 0.0 * y - batch["y"]) ** 2, batch["mask"])

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    params = {"w": jnp.float32(0), "b": jnp.float32(0)}
    state = strategy.init(lambda: jdist.TrainState.create(params=params, tx=optax.sgd(0.3)))
    with Checkpointer(folder / "run", check=strategy.check, cluster=strategy.cluster) as checkpoints:
        if (saved := checkpoints.restore(state)) is not None:
            state = saved.state
            dataset.restore(saved.data)
        for step, batch in enumerate(dataset, start=int(state.step) + 1):
            begun = time.time()
            state, metrics = train_step(state, batch)
            loss = float(metrics["loss"])
            if step == 1:
                (folder / "compiled_s").write_text(str(time.time() - begun))
            assert np.isfinite(loss)
            if again and not (folder / "resumed").exists() and strategy.cluster.is_chief:
                (folder / "resumed").write_text(f"{step} {time.time()} {time.time() - begun}")
            if step == AT and not again and strategy.cluster.process_index == who:
                (folder / "signalled").write_text(str(time.time()))
                os.kill(os.getpid(), signal.Signals[signal_name])
            if step % 10 == 0:
                checkpoints.save(step, state, data=dataset.state(), wait=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--signals", nargs="+", default=["SIGKILL", "SIGSTOP"])
    parser.add_argument("--worker", nargs=3, metavar=("FOLDER", "PROCESS", "SIGNAL"), help="be one of the processes")
    args = parser.parse_args()
    if args.worker:
        folder, who, signal_name = args.worker
        return train(Path(folder), int(who), signal_name, args.layers)
    import jdist

    for signal_name in args.signals:
        for who in (0, args.processes - 1):
            took, compiled, again = [], [], []
            for _ in range(args.rounds):
                with tempfile.TemporaryDirectory() as name:
                    folder = Path(name)
                    command = [
                        str(Path(__file__).absolute()),
                        f"--layers={args.layers}",
                        "--worker",
                        name,
                        str(who),
                        signal_name,
                    ]
                    launched = jdist.launch(
                        [sys.executable, *command],
                        processes=args.processes,
                        devices_per_process=1,
                        max_restarts=1,
                        log_dir=folder / "logs",
                    )
                    if launched.exit_code != 0:
                        sys.exit(f"the job left with {launched.exit_code}")
                    step, resumed, call_s = (folder / "resumed").read_text().split()
                    assert int(step) == AT - AT % 10 + 1, step
                    compiled.append(float((folder / "compiled_s").read_text()))
                    again.append(float(call_s))
                    took.append(float(resumed) - float((folder / "signalled").read_text()))
            print(
                f"{signal_name} of process {who} of {args.processes}: {statistics.median(took):.1f} s from the signal to the "
                f"end of the next step, [{min(took):.1f}, {max(took):.1f}] in {args.rounds} rounds; the first call took "
                f"{statistics.median(compiled):.1f} s, that of the restarted job {statistics.median(again):.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
