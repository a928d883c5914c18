"""Trial runs of a step, on copies, without what makes two runs differ on purpose: random draws, and calls of the host.

A replica draws for its own rows, and from a key of its own: no draw of N replicas can equal that of one. With one constant in
place of every draw, the remaining differences have other causes.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
from jax.extend import core as jex

from jdist.core.context import run_under_mesh
from jdist.core.per_replica import is_per_replica
from jdist.core.sharded_leaf import is_sharded_leaf, whole_on_host
from jdist.core.step_state import pack
from jdist.jaxpr import graph
from jdist.jaxpr.graph import ClosedJaxpr
from jdist.jaxpr.variation import DRAWS, Origin, Var
from jdist.jaxpr.variation import origins as origins_of
from jdist.step.mesh_step import DistributedStep
from jdist.step.non_finite import new_token
from jdist.step.outputs import Traced
from jdist.step.placement import place_batches, replicate
from jdist.step.signature import Call
from jdist.typing import PyTree

Rewrite = Callable[[Any], list[Any] | None]  # from an equation to those in its place; None: looked into, and kept
Run = Callable[[tuple[PyTree, ...]], Any]  # from `(token, state, batches, others)` to `(token, state, outputs)`

# Compiles for a CPU in a quarter of the time. The older emitters of fusions left XLA with jaxlib 0.11.
_QUICK = {"xla_backend_optimization_level": 0}
if jaxlib.version.__version_info__ < (0, 11):
    _QUICK |= {"xla_cpu_use_fusion_emitters": False}
_UNIFORM = 0.1  # kept by dropout at any usual rate, and not the middle of a distribution
_CALLBACKS = ("io_callback", "outside_call")
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_SUMS = (
    *_PRODUCTS,
    *("reduce_sum", "reduce_prod", "reduce_window_sum", "cumsum", "cumprod", "cumlogsumexp", "scatter-add"),
    *("triangular_solve", "cholesky", "lu", "qr", "geqrf", "householder_product", "eigh", "svd", "fft"),
)
# A vector's elements may round in another way than those at its end; division and roots are exact to the last digit.
_APPROXIMATE = (
    *("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erfc", "erf_inv", "sin", "cos", "tan"),
    *("pow", "rsqrt", "cbrt", "lgamma", "digamma", "atan2", "sinh", "cosh"),
)


@dataclass(frozen=True)
class Result:
    """A leaf of what a step returned, on the host, and its place among all leaves."""

    name: str
    place: int
    value: Any


class Trial:
    """One way to run a step; it is traced at the first run."""

    def __init__(self, step: DistributedStep, call: Call):
        self.step, self._call = step, call
        # Of one replica, which no later call runs again.
        self._is_quick = [device.platform for device in step.strategy.devices] == ["cpu"]
        self.closed: Any = None  # the jaxpr, and its arguments that are rows
        self.batch: Sequence[Any] = ()
        self.state: PyTree = None  # the newest, where the step has left it
        self._run: Run | None = None
        self._treedef: Any = None

    def shaken(self, multiplies: float) -> Trial:
        """Copies the trial, after a run, with errors of rounding in all that is summed; see `quiet.shaken`."""
        trial = copy.copy(self)
        trial._run = self._compile(shaken(quiet(self.closed), multiplies, self.batch))
        return trial

    def run(self, state: PyTree, batches: PyTree, others: PyTree) -> dict[str, Result]:
        """Runs the step; returns the leaves of its results by name."""
        arguments, traced = self.trace(state, batches, others)
        assert self._run is not None  # the trace has made it
        results = self._run(arguments)
        self.state = results[1]
        return {leaf.name: leaf for leaf in named_leaves(results, traced.returns)}

    def trace(self, state: PyTree, batches: PyTree, others: PyTree) -> tuple[tuple[PyTree, ...], Traced]:
        """Traces the step for arguments on the host, if it has not been; returns them in place, and the results' roles."""
        with warnings.catch_warnings():  # the step's own call warns as well
            warnings.simplefilter("ignore")
            strategy, options = self.step.strategy, self.step.options
            others = replicate(strategy, others)
            if strategy.mesh is not None:
                batches = place_batches(strategy, options, batches, self._call.batch_axes)
            state = self.step.backend.adopt_state(strategy, pack(state))
            program, traced = self.step.program(self._call)
            arguments = new_token(strategy, options.steps_per_call), state, batches, others
            if self._run is None:
                closed = program.trace(*arguments)
                self.closed, self._treedef = closed.jaxpr, jax.tree.structure(closed.out_info)
                places = jax.tree.unflatten(jax.tree.structure(arguments), self.closed.jaxpr.invars)
                self.batch = jax.tree.leaves(places[2])
                is_own = self._is_quick or draws(self.closed) or prints(self.closed)
                self._run = self._compile(quiet(self.closed)) if is_own else lambda arguments: program.run(*arguments)
        return arguments, traced

    def _compile(self, closed: Any) -> Run:
        function = jax.jit(jex.jaxpr_as_fun(closed), compiler_options=_QUICK if self._is_quick else None)

        def run(arguments: tuple[PyTree, ...]) -> Any:
            return self._treedef.unflatten(run_under_mesh(self.step.strategy, function, *jax.tree.leaves(arguments)))

        return run


