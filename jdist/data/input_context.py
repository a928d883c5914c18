"""What a dataset function is told about its place among the input pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jdist.data.source import whole_number
from jdist.errors import BatchError, DatasetError


@dataclass(frozen=True, kw_only=True)
class InputContext:
    """Which input pipeline a dataset function makes, of how many, for how many replicas.

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
            from jdist.tensorflow_names import unknown

            raise unknown("a jdist.InputContext", name, dir(type(self)))

    def per_replica_batch(self, global_batch: int) -> int:
        """Rows of one replica's batch.

        Args:
            global_batch: rows of a batch over all replicas.

        Returns:
            `global_batch / num_replicas_in_sync`.

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
