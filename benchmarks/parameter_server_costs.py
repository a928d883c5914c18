"""What a parameter server's staging, copies and TLS cost: the same steps with and without each, in turns.

    python benchmarks/parameter_server_costs.py [--parameters 8 25000000] [--rounds 15]

The training steps of peers/parameter_server.py (pull, gradients, push, SGD on the server) on two workers, all processes on
loopback: one of 8 parameters, for steps per second, and one of 25 million in float32, for bytes per second.

2 ps / 1 ps: the state cut over two servers, so that each push is staged on both and then committed, against all of it on one.
2 ps, 2 copies / 2 ps: the cost of `ps_replicas=2`, where each server also keeps a backup of the other's part.
TLS / 1 ps: mutual TLS, against none; a token on both sides.
1 ps again / 1 ps: the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "peers"))
from mirrored import Side, in_turns
from pairs import compare

STEPS = {8: 200, 25_000_000: 6}  # parameters: steps in a round
SIDES = {"1 ps": (1,), "2 ps": (2,), "2 ps, 2 copies": (2, "ps_replicas=2"), "TLS": (1, "tls=1")}
PAIRS = [("2 ps", "1 ps"), ("2 ps, 2 copies", "2 ps"), ("TLS", "1 ps"), ("1 ps again", "1 ps")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    for parameters in args.parameters:
        steps = STEPS[parameters]
        with contextlib.ExitStack() as ends:
            sides = {}
            for name, (num_ps, *options) in SIDES.items():
                side = Side(sys.executable, "jdist_parameter_server.py", num_ps, parameters, *options)
                sides[name] = ends.enter_context(contextlib.closing(side))
            if parameters == args.parameters[0]:
                print(f"{platform.machine()}, 2 workers, {sides['1 ps'].versions}", flush=True)
            times = in_turns({**sides, "1 ps again": sides["1 ps"]}, steps, args.rounds)
        for name, base in [("1 ps", "1 ps"), *PAIRS]:
            c = compare(times[name], times[base])
            rate = f"{steps / c.seconds:,.0f} steps/s"
            if parameters > 1000:
                rate = f"{8 * parameters * steps / c.seconds / 1e6:,.0f} MB/s"
            said = f"time of {name} / {base}: {c.ratio:.2f} [{c.ratio_low:.2f}, {c.ratio_high:.2f}],"
            print(f"{parameters:,} parameters: {said if name != base else name} {rate}", flush=True)


if __name__ == "__main__":
    main()