def named_leaves(results: Any, returns: tuple[str, ...]) -> Iterator[Result]:
    """Lists the leaves of `(token, state, outputs)`, without what each replica has of its own."""
    _, state, outputs, *_ = results
    roles = [role for role in returns if role != "state"]
    trees = [("state", state if "state" in returns else None)]
    names = [role if roles.count(role) == 1 else f"{role}[{i}]" for i, role in enumerate(roles)]
    trees += list(zip(names, outputs, strict=True))
    place = 1 if "state" in returns else 1 + len(jax.tree.leaves(state))
    for role, tree in trees:
        for path, node in jax.tree.leaves_with_path(tree, is_leaf=lambda x: is_per_replica(x) or is_sharded_leaf(x)):
            if not is_per_replica(node) and role != "per_replica":
                yield Result(role + jax.tree_util.keystr(path), place, on_host(node))
            place += len(jax.tree.leaves(node))


def on_host(x: Any) -> Any:
    return whole_on_host(x) if isinstance(x, jax.Array) or is_sharded_leaf(x) else x


def prints(closed: Any) -> bool:
    """Returns whether a jaxpr prints, or calls the host without reading a result."""
    return graph.contains_primitive(closed, *graph.PRINTS)


def draws(closed: Any) -> bool:
    """Returns whether a jaxpr draws random numbers."""
    return graph.contains_primitive(closed, *DRAWS)


def draws_until(closed: Any) -> bool:
    """Returns whether it draws until what it drew is accepted: of a constant it might never be."""
    loops = (eqn for eqn in graph.all_equations(closed) if eqn.primitive.name == "while")
    return any(graph.uses_primitive(loop, *DRAWS) for loop in loops)


def calls_the_host(closed: Any) -> bool:
    """Returns whether it calls a function of the host that may change something there, and reads what that returns."""
    return graph.contains_primitive(closed, *_CALLBACKS)


def quiet(closed: Any) -> Any:
    """Rewrites a jaxpr with one constant for every draw, and without prints."""
    return _rewritten(closed, lambda jaxpr: _quiet, {})


def shaken(closed: Any, multiplies: float, batch: Collection[Var]) -> Any:
    """Adds rounding errors to every sum of a jaxpr, different at each run; exact equations stay."""
    # Each sum errs as its own dtype rounds, products of matrices at least by `multiplies`. The
    # gradient of a zero bias may be zero except for the order of its terms, so the terms err as
    # well. A sum over rows that is stored in fewer bits is rounded by each replica for its own rows.
    stored = {eqn for eqn, (origin, *_) in _casts(closed, batch) if origin.varies and not origin.rows}
    return _rewritten(closed, lambda jaxpr: _Shaker(jaxpr, multiplies, stored).shaken, {})


