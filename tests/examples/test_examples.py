"""Steps such as users bring compute under every strategy what they compute on one device.

Each file of `programs/` has one: `main(strategy)` trains for some ten steps on real rows, of which the last batch of an epoch
is short, and returns the state on the host, the losses, and what else is to be compared. All train by SGD of some kind, so
that parameters can be: eight devices sum in another order than one, and differ by rounding alone.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jdist
from tests.conformance import matrix

PROGRAMS = {path.stem: path for path in sorted((Path(__file__).parent / "programs").glob("*.py"))}
STRATEGIES = {
    "default": jdist.default,
    "mirrored_shard_map": jdist.mirrored,
    "mirrored_pmap": matrix.STRATEGIES["mirrored_pmap"],
    "mirrored_jit": matrix.STRATEGIES["mirrored_jit"],
    "multi_worker": jdist.multi_worker,  # of one process; conformance/several_processes.py has several
    "central_storage": jdist.central_storage,
    "parameter_server": matrix.parameter_server,
    "parameter_server_sync": matrix.parameter_server_sync,
}

# Float32 and ten steps of SGD: what was seen is at most 5e-7, and 3e-6 of a loss of 15.
TOLERANCE = 1e-5

# What cannot run, and what the error says to do instead.
SERVERS = ("parameter_server", "parameter_server_sync")
REFUSED = {
    **{("nnx_scan_over_layers", name): "cannot be changed in place. Split them" for name in SERVERS},
    (
        "sharpness_aware",
        "parameter_server_sync",
    ): "Make two steps of it",  # sharpness_aware_in_two_steps is what it says
    ("contrastive", "parameter_server_sync"): "depends on the state, which only the workers have",
}
# What runs, and computes something else: what a worker's batch normalisation sees are its own rows, as servers bring only
# gradients together.
OTHERWISE = {("nnx_pure", "parameter_server_sync")}

CASES = [(program, strategy) for program in PROGRAMS for strategy in STRATEGIES]
# Each compiles for seconds, so a part always runs, and all in `make conformance`.
ALWAYS = {
    ("contrastive", "mirrored_shard_map"),
    ("frozen_backbone", "central_storage"),
    ("haiku_style", "multi_worker"),
    ("key_in_the_state", "mirrored_pmap"),
    ("lookahead_and_clipping", "parameter_server"),
    ("multi_steps", "central_storage"),
    ("nnx_pure", "parameter_server"),
    ("nnx_scan_over_layers", "central_storage"),
    ("plateau", "default"),
    ("two_optimizers", "mirrored_jit"),
}


@functools.cache
def load(program: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"examples_{program}", PROGRAMS[program])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def on_one_device(program: str) -> dict[str, Any]:
    return load(program).main(jdist.one_device())


def host(leaf: Any) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


@pytest.fixture(scope="module", autouse=True)
def servers_end() -> Any:
    yield
    matrix.close_servers()


def marks(program: str, strategy: str) -> list[pytest.MarkDecorator]:
    """Of a case: whether it always runs; those that share servers, or what one device gives, run in one process."""
    group = pytest.mark.xdist_group("example_servers" if strategy in SERVERS else f"example_{program}")
    return [group] if (program, strategy) in ALWAYS else [group, pytest.mark.full]


@pytest.mark.parametrize(
    ("program", "strategy"), [pytest.param(*case, marks=marks(*case), id="-".join(case)) for case in CASES]
)
def test_computes_what_it_does_on_one_device(program: str, strategy: str):
    if (program, strategy) in REFUSED:
        with pytest.raises(jdist.errors.StepError, match=REFUSED[program, strategy]):
            load(program).main(STRATEGIES[strategy]())
        return
    results, expected = load(program).main(STRATEGIES[strategy]()), on_one_device(program)
    for losses in (results["losses"], expected["losses"]):
        assert np.mean(losses[-2:]) < np.mean(losses[:2])
    if (program, strategy) in OTHERWISE:
        return
    pairs = zip(jax.tree.leaves(results), jax.tree_util.tree_leaves_with_path(expected), strict=True)
    for leaf, (path, wanted) in pairs:
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(host(leaf), host(wanted), rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
