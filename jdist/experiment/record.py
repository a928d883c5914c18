"""The run folder, and what it takes to repeat its run bit for bit: environment.json, source/ and result.json.

It is held by one process at a time, and written so that no kill leaves half a file.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from jdist.errors import ConfigError
from jdist.experiment.load import differences
from jdist.experiment.platform import variables
from jdist.loop.report.files import first_free, write_atomically, writing
from jdist.support.file_lock import hold
from jdist.support.signature import dotted
from jdist.support.versions import installed
from jdist.support.xla import COMPILED

if TYPE_CHECKING:
    from jdist.core.strategy import Strategy

T = TypeVar("T")
# What lies in such folders is installed, wherever they are: in a home directory, or in a virtual environment
# next to the task.
_PACKAGES = {"site-packages", "dist-packages"}
_JDIST, _PYTHON = Path(__file__).parents[1], Path(os.__file__).parent


class RunFolder:
    """The paths of one run, below `runs/NAME`."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"  # every value with its origin; itself a config that can be run
        self.metrics = path / "metrics.jsonl"  # one JSON object a line
        self.checkpoints = path / "checkpoints"
        self.curves = path / "curves.png"  # metrics over steps
        self.evaluations = path / "eval.jsonl"  # measured by an evaluator during the run
        self.environment = path / "environment.json"  # each start that trained: its config and where it ran
        self.result = path / "result.json"  # checksums of the last state, once the run has ended
        self.times = path / "times.jsonl"  # what the time of each start went to
        self.source = path / "source"  # copies of the task's own files
        self.compiled = path / COMPILED  # what XLA has compiled, by JAX's cache
        self.lock = path / ".lock"  # held by the process that writes the run, as long as it lives

    def has_checkpoints(self) -> bool:
        """Returns whether a run got as far as a first checkpoint; hidden and temporary entries do not count."""
        return self.checkpoints.is_dir() and any(not p.name.startswith(".") for p in self.checkpoints.iterdir())

    def has_rows(self) -> bool:
        """Returns whether a run got as far as a first row of metrics."""
        return self.metrics.is_file() and self.metrics.stat().st_size > 0


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[RunFolder]:
    """Makes the run folder if necessary, and holds it for this process until the block ends."""
    folder = RunFolder(path)
    with contextlib.ExitStack() as stack:
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(hold(folder.lock))
            except BlockingIOError:
                raise ConfigError(
                    f"{path}: another process is writing this run. Wait for it or stop it, or give this run another name; "
                    "if it is another process of the same job, say strategy.name=multi_worker."
                ) from None
        _check_no_strangers(path)
        yield folder


def check_can_be_made(path: Path) -> None:
    """Refuses folders that `open_folder` would refuse, and leaves nothing behind."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    with writing(path):
        if existing == path.absolute():
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            _check_no_strangers(path)
            return
        try:
            tempfile.TemporaryDirectory(dir=existing).cleanup()
        except OSError as exc:
            raise OSError(exc.errno, exc.strerror, str(path)) from exc  # names the run folder, not the temporary one


def _check_no_strangers(path: Path) -> None:
    strangers = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
    if strangers and not (path / "config.yaml").exists():
        raise ConfigError(
            f"{path}: not a run folder: it holds {', '.join(strangers[:3])} but no config.yaml. "
            "Give the run another name, or move the folder away."
        )


def set_aside(path: Path) -> Path | None:
    """Renames a run folder, if it exists, to the first free of `NAME.1`, `NAME.2`, ..."""
    if not path.exists():
        return None
    aside = first_free(path)
    with open_folder(path), writing(path):  # held, so that no other process is writing there
        path.rename(aside)
    return aside


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run that trained."""

    step: int  # from which it trained; 0 at first
    total_steps: int  # of the whole run
    config: dict[str, Any]  # the whole config as plain values
    environment: dict[str, Any]  # what else the bits depend on, see `environment`
    at: str = field(default_factory=_now)  # in UTC


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a run."""

    step: int  # the last one
    state: dict[str, str]  # sha256 of each leaf of the state, by its path
    at: str = field(default_factory=_now)  # in UTC
    stopped: str | None = None  # why a callback ended the run before its last step; None if none did

    def is_end(self, total_steps: int) -> bool:
        """Returns whether it is the end of a run of so many steps."""
        return self.step >= total_steps or self.stopped is not None


def write_start(folder: RunFolder, start: Start) -> None:
    """Adds a start to a run's, drops those that left nothing, and copies the task's source."""
    starts = [asdict(earlier) for earlier in read_starts(folder) if earlier.step < start.step]
    write_atomically(folder.environment, json.dumps({"starts": [*starts, asdict(start)]}, indent=1) + "\n")
    with writing(folder.source):
        for name, path in task_sources(start.config["task"]["make"]).items():
            copy = folder.source / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def read_starts(folder: RunFolder) -> list[Start]:
    """Reads the starts of a run, in order; none without a file."""
    return _read(folder.environment, lambda content: [Start(**start) for start in content["starts"]]) or []


def write_result(folder: RunFolder, result: Result) -> None:
    """Writes the result of a run."""
    write_atomically(folder.result, json.dumps(asdict(result), indent=1) + "\n")


def read_result(folder: RunFolder) -> Result | None:
    """Reads the result of a run; None before its end."""
    return _read(folder.result, lambda content: Result(**content))


def _read(path: Path, make: Callable[[Any], T]) -> T | None:
    try:
        return make(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as exc:
        is_foreign = isinstance(exc, TypeError | KeyError)
        wrong = "not in the form that this jdist writes" if is_foreign else "cannot be read"
        raise ConfigError(f"{path}: {wrong}: {exc}. Delete it, or start the run again with --fresh.") from exc


def differences_from(starts: Sequence[Start], here: Mapping[str, Any]) -> str:
    """Lists differences that may change a repetition's bits, a line for each original start."""
    # The repetition has the config of the last start.
    lines = []
    for start in starts:
        where = f" from step {start.step:,}" if len(starts) > 1 else ""
        for there, now in ((start.config, starts[-1].config), (start.environment, here)):
            lines += [f"  {dotted(n)}: {a} there{where}, {b} here" for n, (a, b) in differences(there, now).items()]
    if not lines:
        return "the environment is that of the run"
    return "\n".join(["the environment differs from that of the run, so bits may differ:", *lines])