def _casts(closed: Any, batch: Collection[Var]) -> Iterator[tuple[Any, list[Origin]]]:
    """Iterates over the casts to floats of fewer bits, with the origins of what they cast."""
    for eqn, origins in origins_of(closed, batch):
        if eqn.primitive.name == "convert_element_type":
            dtypes = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            if all(jnp.issubdtype(d, jnp.floating) for d in dtypes) and dtypes[1].itemsize < dtypes[0].itemsize:
                yield eqn, origins


def _rewritten(jaxpr: Any, make: Callable[[Any], Rewrite], known: dict[int, Any]) -> Any:
    """Rewrites a jaxpr and those within it; `make` gets each and returns what rewrites its own equations."""
    result: Any
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    is_closed = isinstance(jaxpr, ClosedJaxpr) and not isinstance(jaxpr, jex.Jaxpr)
    opened: Any = jaxpr  # type checkers narrow `jaxpr` by the check above
    if is_closed:
        inner = _rewritten(opened.jaxpr, make, known)
        result = opened if inner is opened.jaxpr else ClosedJaxpr(inner, opened.consts)
    else:
        rewrite = make(opened)
        eqns = [new for eqn in opened.eqns for new in _replaced(eqn, rewrite, make, known)]
        same = len(eqns) == len(opened.eqns) and all(a is b for a, b in zip(eqns, opened.eqns, strict=True))
        if same:
            result = opened
        else:  # without the effects of prints that are gone
            kept = {effect for eqn in eqns for effect in eqn.effects}
            effects = type(opened.effects)(effect for effect in opened.effects if effect in kept)
            result = opened.replace(eqns=eqns, effects=effects)
    known[id(jaxpr)] = result
    return result


def _quiet(eqn: Any) -> list[Any] | None:
    if eqn.primitive.name in graph.PRINTS:
        return []
    return _constant(eqn) if eqn.primitive.name in DRAWS else None


