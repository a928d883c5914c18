"""Functions that travel."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.errors import ArtifactError
from jdist.ps.program import trial
from jdist.ps.program.artifact import name_of, pack, unpack
from tests.children import without_devices
from tests.ps.program import damaged_artifacts


def normal(values):
    x, key = values
    return [x @ x.T, jax.random.normal(jax.random.wrap_key_data(key), (3,)), jnp.linalg.cholesky(x @ x.T + jnp.eye(3))]


ARGUMENTS = [np.arange(9, dtype=np.float32).reshape(3, 3), np.array([0, 7], np.uint32)]


def test_a_function_runs_as_it_did():
    for found, expected in zip(unpack(pack(normal, ARGUMENTS))(ARGUMENTS), normal(ARGUMENTS), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_in_a_process_that_has_none_of_its_code(tmp_path):
    (tmp_path / "artifact").write_bytes(pack(normal, ARGUMENTS))
    code = (
        "import numpy as np, pathlib; from jdist.ps.program.artifact import unpack;"
        f"run = unpack(pathlib.Path({str(tmp_path / 'artifact')!r}).read_bytes());"
        "print(float(run([np.eye(3, dtype=np.float32), np.zeros(2, np.uint32)])[0].sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("3.0", 0), done.stderr


def test_donated_arguments_are_reused():
    run = unpack(pack(lambda values: [values[0] + 1], [jnp.ones(8)]), donate=[0])
    x = jnp.ones(8)
    run([x])
    assert x.is_deleted()


def test_equal_functions_have_one_name():
    assert name_of(pack(normal, ARGUMENTS)) == name_of(pack(normal, ARGUMENTS))
    assert name_of(pack(normal, ARGUMENTS)) != name_of(pack(lambda values: values, ARGUMENTS))


@pytest.mark.parametrize("call", ["print", "callback"])
def test_what_calls_the_host_cannot_travel(call):
    def function(values):
        if call == "print":
            jax.debug.print("{}", values[0])
            return values
        return [jax.pure_callback(lambda x: x, values[0], values[0])]

    with pytest.raises(ArtifactError, match=r"calls the host .*Return the value as a metric"):
        pack(function, [jnp.ones(3)])


def test_a_custom_call_that_is_not_allowed_is_refused():
    def function(values):
        return [jax.ffi.ffi_call("someone_elses_code", jax.ShapeDtypeStruct((3,), np.float32))(values[0])]

    exported = jax.export.export(
        jax.jit(function),
        platforms=("cpu",),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("someone_elses_code")],
    )([jnp.ones(3)])
    artifact = bytes(exported.serialize())
    with pytest.raises(ArtifactError, match=r"calls 'someone_elses_code', .*--allow-custom-call someone_elses_code"):
        unpack(artifact)
    unpack(artifact, allow=["someone_elses_code"])


@pytest.mark.parametrize("bytes_", [b"", b"x", b"garbage" * 100, pack(normal, ARGUMENTS)[:200]])
def test_what_is_no_artifact_is_refused(bytes_):
    with pytest.raises(ArtifactError, match="not an exported function"):
        unpack(bytes_)


# With JAX 0.10 these crash JAX's reader (240), break its heap (99, 302, 1569), ask for gigabytes (854), and loop (1596).
SEEDS = [*range(90, 310), 854, 1569, 1596]


def test_damaged_artifacts_neither_crash_nor_starve_the_process_that_receives_them():
    done = subprocess.run(
        [sys.executable, damaged_artifacts.__file__, *map(str, SEEDS)],
        env=without_devices() | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    refused, accepted = map(int, done.stdout.split())
    assert refused + accepted == len(SEEDS)
    assert min(refused, accepted) > 30


def test_a_reader_that_was_killed_is_started_again():
    artifact = pack(normal, ARGUMENTS)
    assert trial.is_readable(artifact)
    assert trial._process is not None
    trial._process.kill()
    trial._process.wait()
    assert trial.is_readable(artifact)
    assert not trial.is_readable(b"garbage")


def test_a_server_reads_programs_in_a_fork():
    code = (
        "import os; from jdist.ps.program import trial; from jdist.ps.program.artifact import unpack;"
        "from tests.ps.program.damaged_artifacts import artifact; trial.start_as_fork(); unpack(artifact());"
        "assert trial._process is None; trial._reader.close(); print(os.waitpid(-1, 0)[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_the_number_of_arguments_is_checked():
    with pytest.raises(ArtifactError, match="takes 2 arrays, it was given 1"):
        unpack(pack(normal, ARGUMENTS))([np.ones(3)])


def test_a_function_for_another_platform_is_refused():
    exported = jax.export.export(jax.jit(lambda values: values), platforms=("tpu",))([jnp.ones(3)])
    with pytest.raises(ArtifactError, match="is for tpu; this process is on cpu"):
        unpack(bytes(exported.serialize()))
