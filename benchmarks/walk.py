"""Which files of jdist one call of a step runs through, and which functions of them.

    python benchmarks/walk.py [--functions] [--write]

`--write` puts the files into the pages of docs/design/ that show a walk.

It records two calls of a step under `mirrored`: the first, which traces the step, and the second; one batch of a distributed
dataset after the first batch; a config to its run; and one step under `parameter_server` after the first, in the program, a
worker and a server. It counts the Python functions of jdist/ that any thread calls meanwhile. Code that only defines
something (an import, the body of a class) does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = f"{ROOT / 'jdist'}{os.sep}"
FOLDER = "JDIST_WALK_FOLDER"  # where a server process is told to record, and writes what it has recorded
FUNCTION = 0x1 | 0x2  # the flags of a function's code; neither a module's nor a class's body has them all
Walk = dict[str, list[str]]  # of each file below jdist/ its functions, both in the order in which they were called


class Recorder:
    """The functions of jdist that this process calls, in threads that start after it was made, while it records."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], None] = {}
        self._recording = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._recording and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE) and code.co_flags & FUNCTION == FUNCTION:
                self._functions[code.co_filename.removeprefix(PACKAGE), code.co_qualname] = None

    def start(self) -> None:
        self._functions = {}
        self._recording = True

    def stop(self) -> Walk:
        self._recording = False
        files: Walk = {}
        for file, function in list(self._functions):
            named = files.setdefault(file, [])
            function = function.partition(".<locals>")[0]  # of one that is defined inside another, the other
            if function not in named and function[0] != "<":
                named.append(function)
        return files


def serve(arguments: list[str]) -> None:
    """`jdist serve`, which records while there is a file `record` in its folder, and then writes its walk there."""
    recorder, folder = Recorder(), Path(os.environ[FOLDER])
    wanted, done = folder / "record", folder / f"{os.getpid()}.json"

    def follow() -> None:
        while True:
            while not wanted.exists():
                time.sleep(0.01)
            recorder.start()
            while wanted.exists():
                time.sleep(0.01)
            partial = done.with_suffix(".part")
            partial.write_text(json.dumps(recorder.stop()))
            partial.rename(done)

    threading.Thread(target=follow, daemon=True).start()
    sys.argv = ["jdist", "serve", *arguments]
    runpy.run_module("jdist", run_name="__main__")


def mirrored(recorder: Recorder) -> dict[str, Walk]:
    """The first call of a step under `mirrored` and the one after it."""
    import jax

    import jdist

    strategy = jdist.mirrored()
    step, create, batches = _step(strategy)
    state = strategy.init(create, jax.random.key(0))
    walks = {}
    for name, batch in zip(("mirrored, first call", "mirrored, second call"), batches, strict=False):
        recorder.start()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        walks[name] = recorder.stop()
    return walks


def batch(recorder: Recorder) -> dict[str, Walk]:
    """The second batch of a distributed dataset, from the arrays to the devices."""
    import jdist

    batches = iter(jdist.mirrored().distribute_dataset(_data(), prefetch=0))
    next(batches)
    recorder.start()
    next(batches)
    return {"a batch": recorder.stop()}


def config(recorder: Recorder) -> dict[str, Walk]:
    """A config from the command line to the first step of its run, in jdist/experiment/ alone."""
    from jdist.cli.main import main
    from jdist.loop.run import Run

    class Reached(Exception):
        pass

    with (
        tempfile.TemporaryDirectory() as folder,
        unittest.mock.patch.object(Run, "train", side_effect=Reached),
        contextlib.suppress(Reached),
        contextlib.redirect_stdout(None),
    ):
        recorder.start()
        main(["run", str(ROOT / "configs" / "digits.yaml"), f"log.folder={folder}"])
    walk = recorder.stop()
    return {"a config to its run": {file: names for file, names in walk.items() if file.startswith("experiment/")}}


