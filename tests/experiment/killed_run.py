"""Run by `jdist launch`: `jdist run` in which processes get signals, as KILLS in the environment says.

KILLS is a JSON list with an entry for each attempt: null, or [process, place, number]: a SIGKILL at the `number`-th call
of "write_pieces" or "commit" in a save, or the signal of that name once step `number` was started.
"""

import json
import os
import signal
import sys
import threading
import time

from jdist.cli import main
from jdist.cluster import runtime
from jdist.train import checkpoint_disk, checkpoint_save

PLACES = {"write_pieces": checkpoint_save, "commit": checkpoint_disk}


def kill_in(module, name, number):
    function, calls = getattr(module, name), iter(range(1, 10**6))

    def deadly(*args):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    setattr(module, name, deadly)


def signal_at(number, step):
    while (cluster := runtime.started()) is None or cluster._step < step:
        time.sleep(0.001)
    os.kill(os.getpid(), number)


attempt, kills = int(os.environ["JDIST_LAUNCH_ATTEMPT"]), json.loads(os.environ.get("KILLS", "[]"))
task = json.loads(os.environ["TF_CONFIG"])["task"]
kill = kills[attempt] if attempt < len(kills) else None
if kill is not None and (task["type"], task["index"]) == ("worker", kill[0]):
    if kill[1] in PLACES:
        kill_in(PLACES[kill[1]], *kill[1:])
    else:
        threading.Thread(target=signal_at, args=(signal.Signals[kill[1]], kill[2]), daemon=True).start()
sys.exit(main(["run", *sys.argv[1:]]))
