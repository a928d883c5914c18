"""The `Strategy` value: where replicas live and which functions lay out, compile and feed a step there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from jdist.cluster.runtime import Runtime, alone
from jdist.core import context, host_reduce
from jdist.core.operations import Operations, Parts
from jdist.core.per_replica import PerReplica, ValueContext, values_from_function
from jdist.core.remote import Coordinator
from jdist.core.replica_mesh import ReplicaMesh
from jdist.data.options import FeedOptions, input_options
from jdist.support.table import Table
from jdist.support.tracebacks import without_own_frames
from jdist.typing import PyTree, State

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jdist.core.state_report import StateReport
    from jdist.data.dataset import DistributedDataset
    from jdist.data.options import InputContext, InputOptions
    from jdist.data.sources.protocol import RandomAccessSource


@dataclass(frozen=True, kw_only=True, eq=False)
class Strategy(ReplicaMesh):
    """A way to spread a train step over devices: an immutable value that `jdist.mirrored()` and its like build.

    Attributes:
        name: "default", "one_device", "mirrored", ...
        devices: the devices of the mesh, in its order; empty under default.
        mesh: the device mesh, or None under default.
        axes: the mesh axes that replicas are spread over; empty under default. The mesh's others are inside each replica.
        transform: how a step for one replica becomes a step over the mesh; None under default.
        reduction: the all-reduce algorithm.
        operations: the functions behind the methods.
        cluster: the processes that take part, this one among them, or this one alone.
        topology: what the devices are part of if they are not here, such as "v5p:8x8x8"; None for devices
            that are. Under such a strategy a step can be lowered and compiled, and nothing can be run.
        parts: how states are kept in parts; None: every replica holds them whole.
    """

    operations: Operations = field(repr=False)
    cluster: Runtime = field(default_factory=alone)
    parts: Parts | None = None

    if not TYPE_CHECKING:  # for type checkers there are the fields and methods alone

        def __getattr__(self, name: str) -> Any:
            from jdist.support.tensorflow_names import unknown

            raise unknown("a jdist.Strategy", name, dir(type(self)))

    @property
    def coordinator(self) -> Coordinator | None:
        """Schedules functions on the workers of a parameter server; None elsewhere."""
        return self.operations.coordinator

    @without_own_frames
    @context.in_own_settings
    def init(self, fn: Callable[..., State], *args: PyTree) -> State:
        """Creates a state in the strategy's own layout.

        Every leaf is computed in its sharding, so the state is never built twice, and an array in parts is never whole.

        Args:
            fn: a pure function that makes the state, for example `create_state(key)`.
            *args: its arguments.

        Returns:
            `fn(*args)`, each leaf a `jax.Array` in its place; one in parts is a `ShardedLeaf`, which a step sees as an array.

        Raises:
            StepError: a leaf of the result is not an array, more of them would stay whole than the strategy allows, or a rule
                does not fit.

        Example:
            >>> import jax, jdist
            >>> jdist.one_device().init(lambda key: {"w": jax.random.normal(key, (3,))}, jax.random.key(0))["w"].shape
            (3,)
        """
        self.need_devices("init")
        with self.cluster.blocked():
            return self.operations.init(self, fn, args)

    @without_own_frames
    @context.in_own_settings
    def fetch(self, state: State) -> State:
        """Fetches the whole state to the host, once the steps in flight are done and the replicas were compared.

        Args:
            state: a state that a step under this strategy returned.

        Returns:
            The same tree with numpy leaves; typed PRNG keys stay key arrays.

        Raises:
            ReplicaDivergenceError: replicas hold different values.
            NonFiniteError: one of the steps that made `state` met a NaN or infinite gradient.
        """
        self.need_devices("fetch")
        with self.cluster.blocked():
            return self.operations.fetch(self, state)

    @without_own_frames
    def report(self, state: State | None = None) -> StateReport:
        """Shows this strategy's devices, hosts and servers, and which part of a state each of them holds, leaf by leaf.

        It plans: `jdist.show` says where a state is now. A state that the strategy would refuse is marked so.

        Args:
            state: arrays, or their shapes (`jax.eval_shape(create, key)`); None for the devices alone.

        Returns:
            The report: a notebook draws it, `print` writes it as text, `report.save("state.svg")` keeps the picture.

        Raises:
            StepError: the state is a function or has no leaves; or a rule does not fit it.

        Example:
            >>> import jax, jax.numpy as jnp, jdist
            >>> shapes = jax.eval_shape(lambda: {"w": jnp.ones((3, 5))})
            >>> print(jdist.one_device("cpu:0").report(shapes))
            one_device: 1 replica, 1 device of 1 process, cpu (cpu)
              a state of 1 array, 60 B; 60 B on the device
              leaf   array          bytes  how it is kept  bytes a device
              ['w']  float32[3, 5]     60  whole on cpu:0              60
              all                      60  100.0% of it                60
              A  whole on cpu:0: 1 array, 60 B (['w'])
            this machine
              cpu:0  replica 0  60 B  A whole
        """
        return self.operations.report(self, state)

    @without_own_frames
    def shapes(self, state: PyTree) -> PyTree:
        """Describes a state in this strategy's layout: `Checkpointer.restore` fills that, with no state made first.

        Args:
            state: a tree of arrays, or of their shapes: all of a state or some of it.

        Returns:
            The same tree of `jax.ShapeDtypeStruct`s with their shardings; of an array in parts it is in a `ShardedLeaf`.

        Raises:
            StepError: more of the state would stay whole than the strategy allows, or a rule does not fit.
        """
        from jdist.core.division import shapes

        return shapes(self, state, is_all=False)

    @without_own_frames
    @context.in_own_settings
    def check(self, state: State) -> None:
        """Waits for the steps in flight and compares the replicas' copies of `state` bit by bit; call it before every save.

        Raises:
            NonFiniteError: one of the steps that made `state` met a NaN or infinite gradient.
            ReplicaDivergenceError: names the leaves and the replicas that differ.
        """
        self.need_devices("check")
        with self.cluster.blocked():
            self.operations.check(self, state)

    @without_own_frames
    @context.in_own_settings
    def run(self, fn: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls `fn` once on every replica.

        Args:
            fn: a function of one replica's values; it may use the replica calls (`jdist.replica_id()`, ...).
            *args: `PerReplica` values (of one size on all replicas) and distributed batches arrive as the replica's own
                part, all else whole; True and False stay Python's.
            **kwargs: as `args`. TensorFlow's `run(fn, args=(x,), kwargs={...})` works where `fn` has no such parameters.

        Returns:
            `fn`'s result, wrapped in `PerReplica`; every leaf gains a leading axis of `num_replicas`. Under `jdist.default()`
            `fn` is called and its result returned, both unchanged.
        """
        self.need_devices("run")
        with self.cluster.blocked():
            return self.operations.run(self, fn, args, kwargs)

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Splits a value into the versions of the replicas, on the host.

        Args:
            value: a `PerReplica`, a distributed batch (each replica's rows), or a tree with such in it.

        Returns:
            A tree of numpy arrays for each replica, in order; `(value,)` where nothing in it differs between replicas.

        Raises:
            StepError: a `PerReplica` of another number of replicas.
        """
        with self.cluster.blocked():
            return host_reduce.local_results(value, self)

    @without_own_frames
    @context.in_own_settings
    def distribute_values_from_function(self, fn: Callable[[ValueContext], PyTree]) -> PerReplica:
        """Makes a value for each replica.

        Args:
            fn: called on the host once for each replica, with a `jdist.ValueContext`; returns a pytree of arrays or
                numbers. Sizes may differ between replicas; such values stay on the host and cannot go into `run` or a step.

        Returns:
            A `PerReplica`, each replica's value on its own device.

        Raises:
            StepError: the values' trees differ, or hold something other than arrays of numbers.

        Example:
            >>> import jdist
            >>> strategy = jdist.one_device()
            >>> value = strategy.distribute_values_from_function(lambda context: context.replica_id_in_sync_group + 5)
            >>> [int(x) for x in strategy.run(lambda x: x * 2, value).local_results()]
            [10]
        """
        self.need_devices("distribute_values_from_function")
        return values_from_function(fn, self)

    @without_own_frames
    @context.in_own_settings
    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenates what the replicas hold, on the host.

        Args:
            value: a `PerReplica` or a distributed batch, each leaf of rank 1 or more.
            axis: the axis to concatenate along, on which alone sizes may differ; negative counts from the end.

        Returns:
            A tree of numpy arrays.

        Raises:
            StepError: a leaf is a scalar, has no such axis, or differs in size on another one.
        """
        with self.cluster.blocked():
            return host_reduce.gather(value, axis, self)

    @without_own_frames
    @context.in_own_settings
    def reduce(self, op: host_reduce.HostReduceOp, value: PyTree, axis: int | tuple[int, ...] | None = None) -> PyTree:
        """Reduces what the replicas hold to one value, on the host.

        Args:
            op: "sum" or "mean", or TensorFlow's "SUM" or "MEAN".
            value: a `PerReplica` or a distributed batch. A plain value is one value on any number of replicas, also for a sum.
            axis: None reduces over the replicas alone, shapes are then alike. An axis, or a tuple of them, is reduced as
                well, and its size may differ between replicas: a mean divides by the true count.

        Returns:
            A tree of numpy arrays of their own dtype; a mean of integers is floating point, and a sum of bools or of
            integers of less than 32 bits has 32.

        Raises:
            StepError: `op` or `axis` is not allowed, what is left differs in shape, or a mean of nothing.

        Example:
            >>> import jdist, numpy as np
            >>> strategy = jdist.one_device()
            >>> float(strategy.reduce("mean", jdist.PerReplica.of([np.arange(4)]), axis=0))
            1.5
        """
        with self.cluster.blocked():
            return host_reduce.reduce(op, value, axis, self)

    @without_own_frames
    @context.in_own_settings
    def distribute_dataset(
        self,
        dataset: Iterable[PyTree],
        options: InputOptions | None = None,
        *,
        partial: Literal["pad", "drop", "error"] = "pad",
        with_mask: bool = False,
        steps_per_call: int = 1,
        batch_axis: Any = 0,
        prefetch: int | None = None,
        shapes: int = 1,
    ) -> DistributedDataset:
        """Feeds global batches to the replicas.

        Args:
            dataset: `jdist.data.from_arrays(...)`, a dataset of Grain, Hugging Face, PyTorch or `tf.data` with batches as
                elements, or any iterable of numpy pytrees, one global batch each. With several processes all make the same
                one, unless `autoshard` of the options says otherwise.
            options: how batches are made ahead, and how several processes share the dataset: `jdist.InputOptions()`.
            partial: what to do with a batch that has fewer rows than the first: pad it and mask the padding,
                leave it out, or refuse it.
            with_mask: yield `(batch, mask)` with the batch's own tree unchanged. Without it a dict gains the mask as its leaf
                "mask", and must not have such a leaf of its own; other trees have no mask.
            steps_per_call: how many batches go into one call of a step made with the same option.
            batch_axis: the axis that the rows of a batch are on, here and in the step, made with the same option: an int, or
                a tree of them with which the batch's tree begins. A mask that is added leads with its rows.
            prefetch: how many batches a background thread puts on the devices ahead of the consumer; 0: none. Short for
                `options=jdist.InputOptions(prefetch=...)`; None: 2.
            shapes: how many shapes batches may have: lengths of buckets, batches of a token budget, leaves that some lack. The
                step is compiled once for each. A short batch is filled up to an earlier one of its shape.

        Returns:
            An iterable with `element_spec`, `state()` and `restore(state)`.

        Raises:
            DatasetError: the dataset is empty or not what it says, or `prefetch` is given in `options` too.
            BatchError: a batch does not fit the replicas, or its leaves disagree.
        """
        self.need_devices("distribute_dataset")
        asked = dict(partial=partial, with_mask=with_mask, steps_per_call=steps_per_call, batch_axis=batch_axis)
        return self.operations.feed_batches(self, dataset, self._feed(options, prefetch, shapes=shapes, **asked))

    def _feed(self, options: InputOptions | None, prefetch: int | None, **asked: Any) -> FeedOptions:
        return FeedOptions(num_replicas=self.num_replicas, input=input_options(options, prefetch), **asked)

    @without_own_frames
    @context.in_own_settings
    def distribute_datasets_from_function(
        self,
        fn: Callable[[InputContext], Iterable[PyTree] | RandomAccessSource],
        options: InputOptions | None = None,
        *,
        partial: Literal["pad", "drop", "error"] = "pad",
        with_mask: bool = False,
        steps_per_call: int = 1,
        batch_axis: Any = 0,
    ) -> DistributedDataset | Iterable[Any]:
        """Feeds the replicas from datasets that a function makes, batched for one replica.

        The function is called at once, once for each process, with its place among all input pipelines; each step takes
        as many successive batches from its dataset as the process has replicas, one for each, in their order. With
        `InputOptions(replication="per_replica")` it is called once for each replica, which takes its own dataset's next
        batch. Padding is at the end of the joined global batch: where a batch is short, the rows behind it move up.

        Under a parameter server it runs on the workers, and each must be able to find it: see
        `strategy.coordinator.create_per_worker_dataset`.

        Args:
            fn: from a `jdist.InputContext` to a source of per-replica batches.
            options: how batches are made ahead; None: `jdist.InputOptions()`.
            partial: as for `distribute_dataset`; a full batch is one of per-replica batches as large as the first.
            with_mask: as for `distribute_dataset`.
            steps_per_call: as for `distribute_dataset`.
            batch_axis: as for `distribute_dataset`.

        Returns:
            An iterable with `element_spec`, and with `state()` and `restore(state)` if every source can resume.

        Raises:
            DatasetError: `fn` is not a function, or made no source.
            BatchError: per-replica batches of one step differ in more than their rows.

        Example:
            >>> import numpy as np
            >>> import jdist
            >>> def dataset(context):
            ...     return jdist.data.from_arrays({"x": np.arange(4)}, global_batch=context.per_replica_batch(2))
            >>> [batch["x"].tolist() for batch in jdist.default().distribute_datasets_from_function(dataset)]
            [[0, 1], [2, 3]]

        Source: `tf.distribute.Strategy.distribute_datasets_from_function`.
        """
        self.need_devices("distribute_datasets_from_function")
        asked = dict(partial=partial, with_mask=with_mask, steps_per_call=steps_per_call, batch_axis=batch_axis)
        return self.operations.feed_pipelines(self, fn, self._feed(options, None, **asked))

    def scope(self) -> AbstractContextManager[Strategy]:
        """Makes this the current strategy within a `with` block: `jdist.get_strategy()` then returns it.

        Raises:
            StrategyError: another strategy's scope is open; the same one's may be opened again.
        """
        return context.scope(self)

    def __repr__(self) -> str:
        return f"Strategy({self.name}: {self.operations.describe(self)})"

    def _repr_html_(self) -> str:
        rows = {"strategy": self.name, "replicas": self.num_replicas}
        if self.mesh is not None:
            devices = ", ".join(map(str, self.devices[:8])) + (", ..." if len(self.devices) > 8 else "")
            rows |= {"devices": devices, "mesh": dict(self.mesh.shape), "transform": self.transform}
            rows["all-reduce"] = self.reduction.name
        return Table("", [*rows.items()])._repr_html_()
