"""Steps that people already have come in with at most three changed lines, and compute what they computed before.

Every case is a whole small program in `programs/`, as its author wrote it for plain jit, nnx or pmap. Under jdist, a line
gives way to the `# jdist:` lines that follow it. Changed are the decorator, the gradient and the data loop.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jdist
from tests.by_default import some

pytestmark = pytest.mark.filterwarnings("ignore:train_step draws .* from a key that all replicas share")

PROGRAMS = pathlib.Path(__file__).parent / "programs"
MARKED = re.compile(r"^( *)(.+)\n((?: *# jdist:.*\n)+)", re.MULTILINE)
# A pmap program's state, and nothing else, carries a leading axis of devices; the lines that add and remove it go.
# So does the one that makes the devices' own copies of running statistics equal again.
PMAP_AXIS = ("jax_utils.replicate(", "jax_utils.unreplicate(", "state = sync_batch_stats(")
# Float32 and SGD: eight devices sum in another order than one, and differ by about 1e-7 after these few steps.
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One program.

    Attributes:
        name: what its file is called.
        limit: how many lines may change, imports left out.
        axis: the axis name that the program's own collectives use; None: it has none.
        same: the strategies under which the result must be that of the program before.
        accumulate: what two microbatches do: "same" result, "runs" (other draws or statistics), "refused" for what the
            step does, or "not asked" (`sharded`).
        sharded: whether it cuts its batches into as many as there are devices itself; it then runs on all of them.
        why: the reason where `same` lacks a strategy.
    """

    name: str
    limit: int = 3
    axis: str | None = None
    same: tuple[str, ...] = ("default", "one_device", "mirrored")
    accumulate: str = "same"
    sharded: bool = False
    why: str = ""


CASES = [
    Case(name="flax_train_state"),
    Case(
        name="key_argument",
        same=("default", "one_device"),
        accumulate="runs",
        why="the key draws a dropout mask for each replica's rows, not for the rows of the whole batch",
    ),
    Case(name="static_argument"),
    Case(
        name="rng_second",
        same=("default", "one_device"),
        accumulate="runs",
        why="as key_argument",
    ),
    Case(name="keyword_argument"),
    Case(name="raw_optax"),
    Case(name="params_and_opt_state"),
    Case(name="pmap_batch_norm", axis="batch", accumulate="refused"),
    Case(
        name="pmap_dynamic_scale",
        axis="batch",
        same=("mirrored",),
        accumulate="refused",
        why="on one device the float16 gradients are an eighth as large, so other steps overflow",
    ),
    Case(name="nnx_mutable", limit=4),
    Case(
        name="nnx_dropout",
        limit=4,
        same=("default",),
        accumulate="runs",
        why="each replica, also a single one, draws from keys of its own, and normalises by its own rows",
    ),
    Case(
        name="ppo_minibatches",
        same=("default", "one_device"),
        accumulate="refused",
        why="each replica shuffles its own rows into minibatches and normalises their advantages",
    ),
    Case(name="norm_of_updated"),
    Case(name="averaged_twice", axis="batch"),
    Case(name="equinox_filter"),
    Case(name="segmentation_mask"),
    Case(name="buckets_of_lengths"),
    Case(name="fgsm", limit=4),
    Case(name="fp8_dense"),
    Case(name="codebook", limit=4),
    Case(name="trainer_class"),
    Case(name="plateau"),
    Case(
        name="diffusion",
        limit=4,
        same=("default", "one_device"),
        accumulate="runs",
        why="each replica draws noise for its own rows",
    ),
    Case(
        name="pmap_eval_loop",
        axis="batch",
        same=("mirrored",),
        accumulate="not asked",
        sharded=True,
        why="each replica normalises by its own rows, and the batches are cut for eight",
    ),
    Case(
        name="pmap_dropout_keys",
        axis="batch",
        same=("mirrored",),
        accumulate="not asked",
        sharded=True,
        why="each replica has a dropout key of its own, and the batches are cut for eight",
    ),
]


