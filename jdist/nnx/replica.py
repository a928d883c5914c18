"""A replica's part of a step over nnx objects: a pure function of their variables, and gradients over the replicas.

The objects are split into a graph definition and a state before each call, the step runs as a pure function of that
state, and the objects receive the new state after it. Three kinds of variables are not simply replicated:

- random keys: each replica draws from its own, so dropout differs; the key that is kept is the same for all;
- batch statistics: averaged over the replicas after the step (a `BatchNorm` with an `axis_name` has done so itself);
- metrics (`nnx.metrics.Average`, `Accuracy`, `MultiMetric` of them): what each replica added is summed, after a `reset()` in
  the step too. How the states of a metric of your own come together is given by `metrics={MyMetric: "max"}`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jdist.core import context
from jdist.core.step_state import user_state
from jdist.errors import StepError
from jdist.replica import collectives, gradients
from jdist.step.signature import argument_name
from jdist.typing import PyTree

MetricOps = Mapping[type, collectives.ReduceOp]  # how the replicas' states of a class of metrics come together
_KINDS = (nnx.RngKey, nnx.metrics.MetricState, nnx.BatchStat, ...)  # `...`: all other variables


# Static attributes that cannot change by themselves.
_FIXED = int | float | complex | str | bytes | type | types.FunctionType | types.BuiltinFunctionType | None


class _Variables(NamedTuple):
    """The state of a step's objects by kind; messages name leaves by it."""

    keys: Any
    metrics: Any
    batch_stats: Any
    others: Any