def parameter_server(recorder: Recorder) -> dict[str, Walk]:
    """One step under `parameter_server`, in each of the three processes."""
    import jax

    import jdist

    with tempfile.TemporaryDirectory() as folder, _servers(Path(folder)) as (jobs, processes):
        spec = jdist.cluster.ClusterSpec(jobs=jobs, task_type="chief", task_index=0, resolver="benchmarks/walk.py")
        strategy = jdist.parameter_server(spec)
        step, create, batches = _step(strategy)
        state = strategy.init(create, jax.random.key(0))
        for batch in batches:
            state, _ = step(state, batch)
        strategy.coordinator.join()
        time.sleep(1.0)
        (Path(folder) / "record").touch()
        time.sleep(0.1)
        recorder.start()
        step(state, batch)
        strategy.coordinator.join()
        walks = {"parameter_server, program": recorder.stop()}
        (Path(folder) / "record").unlink()
        for role, process in processes.items():
            done = Path(folder) / f"{process.pid}.json"
            while not done.exists():
                time.sleep(0.01)
            walks[f"parameter_server, {role}"] = json.loads(done.read_text())
        strategy.coordinator.close()
    return walks


def _step(strategy: Any) -> tuple[Any, Any, Any]:
    import jax
    import optax

    import jdist

    @jdist.distribute(strategy)
    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return jdist.mean((batch["x"] @ params["w"] - 1.0) ** 2, batch["mask"])

        loss, grads = jdist.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def create(key: jax.Array) -> Any:
        return jdist.TrainState.create(apply_fn=None, params={"w": jax.random.normal(key, (8,))}, tx=optax.adam(1e-3))

    return step, create, list(strategy.distribute_dataset(_data()))


def _data() -> Any:
    import numpy as np

    import jdist

    return jdist.data.from_arrays({"x": np.ones((32, 8), np.float32)}, global_batch=8, epochs=1)


@contextlib.contextmanager
def _servers(folder: Path) -> Iterator[tuple[dict[str, list[str]], dict[str, subprocess.Popen[str]]]]:
    from jdist.launcher.environment import free_ports

    chief, worker, ps = (f"127.0.0.1:{port}" for port in free_ports(3))
    processes = {}
    try:
        for role, address in (("worker", worker), ("ps", ps)):
            processes[role] = subprocess.Popen(
                [sys.executable, __file__, "serve", "--role", role, "--address", address],
                env=os.environ | {FOLDER: str(folder)},
                stdout=subprocess.PIPE,
                text=True,
            )
        yield {"chief": [chief], "worker": [worker], "ps": [ps]}, processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def lines(files: Walk, *, functions: bool) -> list[str]:
    """A line for each file, with its functions or without, of 140 characters at most."""
    return [
        line
        for file, named in files.items()
        for line in textwrap.wrap(
            f"{file}: {', '.join(named)}" if functions else file, 140, subsequent_indent="    ", break_on_hyphens=False
        )
    ]


def write(name: str, files: Walk) -> None:
    """Replaces the block under the comment of that name, in the page that has it."""
    for page in sorted((ROOT / "docs" / "design").glob("*.md")):
        text = page.read_text()
        head, comment, after = text.partition(f"<!-- walk: {name} -->\n")
        if comment:
            _, _, rest = after.partition("```text\n")[2].partition("```\n")
            body = textwrap.fill(", ".join(files), 120, break_on_hyphens=False)
            page.write_text(f"{head}{comment}{len(files)} files:\n\n```text\n{body}\n```\n{rest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="name the functions of each file as well")
    parser.add_argument("--write", action="store_true", help="put the files into docs/design/")
    arguments = parser.parse_args()
    recorder = Recorder()
    ps = parameter_server(recorder)
    for name, files in (mirrored(recorder) | batch(recorder) | config(recorder) | ps).items():
        print(f"{name}: {len(files)} files")
        print(textwrap.indent("\n".join(lines(files, functions=arguments.functions)), "  "))
        if arguments.write:
            write(name, files)
    print(f"parameter_server, all three: {len({file for walk in ps.values() for file in walk})} files")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["PYTHONPATH"] = str(ROOT)
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2:])
    else:
        os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
        main()
