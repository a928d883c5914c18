"""jdist's all-reduce between processes against tf.distribute.MultiWorkerMirroredStrategy's: two groups that take turns.

python benchmarks/peers/multi_worker.py --tensorflow-python .venv-tf/bin/python [--processes 2] [--rounds 15]

Both sum a float32 vector over as many processes on loopback, one CPU device each; tf.distribute by its ring, the only
implementation it has on CPU. Target: jdist's bandwidth at least 1.3 times tf.distribute's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
CALLS = {1: 20, 16: 4, 128: 1}  # MiB of a vector: calls in a round


class Group:
    """The processes of one side, which all-reduce on request."""

    def __init__(self, python: str, script: str, processes: int):
        from jdist.launcher.environment import free_ports

        addresses = [f"127.0.0.1:{port}" for port in free_ports(processes)]
        self.members = []
        for index in range(processes):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            env = os.environ | {"TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
            command = [python, str(HERE / script)]
            self.members.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            )
        self.versions = self._answers()[0]

    def _answers(self) -> list[dict]:
        answers = []
        for member in self.members:
            assert member.stdout is not None
            line = next((line for line in member.stdout if line.startswith("{")), None)
            if line is None:
                raise SystemExit(f"{member.args} ended with exit code {member.wait()}")
            answers.append(json.loads(line))
        return answers

    def run(self, megabytes: int, calls: int) -> float:
        for member in self.members:
            assert member.stdin is not None
            member.stdin.write(f"{megabytes} {calls}\n")
            member.stdin.flush()
        return max(answer["seconds"] for answer in self._answers())

    def close(self) -> None:
        for member in self.members:
            assert member.stdin is not None
            member.stdin.close()
        for member in self.members:
            member.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow-python", required=True, help="Python of an environment with tensorflow-cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    from pairs import compare

    ours = Group(sys.executable, "jdist_all_reduce.py", args.processes)
    theirs = Group(args.tensorflow_python, "tf_all_reduce.py", args.processes)
    print(f"{platform.machine()}, {args.processes} processes, {ours.versions | theirs.versions}", flush=True)
    for megabytes, calls in CALLS.items():
        times: dict[str, list[float]] = {"jdist": [], "tf.distribute": [], "jdist again": []}
        for group in (ours, theirs):
            group.run(megabytes, calls)  # compiles
        for _ in range(args.rounds):
            times["jdist"].append(ours.run(megabytes, calls))
            times["tf.distribute"].append(theirs.run(megabytes, calls))
            times["jdist again"].append(ours.run(megabytes, calls))
        for name, base in (("tf.distribute", "jdist"), ("jdist again", "jdist")):
            c = compare(times[name], times[base])
            print(
                f"{megabytes:3d} MiB: time of {name} / {base}: {c.ratio:.2f} [{c.ratio_low:.2f}, {c.ratio_high:.2f}], "
                f"{name} {megabytes * 2**20 * calls / c.seconds / 1e6:,.0f} MB/s",
                flush=True,
            )
    ours.close()
    theirs.close()


if __name__ == "__main__":
    main()
