"""`jdist.notebook_launch`: calls a notebook's function in several processes."""

from __future__ import annotations

import builtins
import importlib
import linecache
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from jdist.cluster import exit_status, tf_config
from jdist.errors import LaunchError, ProcessFailedError
from jdist.launcher.events import Settings
from jdist.launcher.launch import check_cpu_devices, make_log_dir
from jdist.launcher.loop import Launched, Launcher
from jdist.launcher.notebook import pickled
from jdist.strategies import absent_plugins
from jdist.support import checks

# What each process runs, with the file of a call. The notebook's path comes first: jdist may be on it.
_PROGRAM = """\
import pickle, sys
file = open(sys.argv[1], "rb")
sys.path[:] = pickle.load(file)
from jdist.launcher.notebook import launch
launch.run(file)
"""


def notebook_launch(
    fn: Callable[..., Any] | str,
    args: Sequence[Any] = (),
    *,
    processes: int = 2,
    devices_per_process: int | None = None,
    timeout_s: float | None = None,
    grace_s: float = 10.0,
    log_dir: str | os.PathLike[str] | None = None,
) -> Any:
    """Calls a function in several processes of this machine, from a notebook, a script or a shell; none is left afterwards.

    Each process is a fresh Python, whatever this one has done with JAX. It gets `fn` and what `fn` uses of the notebook, in
    its present state: functions, classes, imports and values, by cloudpickle in a file that only this user can read. What runs
    on devices (strategies, arrays of JAX) must be made inside `fn`, or passed in `args`; anything that cannot go to
    another process is refused by name. `jdist.multi_worker()` in `fn` finds the processes.

    Their output is shown line by line, with the index of its process. Interrupting the cell (Ctrl-C) asks them to end, and
    kills those that have not after `grace_s`; the notebook goes on, and `fn` may catch the KeyboardInterrupt and return a
    result. (Python takes interrupts in its main thread, where cells run.)

    One process of each host drives all chips of a TPU: use it by `jdist.tpu()` in the notebook itself; several processes are
    refused there, except with virtual CPU devices. GPUs are for one process, too, unless `fn` itself takes one by its index.

    Args:
        fn: a function, or its name "package.module:function".
        args: its arguments; arrays of JAX arrive as NumPy's.
        processes: how many.
        devices_per_process: number of virtual CPU devices of each; None: the devices that JAX finds.
        timeout_s: seconds until all are asked to end; None: no limit.
        grace_s: seconds that the others get to end after one has failed, and all after an interrupt or the timeout.
        log_dir: folder for each process's output; None: runs/launch-TIME.

    Returns:
        The result of `fn` in process 0, with NumPy arrays in place of JAX's; None if it left by `sys.exit(0)`.

    Raises:
        LaunchError: `fn`, a value that it uses, or an option is not allowed; tells what to write instead.
        ProcessFailedError: `fn` failed in a process, with its traceback; or the time was over.
        KeyboardInterrupt: the cell was interrupted.

    Example:
        >>> import jdist
        >>> jdist.notebook_launch("platform:python_implementation", processes=1)
        'CPython'
    """
    processes = checks.whole_number("processes", processes, LaunchError)
    if not isinstance(args, list | tuple):
        raise LaunchError(f"`args` is {pickled.kind(args)}; give a tuple with one entry for each argument: args=(x,).")
    if timeout_s is not None:
        timeout_s = checks.seconds("timeout_s", timeout_s, LaunchError)
    check_cpu_devices(devices_per_process, os.environ)
    if devices_per_process is None:
        _check_tpu(
            processes,
            os.environ.get("JAX_PLATFORMS", ""),
            has_tpu=absent_plugins.has_tpu() and absent_plugins.has_libtpu(),
        )
    name = _name_of(fn)
    call = _dumps(fn, args, name)
    which = f"{processes} process{'es' if processes > 1 else ''}"
    with tempfile.TemporaryDirectory(prefix="jdist-") as folder:  # for this user alone
        file = Path(folder, "call")
        file.write_bytes(call)
        launcher = Launcher(
            Settings(smallest=processes, largest=processes, grace_s=grace_s, stop_timeout_s=grace_s),
            [sys.executable, "-P", "-c", _PROGRAM, str(file)],
            log_dir=make_log_dir(log_dir),
            devices_per_process=devices_per_process,
            timeout_s=timeout_s,
            explains=False,
        )
        launched = launcher.run(f"{which} of {name}")
        if launched.exit_code == exit_status.FINISHED:
            return _read_result(file)
    raise _error(launched, which, timeout_s)


def _name_of(fn: Callable[..., Any] | str) -> str:
    if isinstance(fn, str):
        module, _, name = fn.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), name)):
            raise LaunchError(f"`fn` is {fn!r}; a name is 'package.module:function'.")
        return name
    if not callable(fn):
        raise LaunchError(f"`fn` is {pickled.kind(fn)}; pass a function, and its arguments as `args`.")
    return getattr(fn, "__name__", type(fn).__name__)


