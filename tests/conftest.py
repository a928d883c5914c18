"""Eight virtual CPU devices for every test, unless the caller chose a platform; and quick compilations.

What is tested is which programs jdist makes, not how well XLA compiles them: LLVM optimises nothing; and where jaxlib
still has the older emitters of fusions (the newer ones go through MLIR), they are taken, and each program is compiled in
one part. That saves half the time. `make full`, `make conformance` and `make soak` have
XLA_FLAGS=--xla_backend_optimization_level=3, and with it XLA's own defaults. All processes of a run share a compilation
cache, which ends with the run.
"""

import gc
import os
import signal
import sys
import tempfile

import jaxlib.version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads spin, in each of the processes that share few cores
os.environ.setdefault("JDIST_TRACEBACK_FILTERING", "off")  # a failing test shows where in jdist
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    if jaxlib.version.__version_info__ < (0, 11):  # XLA ends the process over a flag that it does not know
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
if "TESTS_FOLDER" not in os.environ:  # else this is a worker process of pytest-xdist
    _folder = tempfile.TemporaryDirectory(prefix="jdist_tests_", ignore_cleanup_errors=True)
    os.environ["TESTS_FOLDER"] = _folder.name
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(_folder.name, "compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background, as by nohup: processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax.monitoring
import pytest

gc.set_threshold(50_000, 10, 10)  # what is traced is many small objects, which collections look at again and again
_compiled: list[str] = []


def _listen(event: str, *_, **__) -> None:
    if event.endswith("backend_compile_duration"):
        _compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)  # JAX has no public way to take one listener out


def pytest_configure(config: pytest.Config):
    """Where no bytecode is to be written, the hundreds of processes that tests start share some outside of the tree."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if sys.dont_write_bytecode and runs_tests:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = os.path.join(os.environ["TESTS_FOLDER"], "bytecode")


def pytest_collection_finish():
    """Modules and the thousands of tests stay to the end: no collection looks at them again."""
    gc.freeze()


@pytest.fixture
def compiled() -> list[str]:
    """Every compilation by XLA since it was last cleared."""
    _compiled.clear()
    return _compiled


@pytest.fixture
def quick_collection():
    """`gc.collect()` looks at what the test made, not at all that the process holds, which takes seconds.

    What it held stays frozen, or a collection after the test would look at all of it again.
    """
    gc.freeze()
