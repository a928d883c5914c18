"""Steps over flax nnx's mutable objects: `(model, optimizer, metrics, batch)` changed in place, on all replicas.

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
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Unpack, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jdist.core.step_state import user_state, with_user_state
from jdist.core.strategy import Strategy
from jdist.data.batch_axis import axes_of_leaves
from jdist.errors import StepError
from jdist.replica import collectives, gradients
from jdist.step.base import Distributed, Preview
from jdist.step.decorator import distribute as distribute_pure
from jdist.step.mesh_step import DistributedStep
from jdist.step.options import ArgRole, ReturnRole, RunKeywords, Verify, spelling_keywords
from jdist.step.signature import check_no_batch
from jdist.support.suggest import did_you_mean
from jdist.support.tracebacks import without_own_frames

PyTree = Any
_KINDS = (nnx.RngKey, nnx.metrics.MetricState, nnx.BatchStat, ...)  # `...`: all other variables


class _Variables(NamedTuple):
    """The state of a step's objects by kind; messages name leaves by it."""

    keys: Any
    metrics: Any
    batch_stats: Any
    others: Any


def value_and_grad(
    f: Callable[..., Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False, op: gradients.GradientOp = "mean"
) -> Callable[..., Any]:
    """As `nnx.value_and_grad`, with value and gradient averaged over the replicas.

    Args:
        f: a function of the model (and more) that returns a scalar loss, or `(loss, aux)`.
        argnums: as in nnx.
        has_aux: as in nnx; `aux` stays this replica's own.
        op: "mean", or "sum" where the loss is already divided by the global batch.

    Returns:
        A function that returns `(value, grads)` or `((value, aux), grads)`.
    """

    def lowered(*args: Any, **kwargs: Any) -> Any:
        precision = gradients.precision_in_use()
        if precision is None:
            return f(*args, **kwargs)
        which = argnums if isinstance(argnums, Sequence) else (argnums,)
        models = [args[i.argnum if isinstance(i, nnx.DiffState) else i] for i in which]
        # Copies: the variables in `nnx.state` are the model's own.
        wide = [jax.tree.map(lambda x: x, nnx.state(model, nnx.Param)) for model in models]
        for model, params in zip(models, wide, strict=True):
            nnx.update(model, precision.cast(params))
        result = f(*args, **kwargs)
        for model, params in zip(models, wide, strict=True):  # else nnx would take the cast for a change of the model
            nnx.update(model, params)
        return precision.result(result, has_aux)

    local = nnx.value_and_grad(lowered, argnums=argnums, has_aux=has_aux)

    def value_and_grad_of_all(*args: Any, **kwargs: Any) -> Any:
        value, grads = local(*args, **kwargs)
        if has_aux:
            loss, grads = gradients.combine_gradients(value[0], grads, op)
            return (loss, value[1]), grads
        return gradients.combine_gradients(value, grads, op)

    return value_and_grad_of_all


def grad(
    f: Callable[..., Any], *, argnums: int | Sequence[int] = 0, has_aux: bool = False, op: gradients.GradientOp = "mean"
) -> Callable[..., Any]:
    """As `nnx.grad`, averaged over the replicas; see `value_and_grad` for the arguments."""
    both = value_and_grad(f, argnums=argnums, has_aux=has_aux, op=op)

    def grad_of_all(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_of_all


@spelling_keywords
def distribute(
    strategy: Strategy,
    *,
    args: Sequence[ArgRole] | ArgRole = ("batch",),
    returns: Sequence[ReturnRole] | ReturnRole = ("metrics",),
    metrics: Mapping[type, collectives.ReduceOp] | None = None,
    **options: Unpack[RunKeywords],
) -> Callable[[Callable[..., Any]], NNXStep]:
    """Runs a step over mutable nnx objects on all replicas; takes the place of `@nnx.jit`.

    Arguments that hold nnx objects are the step's state and are changed in place.

    Args:
        strategy: what `jdist.mirrored()` and its like return.
        args: roles of the arguments that hold no objects, in turn; further ones are replicated, and refused where they look
            like a batch.
        returns: roles of what the step returns beside the objects.
        metrics: how the replicas' states of a metric of another class than `nnx.metrics.Average` and `Accuracy` come together:
            `{MyMetric: "sum"}`, "mean", "max" or "min"; by "sum" the first replica goes on from the old state and the others
            from zeros.
        **options: the other options of `jdist.distribute`.

    Returns:
        A decorator.

    Example:
        >>> import jdist, optax, jax.numpy as jnp
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> @jdist.nnx.distribute(jdist.one_device())
        ... def train_step(model, optimizer, batch):
        ...     loss, grads = jdist.nnx.value_and_grad(lambda m: jdist.mean(m(batch["x"]) ** 2))(model)
        ...     optimizer.update(model, grads)
        ...     return loss
        >>> losses = [float(train_step(model, optimizer, {"x": jnp.ones((4, 2))})) for _ in range(2)]
        >>> losses[1] < losses[0]
        True
    """
    args = (args,) if isinstance(args, str) else tuple(args)
    if "state" in args:
        raise StepError(
            f"`args` is {args!r}; jdist.nnx.distribute finds the objects itself. Say the roles of the other arguments "
            'alone: `args=("batch", "batch")`.'
        )
    returns = ("state", *((returns,) if isinstance(returns, str) else returns))
    ways: dict[type, collectives.ReduceOp] = {} if metrics is None else {**metrics}
    for kind, how in ways.items():
        if how not in get_args(collectives.ReduceOp):
            raise StepError(
                f"jdist.nnx.distribute: `metrics` has {how!r} for {getattr(kind, '__name__', kind)!r}; allowed are "
                f"{', '.join(map(repr, get_args(collectives.ReduceOp)))}.{did_you_mean(how, get_args(collectives.ReduceOp))}"
            )
    return lambda step: NNXStep(step, strategy, {**options, "args": args, "returns": returns}, ways)


class NNXStep(Distributed):
    """A step over nnx objects that runs on all replicas; `jdist.nnx.distribute` makes it.

    Attributes:
        strategy: the strategy it runs under.
        options: the options of `jdist.distribute`, `args` with "state" for the objects.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        strategy: Strategy,
        options: dict[str, Any],
        metrics: Mapping[type, collectives.ReduceOp],
    ):
        functools.update_wrapper(self, step)
        options = {**options, "args": ("static", "state", *options["args"])}
        distributed = distribute_pure(_pure(step, metrics), strategy, **options)
        if not isinstance(distributed, DistributedStep):
            raise StepError(
                f"under {strategy.name} the state lives in other processes and is updated there later, so objects of "
                "this one cannot be changed in place. Split them, `graphdef, state = nnx.split((model, optimizer))`, "
                "keep `strategy.init(lambda: state)`, merge them in the step, `model, optimizer = nnx.merge(graphdef, "
                "state)`, return `nnx.state((model, optimizer))` as the new state, and use `jdist.distribute`."
            )
        self._distributed: DistributedStep = distributed
        self.strategy = strategy
        self.options = dataclasses.replace(distributed.options, args=distributed.options.args[1:])
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._positional = [p.name for p in inspect.signature(step).parameters.values() if p.kind in by_position]
        self._around: Any = None  # nnx objects have no room for residuals and loss scale, so the step holds them

    @property
    def last_state(self) -> PyTree:
        """The newest state of the objects, as `nnx.update(objects, state)` takes it."""
        state = user_state(self._distributed.last_state)
        return None if state is None else nnx.merge_state(*state)

    def wait(self) -> None:
        """Waits for every call in flight; raises what `DistributedStep.wait` raises."""
        self._distributed.wait()

    def prepare(self, *args: Any, **kwargs: Any) -> PyTree:
        """The pure state of the objects as a call of the step keeps it; see `DistributedStep.prepare`."""
        args, kwargs = self._by_position(args, kwargs)
        static, state, rest, _ = _split(args)
        return self._distributed.prepare(static, with_user_state(self._around, state), *rest, **kwargs)

    def over(self, objects: PyTree) -> ObjectsStep:
        """This step over some objects as a step over their pure state, as a loop takes it.

        Args:
            objects: the step's arguments before the batch: a tuple of them, or the only one.

        Raises:
            StepError: the step takes other arguments.
        """
        declared = len(self.options.args) - 1
        names = self._positional[: len(self._positional) - declared]
        arguments = objects if isinstance(objects, tuple) and len(names) != 1 else (objects,)
        if self._positional and len(arguments) != len(names):
            raise StepError(
                f"{self.__name__} takes {len(names)} objects before the batch ({', '.join(names) or 'none'}), and the state "
                f"has {len(arguments)}. Give them in a tuple, in the order of the arguments."
            )
        return ObjectsStep(self, objects, arguments)

    def pure(self, args: tuple[Any, ...]) -> tuple[DistributedStep, tuple[Any, ...]]:
        """The step over pure states that a call runs, and its arguments."""
        static, state, rest, _ = _split(args)
        return self._distributed, (static, with_user_state(self._around, state), *rest)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Traces and lowers the step without running it; see `DistributedStep.lower`."""
        args, kwargs = self._by_position(args, kwargs)
        static, state, rest, _ = _split(args)
        self._check_undeclared(args, rest, kwargs)
        return self._distributed.lower(static, state, *rest, **kwargs)

    @without_own_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._by_position(args, kwargs)
        static, state, rest, objects = _split(args)
        self._check_undeclared(args, rest, kwargs)
        _, *results = self.run(static, with_user_state(self._around, state), rest, kwargs, objects)
        return results[0] if len(results) == 1 else tuple(results)

    def run(
        self, static: Any, state: PyTree, rest: tuple[Any, ...], kwargs: dict[str, Any], objects: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Runs the step over a pure state and gives the objects the new one.

        Args:
            static: graph definition, and which arguments are objects.
            state: the state of the objects, with what the step carries beside it.
            rest: the arguments that are no objects.
            kwargs: the arguments by keyword.
            objects: the objects.

        Returns:
            The new state, then what the step returns.
        """
        try:
            state, *results = self._distributed(static, state, *rest, **kwargs)
            return state, *results
        finally:
            # Also after an interrupt or an error: the arrays that the objects held may have been donated.
            newest = self._distributed.last_state
            if newest is not None and any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array)):
                state = newest
            self._around = with_user_state(state, None)
            nnx.update(objects, nnx.merge_state(*user_state(state)))

    def _by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, those that are named by position where they can be."""
        kwargs = dict(kwargs)
        while len(args) < len(self._positional) and self._positional[len(args)] in kwargs:
            args = (*args, kwargs.pop(self._positional[len(args)]))
        return args, kwargs

    def _check_undeclared(self, args: tuple[Any, ...], rest: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        options = self._distributed.options
        declared = options.args[2:]
        if len(rest) <= len(declared) and not kwargs:
            return
        places = [i for i, arg in enumerate(args) if not _holds_objects(arg)][len(declared) :]
        names = [f"`{self._positional[i]}`" if i < len(self._positional) else f"argument {i + 1}" for i in places]
        values = dict(zip(names, rest[len(declared) :], strict=True))
        values |= {f"`{name}`": value for name, value in kwargs.items() if name not in options.static_argnames}
        batches = tuple(value for value, role in zip(rest, declared, strict=False) if role == "batch")
        axes = axes_of_leaves(batches, options.batch_axis, lead=options.num_step_axes)
        remedy = (
            f"Pass it by position and say what it is, of the arguments without objects in turn: `args={(*declared, 'batch')}` "
            'if the replicas are to share its rows; "replicated" in that place if every replica gets it whole.'
        )
        check_no_batch(self.__name__, values, batches, axes, options, self._distributed.strategy, remedy)


class ObjectsStep(Distributed):
    """An nnx step over certain objects as a step over their pure state; `NNXStep.over` makes it.

    After each call the objects have the new state.

    Args:
        step: the step.
        objects: as they were given, a tuple or one.
        arguments: those of the step before the batch.

    Attributes:
        state: the objects' state, with what the step carries beside it.
    """

    def __init__(self, step: NNXStep, objects: PyTree, arguments: tuple[Any, ...]):
        self._step, self._given, self._objects = step, objects, arguments
        self._static, state, _, _ = _split((*arguments, None))
        self.state: PyTree = with_user_state(step._around, state)
        self.strategy, self.options, self.__name__ = step.strategy, step.options, step.__name__

    def __call__(self, state: PyTree, batch: PyTree) -> tuple[Any, ...]:
        """The new state and what the step returns."""
        return self._step.run(self._static, state, (batch,), {}, self._objects)

    def prepare(self, state: PyTree, batch: PyTree) -> PyTree:
        """The state as a call takes and returns it."""
        return self._step._distributed.prepare(self._static, state, batch)

    def preview(self, state: PyTree, batch: PyTree) -> Preview:
        """What a call would do, known with nothing compiled."""
        return self._step._distributed.preview(self._static, state, batch)

    def count_left_out(self, state: PyTree) -> Any:
        """See `Distributed`."""
        return self._step._distributed.count_left_out(state)

    def verify_next(self, how: Verify, *, pads: bool = False) -> None:
        """See `Distributed`."""
        self._step._distributed.verify_next(how, pads=pads)

    def wait(self) -> None:
        """Waits for every call in flight."""
        self._step.wait()

    def of_state(self, function: Callable[[Any, PyTree], Any]) -> Callable[[PyTree, PyTree], Any]:
        """A function `(objects, batch) -> results` as one of the objects' state."""

        @functools.wraps(function)
        def of_state(state: PyTree, batch: PyTree) -> Any:
            objects = nnx.merge(self._static[0], *user_state(state))
            return function(objects if self._given is self._objects else objects[0], batch)

        return of_state

    def with_state(self, state: PyTree) -> PyTree:
        """The objects as they were given, which have this state now."""
        nnx.update(self._objects, nnx.merge_state(*user_state(state)))
        return self._given


def _split(args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """`((graph definition, which arguments are objects), state by kind, other arguments, objects)`."""
    which = tuple(map(_holds_objects, args))
    if not any(which[:1]):
        raise StepError(
            "jdist.nnx.distribute: the step's first argument holds no nnx object. It must be the model, the optimizer "
            "or a tuple of them; for steps over pure states use `jdist.distribute`."
        )
    objects = tuple(arg for arg, is_object in zip(args, which, strict=True) if is_object)
    rest = tuple(arg for arg, is_object in zip(args, which, strict=True) if not is_object)
    graphdef, *state = nnx.split(objects, *_KINDS)
    return (graphdef, which), _Variables(*state), rest, objects


def _holds_objects(value: Any) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    return any(isinstance(leaf, nnx.Pytree) for leaf in leaves)


def _pure(step: Callable[..., Any], ways: Mapping[type, collectives.ReduceOp]) -> Callable[..., Any]:
    @functools.wraps(step)
    def pure(static: Any, state: tuple[Any, ...], *rest: Any, **kwargs: Any) -> Any:
        graphdef, which = static
        keys, metrics, statistics, others = state
        own_keys = jax.tree.map(collectives.replica_rng, keys)
        bound = collectives.replica_axes() is not None or collectives.num_replicas() > 1
        # A copy of the variables: the step changes the objects in place, and `metrics` must stay as it was.
        copies = jax.tree.map(lambda x: x, (metrics, statistics, others))
        objects = nnx.merge(graphdef, own_keys, *copies)
        ops = _ops(objects, ways) if bound else {}
        if bound:
            # What adds up: the first replica goes on from what was there, the others begin at zero, and all of it is summed.
            is_first = collectives.replica_id() == 0
            begun = _map_metrics(lambda op, x: jnp.where(is_first, x, 0) if op == "sum" else x, ops, metrics)
            nnx.update(objects, begun)
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

    # The wrapper's own parameters are what counts for binding arguments, not those of the step it wraps.
    del pure.__wrapped__
    return pure


def _ops(objects: PyTree, ways: Mapping[type, collectives.ReduceOp]) -> dict[tuple[Any, ...], collectives.ReduceOp]:
    """How the replicas' versions of each metric come together, by its path.

    Raises:
        StepError: names a metric whose class nothing is known of.
    """
    found: dict[tuple[Any, ...], collectives.ReduceOp] = {}
    for path, node in nnx.iter_graph(objects):
        if not isinstance(node, nnx.metrics.Metric) or isinstance(node, nnx.metrics.MultiMetric):
            continue
        known = type(node) in (nnx.metrics.Average, nnx.metrics.Accuracy)
        op: collectives.ReduceOp | None = ways.get(type(node))
        if op is None and known:
            op = "sum"
        if op is None:
            kind = type(node)
            name = f"nnx.metrics.{kind.__name__}" if kind.__module__.startswith("flax.") else kind.__name__
            raise StepError(
                f"metric {'.'.join(map(str, path))} is an {name}: how the states of several replicas become one is not "
                f'known of it. If they add up, say `jdist.nnx.distribute(..., metrics={{{name}: "sum"}})`, or "max", "min", '
                '"mean"; else use nnx.metrics.Average, or return the values as metrics of the step.'
            )
        found[path] = op
    return found


def _map_metrics(
    change: Callable[[collectives.ReduceOp, Any], Any], ops: dict[tuple[Any, ...], collectives.ReduceOp], metrics: Any
) -> Any:
    """The variables of metrics with each array changed, as its metric's op says."""

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
            "the step computes an nnx metric (`metrics.compute()`), which knows of one replica's rows there. Call it "
            "outside of the step, where the rows of all replicas are in; a value for each step is a metric that the step "
            "returns."
        )

    nodes = [node for _, node in nnx.iter_graph(objects) if isinstance(node, nnx.metrics.Metric)]
    for node in nodes:
        object.__setattr__(node, "compute", refuse)
    try:
        yield
    finally:
        for node in nodes:
            object.__delattr__(node, "compute")