def _check_tpu(processes: int, platforms: str, *, has_tpu: bool) -> None:
    """Refuses, by a LaunchError, processes that would wait for each other's TPU; `platforms` is JAX_PLATFORMS."""
    if not has_tpu or (platforms and "tpu" not in platforms.split(",")):
        return
    here = "Call the function in this notebook, with `jdist.tpu()`, which uses all chips"
    cpu = "or give devices_per_process=4 to try several processes on virtual CPU devices"
    if processes > 1:
        raise LaunchError(
            f"processes={processes}: this machine has a TPU, and one process must drive all its chips. {here}; {cpu}."
        )
    if _holds_tpu():
        raise LaunchError(
            f"this notebook has started the TPU, and no other process can use it meanwhile. {here}; {cpu}."
        )


def _holds_tpu() -> bool:
    if "jax" not in sys.modules:
        return False
    import jax

    from jdist.cluster.jax_processes import is_started

    return is_started() and jax.default_backend() == "tpu"


def _error(launched: Launched, which: str, timeout_s: float | None) -> BaseException:
    if launched.timed_out:
        return ProcessFailedError(f"{which} had not ended after timeout_s={timeout_s:g}; logs: {launched.log_dir}")
    if launched.stop == signal.SIGINT:
        return KeyboardInterrupt()
    if launched.stop is not None:  # it was for this process
        signal.raise_signal(launched.stop)
    failed = launched.failure.removeprefix("attempt 0 failed: ")  # there is but one
    return ProcessFailedError(failed or f"{which}: stopped by {launched.stop}; logs: {launched.log_dir}")


# ---- the call, in its file and in each process


def _dumps(fn: Any, args: Sequence[Any], name: str) -> bytes:
    """Pickles a call of `fn`, called `name` in errors, for the file of `_PROGRAM`."""
    pickler, data = pickled.dumps(fn, args, name)
    paths = [os.path.abspath(entry) for entry in sys.path]
    return pickle.dumps(paths) + pickle.dumps((pickler.modules, pickler.lines, len(args))) + data


def run(file: IO[bytes]) -> None:
    """Calls the function of a file; process 0 writes its result next to that."""
    sys.excepthook = lambda kind, exc, trace: traceback.print_exception(exc)  # knows the lines of cells
    with file:  # in a folder that is this user's alone, so unpickling it runs nobody else's code
        modules, lines, count = pickle.load(file)  # noqa: S301
        for name in modules:
            importlib.import_module(name)
        if "IPython.display" in modules:
            builtins.display = sys.modules["IPython.display"].display  # type: ignore[attr-defined]  # as in IPython
        linecache.cache |= {name: (0, None, text, name) for name, text in lines.items()}
        unpickler = pickle.Unpickler(file)  # noqa: S301
        anchor, fn, *args = [unpickler.load() for _ in range(2 + count)]
    # For pickles that name a class of the notebook. Without its file, which `multiprocessing` would run again.
    own = {name: value for name, value in anchor.__globals__.items() if name not in ("__file__", "__package__")}
    vars(sys.modules["__main__"]).update(own)
    if isinstance(fn, str):
        module, _, name = fn.partition(":")
        fn = getattr(importlib.import_module(module), name)
    try:
        value = fn(*args)
    except KeyboardInterrupt:  # the notebook's, which reports it itself
        exit_status.failed(exit_status.INTERRUPTED)
        sys.exit(exit_status.INTERRUPTED)
    except EOFError as exc:
        exc.add_note("Was this `input`? This process has no keyboard: ask in the notebook, pass the answer by `args`.")
        raise
    spec = tf_config(os.environ)
    if spec is None or spec.process_index == 0:
        _write_result(Path(file.name).with_name("result"), value, getattr(fn, "__name__", "fn"))


def _read_result(file: Path) -> Any:
    """Reads the result of process 0; None if it has written none."""
    result = file.with_name("result")
    return pickle.loads(result.read_bytes()) if result.exists() else None  # noqa: S301


def _write_result(file: Path, value: Any, name: str) -> None:
    try:
        with file.open("wb") as opened:
            pickled.Pickler(opened, jax_arrays=True, to_notebook=True).dump(value)
    except Exception as exc:  # noqa: BLE001 # any type's own method may raise anything
        _, path, part, error = pickled.find_culprit(value, "", exc, jax_arrays=True, to_notebook=True)
        raise LaunchError(
            f"`{name}` returned {f'at {path} ' * bool(path)}{pickled.kind(part)}, which cannot be handed back to the notebook "
            f"({error}). Return values that can be pickled, and JAX arrays that are whole in this process; for a train "
            "state `strategy.fetch(state).params`."
        ) from None