class _Shaker:
    """Errors of rounding in the sums of one jaxpr, cut from one draw: a draw for each sum takes longer to compile."""

    def __init__(self, jaxpr: Any, multiplies: float, stored: Collection[Any]):
        self._multiplies, self._stored = multiplies, stored
        operands = [v.aval.shape for eqn in jaxpr.eqns if self._errs(eqn) for v in (*eqn.invars, *eqn.outvars)]
        # Each operand starts elsewhere in the draw, so that one's errors do not meet themselves in the next.
        self._size, self._begin = max(map(math.prod, operands), default=0) + len(operands), 0
        self._draw: Any = None

    def shaken(self, eqn: Any) -> list[Any] | None:
        """Makes the equations of a sum with errors in terms and result; None for an exact one."""
        if eqn.primitive.name.startswith("pallas"):
            return [eqn]  # a kernel's body has arithmetic of its own
        if not self._errs(eqn):
            return None
        name, is_stored = eqn.primitive.name, eqn in self._stored
        eps = max(float(jnp.finfo(eqn.outvars[0].aval.dtype).eps), self._multiplies if name in _PRODUCTS else 0.0)

        def function(draw: jax.Array, *operands: jax.Array) -> list[jax.Array]:
            keeps_terms = is_stored or name in _APPROXIMATE
            terms = operands if keeps_terms else [self._with_errors(x, draw, eps) for x in operands]
            results = eqn.primitive.bind(*terms, **eqn.params)
            return [self._with_errors(x, draw, eps) for x in (results if eqn.primitive.multiple_results else [results])]

        made = [] if self._draw is not None else self._drawn()
        closed = jax.make_jaxpr(function)(graph.struct_of(self._draw), *map(graph.struct_of, eqn.invars))
        outer = [self._draw, *eqn.invars, *eqn.outvars]
        places = dict(zip([*closed.jaxpr.invars, *closed.jaxpr.outvars], outer, strict=True))

        def placed(v: Any) -> Any:
            return v if isinstance(v, jex.Literal) else places.get(v, v)

        return made + [
            each.replace(invars=list(map(placed, each.invars)), outvars=list(map(placed, each.outvars)), ctx=eqn.ctx)
            for each in closed.jaxpr.eqns
        ]

    def _errs(self, eqn: Any) -> bool:
        is_sum = eqn in self._stored or eqn.primitive.name in (*_SUMS, *_APPROXIMATE)
        return is_sum and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)

    def _drawn(self) -> list[Any]:
        """Makes the equations of the draw: numbers from -1 to 1, [size]."""
        # Stateful: it draws other numbers wherever and whenever it runs, with no key to hand through loops and calls.
        closed = jax.make_jaxpr(lambda: jax.lax.rng_uniform(-1.0, 1.0, (self._size,)))()
        (self._draw,) = closed.jaxpr.outvars
        return list(closed.jaxpr.eqns)

    def _with_errors(self, x: jax.Array, draw: jax.Array, eps: float) -> jax.Array:
        """Gives numbers errors of rounding; whole ones are exact, and so are sums of them, as far as the dtype counts."""
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        real = jnp.finfo(x.dtype).dtype
        is_8_bits = real.itemsize == 1  # which JAX promotes to nothing
        wide = jnp.dtype(jnp.float32) if is_8_bits else jnp.promote_types(real, jnp.float32)
        value = x.astype(wide if is_8_bits else jnp.promote_types(x.dtype, jnp.float32))
        errors = jax.lax.slice(draw, (self._begin,), (self._begin + x.size,)).reshape(x.shape).astype(wide) * eps
        self._begin += 1
        is_exact = False
        if value.dtype == wide:
            is_exact = (value == jax.lax.round(value)) & (jax.lax.abs(value) <= 1 / float(jnp.finfo(real).eps))
        return jnp.where(is_exact, value, value + value * errors).astype(x.dtype)


def _replaced(eqn: Any, rewrite: Rewrite, make: Callable[[Any], Rewrite], known: dict[int, Any]) -> list[Any]:
    """Rewrites one equation, into none or several."""
    rewritten = rewrite(eqn)
    if rewritten is not None:
        return rewritten
    params = {key: _param(value, make, known) for key, value in eqn.params.items()}
    if all(params[key] is value for key, value in eqn.params.items()):
        return [eqn]
    inner = {effect for each in graph.jaxprs_in(params.values()) for effect in each.effects}
    dropped = {effect for each in graph.nested_jaxprs(eqn) for effect in each.effects} - inner
    return [eqn.replace(params=params, effects=type(eqn.effects)(e for e in eqn.effects if e not in dropped))]


def _param(value: Any, make: Callable[[Any], Rewrite], known: dict[int, Any]) -> Any:
    if isinstance(value, ClosedJaxpr | jex.Jaxpr):
        return _rewritten(value, make, known)
    if type(value) in (tuple, list):
        items = [_param(each, make, known) for each in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value


def _constant(eqn: Any) -> list[Any]:
    """Makes the equations of a constant in place of a draw."""
    (out,) = eqn.outvars
    shape, dtype = out.aval.shape, out.aval.dtype
    value = 1 if jnp.issubdtype(dtype, jnp.floating) else int(_UNIFORM * 2 ** (8 * dtype.itemsize))
    # With one more axis, as a scalar constant would be no equation.
    closed = jax.make_jaxpr(lambda: jax.lax.full((1, *shape), value, dtype).reshape(shape))()
    *first, last = (each.replace(ctx=eqn.ctx) for each in closed.jaxpr.eqns)
    return [*first, last.replace(outvars=[out])]
