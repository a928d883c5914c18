"""Options of the input, and the context of a dataset function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from jdist.data.position import WHOLE, ProcessShard
from jdist.errors import BatchError, DatasetError
from jdist.support import checks
from jdist.typing import PyTree

if TYPE_CHECKING:
    from jdist.data.lockstep import Peers

Partial = Literal["pad", "drop", "error"]
Policy = Literal["auto", "file", "data", "off"]
Replication = Literal["per_worker", "per_replica"]


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Options of prefetching, of input pipelines, and of sharing among processes.

    Attributes:
        prefetch: how many batches (stacks, with `steps_per_call`) a background thread makes ahead; 0: none.
        prefetch_to_device: whether the thread puts them on the devices too. False keeps them in host memory until
            the step's loop takes them: less device memory, and the copy is no longer hidden behind the step.
        replication: for `distribute_datasets_from_function`: "per_worker" calls the function once a process, and its
            replicas take turns; "per_replica" calls it once for each replica.
        autoshard: for `distribute_dataset`, how several processes share the source; one process has it all. "data": each
            reads the whole source, of arrays its own rows only, and keeps its rows of every global batch; iterables with
            batches that differ in rows, shapes or number are refused. "file": of `jdist.data.from_files`, file i is read by
            process `i % processes`, which makes its part of every global batch from its own files. "off": each process's
            source gives its own rows already. "auto": "file" where there are as many files as processes, else "data". What a
            batch holds, its padding included, depends on the number of processes under "file" and "off", not under "data".

    Raises:
        DatasetError: a value is not allowed.

    Example:
        >>> import jdist
        >>> jdist.InputOptions(prefetch=4).replication
        'per_worker'

    Source: `tf.distribute.InputOptions`, https://www.tensorflow.org/api_docs/python/tf/distribute/InputOptions, and
    `tf.data.experimental.AutoShardPolicy`
    """

    prefetch: int = 2
    prefetch_to_device: bool = True
    replication: Replication = "per_worker"
    autoshard: Policy = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefetch", checks.whole_number("prefetch", self.prefetch, DatasetError, least=0))
        checks.flag("prefetch_to_device", self.prefetch_to_device, DatasetError)
        checks.choice("replication", self.replication, get_args(Replication), DatasetError)
        checks.choice("autoshard", self.autoshard, get_args(Policy), DatasetError)


def input_options(options: InputOptions | None, prefetch: int | None) -> InputOptions:
    """Makes the input options of a call's `options`, or of its own keyword `prefetch`."""
    if options is None:
        return InputOptions() if prefetch is None else InputOptions(prefetch=prefetch)
    if not isinstance(options, InputOptions):
        raise DatasetError(f"`options` must be a `jdist.InputOptions`, but it is a {type(options).__name__}")
    if prefetch is not None:
        raise DatasetError(
            f"`prefetch` is given twice: prefetch={prefetch!r}, and {options.prefetch} in `options`. Leave out the "
            f"keyword and write `options=jdist.InputOptions(prefetch={prefetch!r}, ...)`"
        )
    return options


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """Options of the way from a source to the replicas; a strategy's `distribute_dataset` makes them of its arguments.

    Attributes:
        num_replicas: how many replicas share the rows of a global batch.
        place: puts a host batch with leaves [rows, ...] ([steps, rows, ...] with `steps_per_call` above 1) on the devices;
            called from the prefetch thread (see `jdist.InputOptions`), where a consumer's `with
            jax.default_device(...)` or the like does not reach. None leaves batches on the host.
        place_spec: maps the tree of `element_spec`, for example to add shardings. None leaves it.
        partial: what to do with a batch that has fewer rows than the first: "pad" fills it up and masks the filling,
            "drop" leaves it out, "error" refuses it. "pad" also rounds the global batch up to a multiple of
            `num_replicas`; the others require that it divides.
        with_mask: yield `(batch, mask)`; else a dict gains a `mask` leaf, and other trees have no mask.
        steps_per_call: stack this many batches on a new leading axis. The rest at the end comes as a smaller stack, which
            compiles a step again.
        batch_axis: the axis of the rows in the source's batches, or a tree of them; `place` gets rows first.
        shapes: how many shapes the batches may have, see `Strategy.distribute_dataset`.
        input: how batches are made ahead, and how several processes share the source.
        share: which rows of each global batch this process makes; `place` gets these alone.
        peers: by which several processes agree on what each has; None: they all read the same.
        orders: the shuffled sources that were read to their end under the same strategy, so that a repeat is reported.

    Raises:
        DatasetError: a value is not allowed.
    """

    num_replicas: int
    place: Callable[[PyTree], PyTree] | None = None
    place_spec: Callable[[PyTree], PyTree] | None = None
    partial: Partial = "pad"
    with_mask: bool = False
    steps_per_call: int = 1
    batch_axis: Any = 0
    shapes: int = 1
    input: InputOptions = InputOptions()
    share: ProcessShard = WHOLE
    peers: Peers | None = None
    orders: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.choice("partial", self.partial, get_args(Partial), DatasetError)
        for name in ("num_replicas", "steps_per_call", "shapes"):
            object.__setattr__(self, name, checks.whole_number(name, getattr(self, name), DatasetError))
        if self.shapes > 1 < self.steps_per_call:
            raise DatasetError(
                f"`shapes` is {self.shapes} and `steps_per_call` is {self.steps_per_call}: the batches of one call are "
                "stacked, so they need one shape. Leave one of them at 1"
            )


@dataclass(frozen=True, kw_only=True)
class InputContext:
    """The input pipeline that a dataset function makes: which of how many, for how many replicas.

    Attributes:
        num_input_pipelines: how many pipelines feed the replicas together.
        input_pipeline_id: which of them this is, from 0.
        num_replicas_in_sync: how many replicas all pipelines feed, over all processes.

    Raises:
        DatasetError: a number is out of range.

    Example:
        >>> import jdist
        >>> context = jdist.InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=2)
        >>> context.per_replica_batch(8)
        4

    Source: `tf.distribute.InputContext`, https://www.tensorflow.org/api_docs/python/tf/distribute/InputContext
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def __post_init__(self) -> None:
        checks.whole_number("num_replicas_in_sync", self.num_replicas_in_sync, DatasetError)
        pipelines = checks.whole_number("num_input_pipelines", self.num_input_pipelines, DatasetError)
        checks.whole_number("input_pipeline_id", self.input_pipeline_id, DatasetError, least=0, most=pipelines - 1)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from jdist.support.tensorflow_names import unknown

            raise unknown("a jdist.InputContext", name, dir(type(self)))

    def per_replica_batch(self, global_batch: int) -> int:
        """Divides `global_batch`, in rows, by `num_replicas_in_sync`.

        Raises:
            DatasetError: `global_batch` is not a whole number, 1 or more.
            BatchError: it does not divide.
        """
        rows = checks.whole_number("global_batch", global_batch, DatasetError)
        n = self.num_replicas_in_sync
        below = rows // n * n
        if below == rows:
            return rows // n
        nearest = f"{below} or {below + n}" if below else f"{n}"
        raise BatchError(
            f"a global batch of {rows} rows does not divide by {n} replicas, so a per-replica batch has no "
            f"single size; use a global batch of {nearest}, or `strategy.distribute_dataset`, which pads"
        )
