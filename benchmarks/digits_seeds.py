"""Claim: `configs/digits.yaml` reaches a mean test accuracy of at least 98 % over five seeds.

Each seed is a run of its own by `jdist run`, in a folder that is removed afterwards. Prints the accuracy and the
time of each, then the mean; exits with 1 if the mean is below the claim.

    python benchmarks/digits_seeds.py
    python benchmarks/digits_seeds.py --seeds 10 platform.cpu_devices=8
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CLAIM = 0.98
TIMEOUT_S = 600


def main() -> int:
    """Run the seeds.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "digits.yaml")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, ... to run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="handed on to `jdist run`")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error("--seeds must be 1 or more")
    accuracies = []
    for seed in range(options.seeds):
        started = time.perf_counter()
        accuracies.append(run(options.config, seed=seed, overrides=options.overrides))
        wall_s = time.perf_counter() - started
        print(f"seed {seed}  test accuracy {accuracies[-1]:.2%}  {wall_s:.0f} s", flush=True)
    mean, spread = np.mean(accuracies), np.std(accuracies)
    print(f"mean of {options.seeds}  {mean:.2%} (standard deviation {spread:.2%}), claimed: {CLAIM:.0%}")
    return 0 if mean >= CLAIM else 1


def run(config: Path, *, seed: int, overrides: list[str]) -> float:
    """The test accuracy at the end of one run.

    Args:
        config: the experiment.
        seed: its seed.
        overrides: further `KEY=VALUE` for `jdist run`.

    Returns:
        The accuracy in the last line of its metrics.jsonl.
    """
    with tempfile.TemporaryDirectory(prefix="jdist-digits-") as folder:
        settings = ["name=digits", f"train.seed={seed}", f"log.folder={folder}", "checkpoint.every=null"]
        command = [sys.executable, "-m", "jdist", "run", str(config), *overrides, *settings]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr}")
        rows = [json.loads(line) for line in Path(folder, "digits", "metrics.jsonl").read_text().splitlines()]
    return float([row["eval/accuracy"] for row in rows if "eval/accuracy" in row][-1])


if __name__ == "__main__":
    sys.exit(main())
