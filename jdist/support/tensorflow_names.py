"""jdist's counterparts of TensorFlow's common names, for errors; docs/tf_symbols.md has all of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

from jdist.support.words import did_you_mean

P = ParamSpec("P")
T = TypeVar("T")
_GUIDE = "docs/tf_symbols.md has all names."
_MODEL_AXIS = (
    '`jax.lax.with_sharding_constraint(x, PartitionSpec(..., "model"))` in the step, under '
    '`jdist.sharded(mesh={"replica": -1, "model": 2})`'
)
NAMES = {
    "MirroredStrategy": "`jdist.mirrored()`",
    "OneDeviceStrategy": "`jdist.one_device(device)`",
    "TPUStrategy": "`jdist.tpu()`",
    "CentralStorageStrategy": "`jdist.central_storage()`",
    "MultiWorkerMirroredStrategy": "`jdist.multi_worker()`",
    "ParameterServerStrategy": "`jdist.parameter_server()`",
    "ReduceOp": 'the strings "sum" and "mean"',
    "get_replica_context": "not needed: `jdist.all_reduce`, `jdist.replica_id` and the others are functions",
    "experimental_distribute_dataset": "`strategy.distribute_dataset(dataset)`",
    "experimental_distribute_datasets_from_function": "`strategy.distribute_datasets_from_function(fn)`",
    "experimental_distribute_values_from_function": "`strategy.distribute_values_from_function(fn)`",
    "experimental_local_results": "`strategy.local_results(values)`",
    "experimental_run_v2": "`strategy.run(fn, ...)`, and `@jdist.distribute(strategy)` for a training step",
    "num_replicas_in_sync": "`num_replicas`",
    "cluster_resolver": "`strategy.cluster`",
    "extended": "not needed: `strategy.devices`, `strategy.mesh` and the other fields are on the strategy itself",
    "merge_call": "not needed: a step calls `jdist.all_reduce` and the other collectives directly",
    "batch_reduce": "`jdist.all_reduce(tree)` in a step, which reduces a whole tree; `strategy.reduce(op, value)` outside",
    "experimental_assign_to_logical_device": "`jax.device_put(x, device)`, or a sharding in the step",
    "experimental_replicate_to_logical_devices": _MODEL_AXIS,
    "experimental_split_to_logical_devices": _MODEL_AXIS,
    "get_next": "`next(iterator)`",
    "get_next_as_optional": "`next(iterator, None)`",
    "get_per_replica_batch_size": "`context.per_replica_batch(global_batch)`",
    "ModelCheckpoint": '`jdist.callbacks.checkpoint(folder, best="eval/loss")`',
    "BackupAndRestore": "`jdist.callbacks.checkpoint(folder)`",
    "EarlyStopping": '`jdist.callbacks.early_stopping("eval/loss")`',
    "TerminateOnNaN": "`jdist.callbacks.nan_guard()`",
    "CSVLogger": "`jdist.callbacks.csv(path)`",
    "TensorBoard": "`jdist.callbacks.tensorboard(folder)`",
    "LearningRateScheduler": "an optax schedule, as the optimizer's learning rate",
    "ReduceLROnPlateau": "`optax.contrib.reduce_on_plateau`, in the optimizer",
}
VALUE_NAMES = {"fetch": "`value.result()`", "get": "`value.result()`"}  # of a RemoteValue
KEYWORDS = {
    "global_batch_size": "global_batch",
    "batch_size": "global_batch",
    "cross_device_ops": "all_reduce",
    "monitor": "metric",
}


def unknown(owner: str, name: str, known: Iterable[str], names: Mapping[str, str] = NAMES) -> AttributeError:
    """Makes the error for an unknown name, with jdist's counterpart if it is TensorFlow's, or the nearest name."""
    if name in names:
        more = f": TensorFlow's {name} is {names[name]}. {_GUIDE}"
    else:
        hint = "" if name.startswith("_") else did_you_mean(name, known)
        more = f".{hint}" if hint else ""
    return AttributeError(f"{owner} has no attribute {name!r}{more}", name=name)


def without_tensorflow_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function so that TensorFlow's keywords raise an error that names jdist's."""
    parameters = inspect.signature(function).parameters
    theirs = {name for name, ours in KEYWORDS.items() if ours in parameters}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in theirs & kwargs.keys():
            raise TypeError(
                f"{function.__name__} has no argument {name!r}: TensorFlow's {name} is `{KEYWORDS[name]}`. {_GUIDE}"
            )
        return function(*args, **kwargs)

    return call
