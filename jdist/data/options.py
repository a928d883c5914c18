"""Options of the input, and the context of a dataset function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from jdist.data.batching import Partial
from jdist.data.sources.protocol import whole_number
from jdist.data.sources.shards import Policy
from jdist.errors import BatchError, DatasetError

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
            reads the whole source, of arrays its own rows only, and keeps its rows of every global batch; iterables whose
            batches differ in rows, shapes or number are refused. "file": of `jdist.data.from_files`, file i is read by
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
        object.__setattr__(self, "prefetch", whole_number(self.prefetch, name="prefetch", least=0))
        if not isinstance(self.prefetch_to_device, bool):
            raise DatasetError(f"`prefetch_to_device` must be True or False, but it is {self.prefetch_to_device!r}")
        for name, allowed in (("replication", get_args(Replication)), ("autoshard", get_args(Policy))):
            value = getattr(self, name)
            if value not in allowed:
                *most, last = map(repr, allowed)
                raise DatasetError(f"`{name}` must be {', '.join(most)} or {last}, but it is {value!r}")


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


@dataclass(frozen=True)
class FeedOptions:
    """Arguments of a strategy's `distribute_dataset`; see there."""

    partial: Partial
    with_mask: bool
    steps_per_call: int
    batch_axis: Any
    input: InputOptions
    shapes: int = 1

    def __post_init__(self) -> None:
        for name in ("steps_per_call", "shapes"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name=name, least=1))


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
        pipelines = whole_number(self.num_input_pipelines, name="num_input_pipelines", least=1)
        whole_number(self.num_replicas_in_sync, name="num_replicas_in_sync", least=1)
        if whole_number(self.input_pipeline_id, name="input_pipeline_id", least=0) >= pipelines:
            raise DatasetError(
                f"`input_pipeline_id` is {self.input_pipeline_id}, but there are {pipelines} input pipelines, "
                f"counted from 0; use 0 to {pipelines - 1}"
            )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            from jdist.support.tensorflow_names import unknown

            raise unknown("a jdist.InputContext", name, dir(type(self)))

    def per_replica_batch(self, global_batch: int) -> int:
        """Divides the rows of a global batch by `num_replicas_in_sync`.

        Raises:
            DatasetError: `global_batch` is no whole number, 1 or more.
            BatchError: it does not divide.
        """
        rows = whole_number(global_batch, name="global_batch", least=1)
        n = self.num_replicas_in_sync
        below = rows // n * n
        if below == rows:
            return rows // n
        nearest = f"{below} or {below + n}" if below else f"{n}"
        raise BatchError(
            f"a global batch of {rows} rows does not divide by {n} replicas, so there is no one per-replica "
            f"batch; use a global batch of {nearest}, or `strategy.distribute_dataset`, which pads"
        )