def value_and_grad(
    f: Callable[..., Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False, op: gradients.GradientOp = "mean"
) -> Callable[..., Any]:
    """Differentiates as `nnx.value_and_grad`, and averages value and gradient over the replicas.

    Args:
        f: a function of the model (and more) that returns a scalar loss, or `(loss, aux)`.
        argnums: as in nnx.
        has_aux: as in nnx; `aux` stays this replica's own.
        op: "mean", or "sum" where the loss is already divided by the global batch.

    Returns:
        A function that returns `(value, grads)` or `((value, aux), grads)`.
    """
    which = argnums if isinstance(argnums, Sequence) else (argnums,)
    places = [i.argnum if isinstance(i, nnx.DiffState) else i for i in which]

    def lowered(*args: Any, **kwargs: Any) -> Any:
        trace = context.current_trace()
        if trace is None or trace.precision is None:
            return f(*args, **kwargs)
        models = [args[i] for i in places]
        # Copies: the variables in `nnx.state` are the model's own.
        wide = [jax.tree.map(lambda x: x, nnx.state(model, nnx.Param)) for model in models]
        for model, params in zip(models, wide, strict=True):
            nnx.update(model, trace.precision.cast_to_compute(params))
        result = f(*args, **kwargs)
        for model, params in zip(models, wide, strict=True):  # or nnx would take the cast for a change of the model
            nnx.update(model, params)
        return gradients.scale_loss(result, has_aux, trace.precision, trace.loss_scale)

    local = nnx.value_and_grad(lowered, argnums=argnums, has_aux=has_aux)

    def value_and_grad_of_all(*args: Any, **kwargs: Any) -> Any:
        trace = context.current_trace()
        in_parts = None if trace is None or collectives.replica_axes() is None else trace.in_parts
        place = argnums if isinstance(argnums, int) else None
        arrays = tuple(args[i] if isinstance(args[i], jax.Array) else () for i in places)  # in addition to the models
        by_rows = gradients.paths_by_rows(arrays if isinstance(argnums, Sequence) else arrays[0])
        if in_parts is None or place is None or not _is_alone(args, kwargs, place):
            value, grads = local(*args, **kwargs)
            forms = {}
        else:
            value, grads = _by_parts(in_parts, lowered, args, kwargs, place, has_aux)
            forms = in_parts.forms(nnx.state(args[place], nnx.Param))
        loss, aux = value if has_aux else (value, None)
        loss, grads = gradients.combine_gradients(loss, grads, op, forms, by_rows)
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad_of_all


def _is_alone(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> bool:
    """Returns whether one argument is an nnx module and no other holds objects, which a loss might change."""
    others = [*args[:place], *args[place:][1:], *kwargs.values()]
    return isinstance(args[place], nnx.Module) and not any(map(holds_objects, others))


def _by_parts(
    in_parts: Any, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], place: int, has_aux: bool
) -> tuple[Any, Any]:
    """Differentiates as `nnx.value_and_grad` does, by this replica's parts of the parameters."""
    # Gradients of parameters in parts are parts.
    graphdef, params, rest = nnx.split(args[place], nnx.Param, ...)

    def of_params(params: Any) -> Any:
        # A copy of the variables: the loss changes the module in place.
        module = nnx.merge(graphdef, params, jax.tree.map(lambda x: x, rest))
        result = f(*args[:place], module, *args[place:][1:], **kwargs)
        loss, aux = result if has_aux else (result, None)
        return loss, (aux, nnx.split(module, nnx.Param, ...)[2])

    differentiate = functools.partial(jax.value_and_grad, has_aux=True)
    (loss, (aux, new)), grads = in_parts.take(differentiate, of_params, (params,), {}, {0})
    # The rest of the module changes in place, as in `nnx.value_and_grad`.
    nnx.update(args[place], new)
    return ((loss, aux) if has_aux else loss), grads


def grad(
    f: Callable[..., Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False, op: gradients.GradientOp = "mean"
) -> Callable[..., Any]:
    """Differentiates as `nnx.grad`, and averages the gradient over the replicas.

    Args:
        f: a function of the model (and more) that returns a scalar loss, or `(loss, aux)`.
        argnums: as in nnx.
        has_aux: as in nnx; `aux` stays this replica's own.
        op: "mean", or "sum" where the loss is already divided by the global batch.
    """
    both = value_and_grad(f, argnums=argnums, has_aux=has_aux, op=op)

    def grad_of_all(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_of_all


@dataclasses.dataclass(frozen=True)
class Structure:
    """The static part of a call: the objects' graph definition, and which arguments are objects."""

    graphdef: Any
    which: tuple[bool, ...]

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # once: nnx computes it again from every node
        return hash((self.graphdef, self.which))


class Objects:
    """A call's nnx objects, split into structure and state; reused while the structure stays the same."""

    def __init__(self, args: tuple[Any, ...]):
        which = tuple(map(holds_objects, args))
        if not any(which[:1]):
            raise StepError(
                "jdist.nnx.distribute: the step's first argument holds no nnx object. It must be the model, the optimizer "
                "or a tuple of them; for steps over pure states use `jdist.distribute`."
            )
        self.objects = tuple(arg for arg, is_object in zip(args, which, strict=True) if is_object)
        graphdef, *state = nnx.split(self.objects, *_KINDS)
        self.structure = Structure(graphdef, which)
        self._live = _Variables(*state)  # holds the objects' own variables
        self._variables = _variables(self._live)
        self._treedef = jax.tree.structure(self._live)  # with the variables' metadata
        self._newest: PyTree = None  # the state that a step returned last, with these arrays
        self._arrays: list[Any] = []
        self._contents = _contents_of(self.objects, self._variables)

    def rest(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Selects the arguments without objects."""
        return tuple(arg for arg, is_object in zip(args, self.structure.which, strict=True) if not is_object)

    def are_in(self, args: tuple[Any, ...]) -> bool:
        """Returns whether a call passes the same objects, unchanged in structure."""
        if len(args) != len(self.structure.which):
            return False
        mine = iter(self.objects)
        for arg, is_object in zip(args, self.structure.which, strict=True):
            if not (_is_same(arg, next(mine)) if is_object else not holds_objects(arg)):
                return False
        return self._are_unchanged() and jax.tree.structure(self._live) == self._treedef

    def state(self) -> PyTree:
        """Returns the last returned state (same object) if the variables still hold it, else their present state."""
        arrays, newest = jax.tree.leaves(self._live), self._newest
        if newest is None or not all(map(operator.is_, arrays, self._arrays)):
            return self._live
        return self._live if any(x.is_deleted() for x in arrays if isinstance(x, jax.Array)) else newest

    def put(self, state: PyTree) -> None:
        """Gives the objects a new state."""
        new, self._newest = user_state(state), None
        if not self._are_unchanged():
            nnx.update(self.objects, nnx.merge_state(*new))  # also variables that have taken the place of others
            return
        for variable, value in zip(self._variables, _variables(new), strict=True):
            variable.update_from_state(value)
        self._arrays, self._treedef = jax.tree.flatten(new)
        self._newest = state

    def _are_unchanged(self) -> bool:
        if self._contents is None:
            return False
        nodes, hashes = self._contents
        return all(
            _names(node) == names and all(map(operator.is_, _values(node), then)) for node, names, then in nodes
        ) and all(hash(value) == then for value, then in hashes)


def _contents_of(objects: PyTree, variables: list[Any]) -> tuple[list[Any], list[Any]] | None:
    """Lists each node with its names and values, and static values with their hashes; None where a change would not show."""
    if not all(isinstance(variable, nnx.Variable) for variable in variables):
        return None  # arrays that are attributes themselves
    nodes: list[Any] = []
    hashes: list[Any] = []
    for path, node in nnx.iter_graph(objects):
        if path and str(path[-1]).startswith("_pytree__"):
            continue  # nnx's own account of the attributes
        if isinstance(node, nnx.Pytree):
            node = vars(node)
        elif isinstance(node, nnx.State):
            node = node.raw_mapping
        if isinstance(node, Mapping | list):
            nodes.append((node, _names(node), [*_values(node)]))
        elif isinstance(node, nnx.Variable | tuple | _FIXED):
            continue  # a tuple's items are nodes as well
        elif nnx.graph.is_node(node) or type(node).__hash__ is None:
            return None  # a container of the user's own; or a static value that the call refuses
        elif type(node).__hash__ is not object.__hash__:
            hashes.append((node, hash(node)))  # perhaps of fields that can be set
    return nodes, hashes


def _variables(state: PyTree) -> list[Any]:
    return jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) is tuple and len(a) == len(b) and all(map(_is_same, a, b)))


def _names(contents: Any) -> list[Any]:
    return [len(contents)] if isinstance(contents, list) else [*contents]


def _values(contents: Any) -> Iterable[Any]:
    return contents if isinstance(contents, list) else contents.values()


def holds_objects(value: Any) -> bool:
    """Returns whether an argument is an nnx object, or a tree with one."""
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    return any(isinstance(leaf, nnx.Pytree) for leaf in leaves)


def pure_step(step: Callable[..., Any], positional: Sequence[str], metric_ops: MetricOps) -> Callable[..., Any]:
    """Wraps a step over objects as `(static, variables, *others) -> (variables, *results)`."""
    # `positional` names its parameters; `metric_ops` are those of the metrics' classes that are not nnx's own.

    @functools.wraps(step)
    def pure(static: Any, state: tuple[Any, ...], *rest: Any, **kwargs: Any) -> Any:
        graphdef, which = static.graphdef, static.which
        keys, metrics, statistics, others = state
        own_keys = jax.tree.map(collectives.replica_rng, keys)
        bound = collectives.replica_axes() is not None or collectives.num_replicas() > 1
        # A copy of the variables: the step changes the objects in place, and `metrics` must stay unchanged.
        copies = jax.tree.map(lambda x: x, (metrics, statistics, others))
        objects = nnx.merge(graphdef, own_keys, *copies)
        ops = _ops_by_path(objects, metric_ops) if bound else {}
        if bound:
            # What adds up: the first replica goes on from what was there, the others begin at zero, and all of it is summed.
            is_first = collectives.replica_id() == 0
            initial = _map_metrics(lambda op, x: jnp.where(is_first, x, 0) if op == "sum" else x, ops, metrics)
            nnx.update(objects, initial)
        mutable, others_of_step = iter(objects), iter(rest)
        with _no_reading(objects) if collectives.num_replicas() > 1 else contextlib.nullcontext():
            result = step(*(next(mutable if is_object else others_of_step) for is_object in which), **kwargs)
        new_graphdef, _, new_metrics, new_statistics, new_others = nnx.split(objects, *_KINDS)
        if new_graphdef != graphdef:
            raise StepError(
                "the step changed the structure of its nnx objects (a module, variable or static attribute was added, "
                "removed or changed). Make such changes outside of the step."
            )
        if bound:
            new_metrics = _map_metrics(lambda op, x: collectives.all_reduce(x, op).astype(x.dtype), ops, new_metrics)
            new_statistics = collectives.all_reduce(new_statistics, "mean")
        results = result if isinstance(result, tuple) else (result,)
        return (_Variables(keys, new_metrics, new_statistics, new_others), *results)

    def names_of_arguments(static: Any) -> list[str]:
        named = [(argument_name(i, positional), is_object) for i, is_object in enumerate(static.which)]
        objects = ", ".join(name for name, is_object in named if is_object)
        return ["the structure of the objects", objects, *(name for name, is_object in named if not is_object)]

    # Arguments are bound to the wrapper's own parameters, not to those of the step it wraps.
    del pure.__wrapped__
    vars(pure)["names_of_arguments"] = names_of_arguments
    return pure


def _ops_by_path(objects: PyTree, metric_ops: MetricOps) -> dict[tuple[Any, ...], collectives.ReduceOp]:
    """Finds how the replicas' versions of each metric come together, by path; raises StepError for an unknown class."""
    ops: dict[tuple[Any, ...], collectives.ReduceOp] = {}
    for path, node in nnx.iter_graph(objects):
        if not isinstance(node, nnx.metrics.Metric) or isinstance(node, nnx.metrics.MultiMetric):
            continue
        kind = type(node)
        op = metric_ops.get(kind)
        if op is None and kind in (nnx.metrics.Average, nnx.metrics.Accuracy):
            op = "sum"
        if op is None:
            name = f"nnx.metrics.{kind.__name__}" if kind.__module__.startswith("flax.") else kind.__name__
            raise StepError(
                f"metric {'.'.join(map(str, path))} is an {name}: jdist cannot combine its states of several replicas. Give "
                f'`jdist.nnx.distribute(..., metrics={{{name}: "sum"}})`, or use nnx.metrics.Average.'
            )
        ops[path] = op
    return ops


def _map_metrics(
    change: Callable[[collectives.ReduceOp, Any], Any], ops: dict[tuple[Any, ...], collectives.ReduceOp], metrics: Any
) -> Any:
    """Changes each array of the metrics' variables by `change(op of its metric, array)`."""

    def one(path: tuple[Any, ...], variable: Any) -> Any:
        op: collectives.ReduceOp = next(ops[path[:n]] for n in range(len(path), 0, -1) if path[:n] in ops)
        return jax.tree.map(lambda x: change(op, x), variable)

    flat = nnx.to_flat_state(metrics)
    return nnx.from_flat_state([(path, one(path, variable)) for path, variable in flat])


@contextlib.contextmanager
def _no_reading(objects: PyTree) -> Iterator[None]:
    """Refuses `compute()` of a metric inside the step, where it knows of one replica's rows alone."""

    def refuse() -> Any:
        raise StepError(
            "the step computes an nnx metric (`metrics.compute()`), which has one replica's rows there. Call it outside of "
            "the step; for a value of each step, return it as a metric."
        )

    nodes = [node for _, node in nnx.iter_graph(objects) if isinstance(node, nnx.metrics.Metric)]
    for node in nodes:
        object.__setattr__(node, "compute", refuse)
    try:
        yield
    finally:
        for node in nodes:
            object.__delattr__(node, "compute")