def in_groups(params: list[Any]) -> list[Any]:
    """All cases of a program go to one process of the tests', which runs the program as it was once."""
    params = [param if hasattr(param, "marks") else pytest.param(param) for param in params]
    return [
        pytest.param(*values, marks=[*marks, pytest.mark.xdist_group(f"existing_{values[0].name}")])
        for values, marks, _ in params
    ]


def by_name(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", in_groups(cases), ids=lambda case: case.name)


def marked(name: str) -> list[tuple[str, list[str]]]:
    """The lines of a program that change, each with the `# jdist:` lines that follow it."""
    text = (PROGRAMS / f"{name}.py").read_text()
    return [(m[2], m[3].splitlines()) for m in MARKED.finditer(text)]


def source(name: str, when: str) -> str:
    """The text of a program before or after, without the import of jdist."""
    text = (PROGRAMS / f"{name}.py").read_text()
    if when == "before":
        return MARKED.sub(r"\1\2\n", text)
    return MARKED.sub(lambda m: re.sub(r"(?m)^ *# jdist: ?", m[1], m[3]), text)


def load(name: str, text: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(f"existing_steps_{name}")
    module.__dict__.update(names)
    exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
    return module


@functools.cache
def before(name: str) -> dict[str, Any]:
    return load(name, source(name, "before")).main(None)


def after(name: str, strategy: jdist.Strategy, **options: Any) -> dict[str, Any]:
    return load(name, source(name, "after"), jdist=with_options(options)).main(strategy)


def with_options(options: dict[str, Any]) -> types.SimpleNamespace:
    """`jdist` as a program sees it, with further options for every step that it distributes."""
    nnx = types.SimpleNamespace(
        distribute=functools.partial(jdist.nnx.distribute, **options), value_and_grad=jdist.nnx.value_and_grad
    )
    distribute = functools.partial(jdist.distribute, **options)
    calls = {name: getattr(jdist, name) for name in ("value_and_grad", "grad", "all_reduce", "replica_rng")}
    return types.SimpleNamespace(distribute=distribute, nnx=nnx, **calls)


def strategies(case: Case) -> dict[str, Callable[[], jdist.Strategy]]:
    if case.axis is None:
        return {"default": jdist.default, "one_device": jdist.one_device, "mirrored": jdist.mirrored}
    if case.sharded:
        return {
            "mirrored": lambda: jdist.mirrored(axis="batch"),
            "pmap": lambda: jdist.mirrored(axis="batch", transform="pmap"),
            "central_storage": lambda: jdist.central_storage(axis="batch"),
        }
    return {  # no default: it binds no axis that the program's own collectives could name
        "one_device": lambda: jdist.mirrored(jax.devices()[:1], axis=case.axis),
        "mirrored": lambda: jdist.mirrored(axis=case.axis),
    }


def host(leaf: Any) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(results: dict[str, Any], expected: dict[str, Any]) -> None:
    assert results.keys() == expected.keys()
    for key in expected:
        pairs = zip(jax.tree.leaves(results[key]), jax.tree_util.tree_leaves_with_path(expected[key]), strict=True)
        for leaf, (path, wanted) in pairs:
            name = key + jax.tree_util.keystr(path)
            np.testing.assert_allclose(host(leaf), host(wanted), rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def assert_learns(losses: list[float]) -> None:
    assert np.isfinite(losses).all()
    assert np.mean(losses[-2:]) < np.mean(losses[:2])


@by_name(CASES)
def test_few_lines_change(case: Case) -> None:
    changes = marked(case.name)
    axis_lines = sum(text in old for old, _ in changes for text in PMAP_AXIS)
    assert 0 < sum(len(new) for _, new in changes) - axis_lines <= case.limit, changes


EVERY = [(case, kind) for case in CASES for kind in strategies(case)]


@pytest.mark.parametrize(
    ("case", "kind"),
    # What is the same on all devices is so on one and on none in particular.
    in_groups(some(EVERY, [(case, kind) for case, kind in EVERY if kind == "mirrored" or "mirrored" not in case.same])),
    ids=lambda x: getattr(x, "name", x),
)
def test_computes_what_it_did(case: Case, kind: str) -> None:
    strategy = strategies(case)[kind]()
    results = after(case.name, strategy)
    strategy.check(results["state"])
    assert_learns(results["losses"])
    if kind in case.same or case.sharded:  # then all strategies have the same eight replicas
        assert_same(results, before(case.name))
    else:
        assert case.why


@pytest.mark.parametrize("name", some(["key_argument", "rng_second"], ["rng_second"]))
def test_draws_from_a_key_of_all_replicas_are_warned_of(name: str) -> None:
    with pytest.warns(UserWarning, match=r"train_step draws .* `key = jdist\.replica_rng\(key\)`"):
        after(name, jdist.mirrored())


@by_name([case for case in CASES if case.axis is None and "mirrored" not in case.same])
def test_the_global_view_draws_as_one_device_does(case: Case) -> None:
    strategy = jdist.mirrored(transform="jit")
    results = after(case.name, strategy)
    strategy.check(results["state"])
    assert_same(results, before(case.name))


def test_norms_of_what_servers_update_are_left_out() -> None:
    strategy = jdist.parameter_server(local_workers=1, local_ps=2)
    assert strategy.coordinator is not None
    try:
        with pytest.warns(UserWarning, match=r"left out of its results is \['param_norm'\], \['update_norm'\]"):
            results = after("norm_of_updated", strategy)
        expected = before("norm_of_updated")
        assert_same({"state": strategy.fetch(results["state"])}, {"state": expected["state"]})
    finally:
        strategy.coordinator.close()
    logs = [{name: log[name] for name in ("grad_norm", "loss")} for log in expected["logs"]]
    assert_same({"logs": results["logs"]}, {"logs": logs})


@by_name([case for case in CASES if case.accumulate in ("same", "runs")])
def test_accumulates(case: Case) -> None:
    strategy = strategies(case)["mirrored"]()
    results = after(case.name, strategy, accumulate=2)
    strategy.check(results["state"])
    assert_learns(results["losses"])
    if case.accumulate == "same":
        assert_same(results, before(case.name))


@by_name([case for case in CASES if case.name in ("fgsm", "fp8_dense", "codebook")])
@pytest.mark.parametrize("kind", ["jit", "sharded", "central_storage"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_where_more_than_gradients_meet(case: Case, kind: str, accumulate: int) -> None:
    made = {
        "jit": lambda: jdist.mirrored(transform="jit"),
        "sharded": lambda: jdist.sharded(whole_below=0, most_whole=1),
        "central_storage": jdist.central_storage,
    }
    strategy = made[kind]()
    results = after(case.name, strategy, accumulate=accumulate)
    strategy.check(results["state"])
    assert_same({**results, "state": strategy.fetch(results["state"])}, before(case.name))


def test_a_sum_that_is_averaged_as_it_is_has_to_be_said() -> None:
    module = load("codebook", source("codebook", "after"), jdist=jdist)
    module.average = lambda old, new: 0.9 * old + 0.1 * new
    with pytest.raises(jdist.errors.ReplicaDivergenceError, match=r"jdist\.all_reduce\(x, \"sum\"\)"):
        module.main(jdist.mirrored())
    module.jdist = with_options({"accumulate": 2})
    for strategy in (jdist.mirrored(), jdist.one_device(), jdist.mirrored(transform="jit")):
        with pytest.raises(jdist.errors.BoundaryError, match=r"the rows of one microbatch.*jdist\.all_reduce"):
            module.main(strategy)


@by_name([case for case in CASES if case.accumulate == "refused"])
def test_says_why_it_cannot_accumulate(case: Case) -> None:
    with pytest.raises(jdist.errors.BoundaryError, match=r"jdist\.value_and_grad"):
        after(case.name, strategies(case)["mirrored"](), accumulate=2)
