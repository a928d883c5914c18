"""jdist's parameter server against tf.distribute.ParameterServerStrategy with its ClusterCoordinator: two jobs that take turns.

python benchmarks/peers/parameter_server.py --tensorflow-python .venv-tf/bin/python [--ps 1 2] [--rounds 15]

Both schedule training steps (pull, gradients, push, SGD on the server) on two workers, all processes on loopback: a step of 8
parameters, for steps per second, and one of 25 million in float32, for bytes per second. Targets: twice the steps of
tf.distribute, and its bytes; with bfloat16 on the wire twice its bytes (counted as if they were float32). Beside it what raw
TCP gives two clients of one server, in the same turns. 0 parameters are closures that return their argument, for closures
per second.

"jdist, TLS" is jdist with mutual TLS. tf.distribute's gRPC servers have no TLS of their own, so its side is always plain.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import sys

from mirrored import Side, in_turns

CASES = {0: 1000, 8: 200, 25_000_000: 6}  # parameters: steps in a round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow-python", required=True, help="Python of an environment with tensorflow-cpu")
    parser.add_argument("--ps", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parameters", type=int, nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    from pairs import compare

    for num_ps in args.ps:
        for parameters in args.parameters:
            if not parameters and num_ps != args.ps[0]:
                continue  # they have no part in the servers
            steps, size_bytes = CASES[parameters], 8 * parameters
            commands = {
                "jdist": (sys.executable, "jdist_parameter_server.py", num_ps, parameters),
                "tf.distribute": (args.tensorflow_python, "tf_parameter_server.py", num_ps, parameters),
            }
            if parameters:
                commands["jdist, TLS"] = (*commands["jdist"], "tls=1")
            if parameters > 1000:
                commands["jdist, bf16"] = (*commands["jdist"], "wire=bf16")
                commands["raw TCP"] = (sys.executable, "loopback.py", size_bytes // 2_000_000)
            with contextlib.ExitStack() as ends:
                sides = {name: ends.enter_context(contextlib.closing(Side(*c))) for name, c in commands.items()}
                if (num_ps, parameters) == (args.ps[0], args.parameters[0]):
                    versions = sides["jdist"].versions | sides["tf.distribute"].versions
                    print(f"{platform.machine()}, 2 workers, {versions}", flush=True)
                times = in_turns({**sides, "jdist again": sides["jdist"]}, steps, args.rounds)
            pairs = [(name, "jdist") for name in times]
            pairs += [("tf.distribute", name) for name in ("jdist, TLS", "jdist, bf16") if name in times]
            for name, base in pairs:
                c = compare(times[name], times[base])
                rate = f"{steps / c.seconds:,.0f} {'steps' if parameters else 'closures'}/s"
                if parameters > 1000:
                    rate = f"{size_bytes * steps / c.seconds / 1e6:,.0f} MB/s"
                ratio = f"time of {name} / {base}: {c.ratio:.2f} [{c.ratio_low:.2f}, {c.ratio_high:.2f}], "
                print(
                    f"{num_ps} ps, {parameters:,} parameters: {ratio if name != base else f'{name} '}{rate}", flush=True
                )


if __name__ == "__main__":
    main()
