"""How batches are made ahead of the step, and by how many input pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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

    Raises:
        DatasetError: a value is not allowed.

    Example:
        >>> import jdist
        >>> jdist.InputOptions(prefetch=4).replication
        'per_worker'

    Source: `tf.distribute.InputOptions`, https://www.tensorflow.org/api_docs/python/tf/distribute/InputOptions
    """

    prefetch: int = 2
    prefetch_to_device: bool = True
    replication: Replication = "per_worker"

    def __post_init__(self) -> None:
        whole_number(self.prefetch, name="prefetch", least=0)
        if not isinstance(self.prefetch_to_device, bool):
            raise DatasetError(f"`prefetch_to_device` must be True or False, but it is {self.prefetch_to_device!r}")
        if self.replication not in get_args(Replication):
            allowed = " or ".join(map(repr, get_args(Replication)))
            raise DatasetError(f"`replication` must be {allowed}, but it is {self.replication!r}")
