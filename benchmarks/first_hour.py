"""A GPU machine's first hour: everything that could not be tried without one, into one report.

    make gpu                       on the GPUs that are here
    JDIST_PLATFORM=cpu make gpu    the same script on eight virtual CPU devices, in small sizes

In this order: `jdist doctor`, the conformance matrix, `step_overhead`, the memory that `jdist plan` predicts against that of a
real step, and training steps of `text` at a size that fills a GPU, with their share of the chip's bfloat16 peak. A part that
fails is written down with its output, and the others go on. The report is build/first_hour.md; the exit code is 1 if a part
failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "build" / "first_hour.md"
CPU = os.environ.get("JDIST_PLATFORM", "gpu") == "cpu"
TARGET = "cpu:8" if CPU else "gpu"
# About 150 M parameters, and 16 k bytes a step and replica; on CPU just enough to show that the script runs.
SIZES = (
    ("layers=2", "width=64", "heads=4", "length=64") if CPU else ("layers=12", "width=1024", "heads=16", "length=512")
)
ROWS_PER_REPLICA = 2 if CPU else 32
MOST_S = 3600  # a part that takes longer is ended


def parts() -> dict[str, list[str]]:
    python = sys.executable
    return {
        "doctor": [python, "-m", "jdist", "doctor", "--alone"],
        "conformance": [
            # pytest-benchmark refuses to start with pytest-xdist, where they are installed.
            *(python, "-m", "pytest", "-q", "-p", "no:benchmark", "tests/conformance/test_conformance.py", "-n", "0"),
            *(("-k", "mirrored_shard_map and plain_pytree") if CPU else ()),
        ],
        "step_overhead": [python, "benchmarks/step_overhead.py", "--here", "--rounds", "3" if CPU else "40"],
        "plan against a real step": [python, "-m", "jdist", "plan", "configs/digits.yaml", "--topology", TARGET],
        "text": [python, __file__, "--text"],
    }


def environment(name: str) -> dict[str, str]:
    environ = dict(os.environ)
    if CPU:
        flags = f"{environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
        return environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if name == "conformance":  # its tolerances are those of float32, which GPUs multiply in TF32 unless told not to
        environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    return environ | {"JAX_PLATFORMS": "cuda,cpu"}


def main() -> int:
    REPORT.parent.mkdir(exist_ok=True)
    failed = []
    with REPORT.open("w", encoding="utf-8") as report:
        report.write(
            f"# A first hour on {'virtual CPU devices' if CPU else 'GPUs'}, {time.strftime('%Y-%m-%d %H:%M')}\n"
        )
        for name, command in parts().items():
            print(f"{name} ...", flush=True)
            start = time.monotonic()
            try:
                ran = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environment(name),
                    capture_output=True,
                    text=True,
                    timeout=MOST_S,
                    check=False,
                )
                code, output = str(ran.returncode), ran.stdout + ran.stderr
            except subprocess.TimeoutExpired as exc:
                code, output = f"none within {MOST_S} s", str(exc.stdout or "")
            if code != "0":
                failed.append(name)
            shown = " ".join(command).replace(sys.executable, "python")
            head = f"{name}: exit code {code}, {time.monotonic() - start:.0f} s"
            report.write(f"\n## {head}\n\n`{shown}`\n\n```text\n{output[-6000:]}\n```\n")
            report.flush()
    print(f"{REPORT.relative_to(ROOT)}: " + (f"failed: {', '.join(failed)}" if failed else "all parts ran"))
    return int(bool(failed))


def text() -> None:
    """Trains some steps, and prints their rate and their share of the peak."""
    sys.path.insert(0, str(ROOT))
    import jax
    import optax

    import jdist
    from examples.tasks import text as text_task

    replicas = jax.local_device_count()
    overrides = [
        *(f"task.options.{option}" for option in SIZES),
        *("task.options.dtype=bfloat16", "task.options.files=jdist/**/*.py", "task.options.eval_bytes=1000"),
        f"train.global_batch={ROWS_PER_REPLICA * replicas}",
    ]
    plan = jdist.plan.plan_config(ROOT / "configs" / "text.yaml", *overrides, topology=TARGET)
    print(jdist.plan.show(plan))

    options = {name: int(value) for name, _, value in (option.partition("=") for option in SIZES)}
    task = text_task.make(**options, dtype="bfloat16", files="jdist/**/*.py", eval_bytes=1000)
    strategy = jdist.mirrored()
    step = jdist.distribute(task.train_step, strategy)
    state = strategy.init(lambda key: task.create_state(key, optax.adamw(1e-3)), jax.random.key(0))
    batches = iter(strategy.distribute_dataset(task.train_data(ROWS_PER_REPLICA * replicas, 0, None)))
    warm, timed = 3, 5 if CPU else 30
    for _ in range(warm):
        state, metrics = step(state, next(batches))
    jax.block_until_ready(metrics)
    start = time.perf_counter()
    for _ in range(timed):
        state, metrics = step(state, next(batches))
    jax.block_until_ready((state, metrics))
    seconds = (time.perf_counter() - start) / timed
    kind, loss = jax.local_devices()[0].device_kind, float(metrics["loss"])
    print(f"\n{replicas} x {kind}: {seconds * 1e3:.1f} ms a step, loss {loss:.3f}")
    if plan.chip is None:
        print(f"{plan.flops / seconds / 1e9:.1f} GFLOP/s a device; {plan.device_kind!r} has no published peak")
    else:
        share = plan.flops / seconds / plan.chip.flops_per_s
        print(f"{plan.flops / seconds / 1e12:.1f} TFLOP/s a device, {share:.1%} of its bfloat16 peak")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", action="store_true", help="only the training steps, in this process")
    if parser.parse_args().text:
        text()
    else:
        sys.exit(main())
