"""How batches are made ahead of the step, and by how many input pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jdist.data.shards import Policy
from jdist.data.source import whole_number
from jdist.errors import DatasetError

Replication = Literal["per_worker", "per_replica"]


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How batches are made ahead and put on the devices.

    Attributes:
        prefetch: how many batches (stacks, with `steps_per_call`) a background thread makes ahead; 0: none.
        prefetch_to_device: whether the thread puts them on the devices too. False keeps them in host memory until
            the step's loop takes them: less device memory, and the copy is no longer hidden behind the step.
        replication: for `distribute_datasets_from_function`: "per_worker" calls the function once a process, and its
            replicas take turns; "per_replica" calls it once for each replica.
        autoshard: for `distribute_dataset`, how several processes share the source; one process has it all. "data": each
            reads the whole source, of arrays its own rows only, and keeps its rows of every global batch; iterables whose
            batches differ in rows, shapes or number are refused. "file": of
            `jdist.data.from_files`, file i is read by process `i % processes`, which makes its part of every global
            batch from its own files. "off": each process's source gives its own rows already. "auto": "file" where
            there are as many files as processes, else "data". What a batch holds depends on the number of processes
            under "file" and "off", and does not under "data".

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
        whole_number(self.prefetch, name="prefetch", least=0)
        if not isinstance(self.prefetch_to_device, bool):
            raise DatasetError(f"`prefetch_to_device` must be True or False, but it is {self.prefetch_to_device!r}")
        for name, allowed in (("replication", get_args(Replication)), ("autoshard", get_args(Policy))):
            value = getattr(self, name)
            if value not in allowed:
                *most, last = map(repr, allowed)
                raise DatasetError(f"`{name}` must be {', '.join(most)} or {last}, but it is {value!r}")
