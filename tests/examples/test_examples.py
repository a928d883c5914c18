"""Programs such as users bring, whole and small, compute under every strategy what they compute on one device.

Each file of `programs/` is one: `main(strategy)` trains for some ten steps on real rows, of which the last batch of an epoch is
short, and returns the state on the host, the losses, and what else is to be compared. All train by SGD of some kind, so
that parameters can be: eight devices sum in another order than one, and differ by rounding alone.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jdist

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
import matrix

PROGRAMS = {path.stem: path for path in sorted((Path(__file__).parent / "programs").glob("*.py"))}
STRATEGIES = {
    name: matrix.STRATEGIES[name] for name in ("default", "mirrored_shard_map", "mirrored_pmap", "mirrored_jit")
}
STRATEGIES |= {"multi_worker": jdist.multi_worker, "central_storage": jdist.central_storage}
STRATEGIES |= {name: matrix.STRATEGIES[name] for name in ("parameter_server", "parameter_server_sync")}

# Float32 and ten steps of SGD: what was seen is at most 2e-6.
TOLERANCE = 1e-5

# What cannot run, and what the error says to do.
SERVERS = ("parameter_server", "parameter_server_sync")
REFUSED = {
    **{("nnx_scan_over_layers", name): "cannot be changed in place. Split them" for name in SERVERS},
}

CASES = [(program, strategy) for program in PROGRAMS for strategy in STRATEGIES]
# Every program under one strategy and every strategy with one program or two; `make conformance` runs all.
ALWAYS = set(zip(PROGRAMS, itertools.cycle(STRATEGIES), strict=False))


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


@pytest.mark.parametrize(
    ("program", "strategy"),
    [pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.full, id="-".join(case)) for case in CASES],
)
def test_computes_what_it_does_on_one_device(program: str, strategy: str):
    if (program, strategy) in REFUSED:
        with pytest.raises(jdist.errors.StepError, match=REFUSED[program, strategy]):
            load(program).main(STRATEGIES[strategy]())
        return
    results, expected = load(program).main(STRATEGIES[strategy]()), on_one_device(program)
    assert np.mean(expected["losses"][-2:]) < np.mean(expected["losses"][:2])
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(results), jax.tree_util.tree_leaves_with_path(expected), strict=True)
    for leaf, (path, wanted) in pairs:
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(host(leaf), host(wanted), rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