def task_sources(make: str) -> dict[str, Path]:
    """Finds a user task's files: loaded modules of its package and next to it."""
    # Installed files (the standard library, packages, jdist) and the running program do not count.
    package = make.partition(":")[0].partition(".")[0]
    if package == "jdist":  # the digest of all of it is recorded
        return {}
    task = sys.modules[package].__spec__
    roots = [] if task is None else _roots(task)
    sources = {}
    for module, path in _loaded():
        root = next((root for root in roots if path.is_relative_to(root)), None)
        if root is None or not path.is_file():
            continue
        name = path.relative_to(root)
        is_own = name.parts[0].removesuffix(".py") == package
        if is_own or not (module in ("__main__", "__mp_main__") or _is_installed(path)):
            sources[name.as_posix()] = path
    return dict(sorted(sources.items()))


def _loaded() -> Iterator[tuple[str, Path]]:
    """Lists the modules that have a source file; a lazy one is not woken by asking for it."""
    for name, module in list(sys.modules.items()):  # other threads may import meanwhile
        path = Path(vars(module).get("__file__") or "") if isinstance(module, ModuleType) else Path()
        if path.suffix == ".py":
            yield name, path


def _is_installed(path: Path) -> bool:
    return not _PACKAGES.isdisjoint(path.parts) or path.is_relative_to(_JDIST) or path.is_relative_to(_PYTHON)


def _roots(package: ModuleSpec) -> list[Path]:
    """Lists where a module or a package is imported from; one without `__init__.py` may be in several folders."""
    return [Path(place).parent for place in package.submodule_search_locations or [package.origin or ""]]


def folder_sources(folder: Path) -> dict[str, Path]:
    """Finds every Python file below a folder, by its path from there."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}


def changed_sources(make: str, copies: Path) -> list[str]:
    """Lists the files of the task `make` that differ from a run's copies, or are gone; nothing is imported."""
    path = sys.path if os.getcwd() in sys.path else [os.getcwd(), *sys.path]
    spec = PathFinder.find_spec(make.partition(":")[0].partition(".")[0], path)
    roots = [] if spec is None else _roots(spec)

    def differs(name: str, copy: Path) -> bool:
        here = next((root / name for root in roots if (root / name).is_file()), None)
        return here is None or here.read_bytes() != copy.read_bytes()

    return [name for name, copy in folder_sources(copies).items() if differs(name, copy)]


def digest(files: Mapping[str, Path]) -> str:
    """Hashes the names and content of files, wherever they lie; "" of none."""
    whole = hashlib.sha256()
    for name, path in files.items():
        whole.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16] if files else ""


def environment(strategy: Strategy, make: str, sources: Mapping[str, Any]) -> dict[str, Any]:
    """Lists everything that a run's bits depend on; `sources` has its data by name."""
    import jax  # folders are read without it

    from jdist.data.adapters.recognize import adapted

    devices = strategy.devices or tuple(jax.devices())
    kinds = sorted({f"{device.platform} {device.device_kind}" for device in devices})
    return {
        "python": platform.python_version(),
        "jdist": installed("jdist"),
        "jdist source": digest(folder_sources(_JDIST) | {"__init__.pyi": _JDIST / "__init__.pyi"}),
        **{package: installed(package) for package in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "processor cores": os.cpu_count(),
        "devices": f"{len(devices)} x {', '.join(kinds)}",
        "processes": strategy.cluster.num_processes,
        **variables(os.environ),
        "task source": digest(task_sources(make)),
        **{name: getattr(adapted(source), "fingerprint", "") or "unknown" for name, source in sources.items()},
    }


def _processor() -> str:
    """Names the processor's model: another one may have other vector instructions, and so round otherwise."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def checksums(state: Any) -> dict[str, str]:
    """Computes the sha256 of each host leaf's dtype, shape and bytes, by its path."""
    import numpy as np

    from jdist.checkpoint import leaves as codec

    sums = {}
    for path, leaf in codec.flatten(state).items():
        array = np.ascontiguousarray(codec.without_keys(leaf))
        whole = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
        whole.update(array.reshape(-1).view(np.uint8).data)
        sums[path] = whole.hexdigest()
    return sums
