"""Processes that feed one strategy, each in a thread of a test."""

from typing import Any

from jdist.data.lockstep import Peers
from jdist.data.position import ProcessShard
from tests.cluster.processes_in_one import Network, run
from tests.data.counting import distributed_dataset


class Job:
    """Processes that share datasets, each in a thread."""

    def __init__(self, count, *, replicas_each=1):
        self.count, self.replicas_each = count, replicas_each
        self.network = Network(count)

    def dataset(self, process, source, *, name="dataset 1", autoshard: Any = "off", **options) -> Any:
        share = ProcessShard(index=process, count=self.count)
        return distributed_dataset(
            source,
            num_replicas=self.count * self.replicas_each,
            place=None,
            share=share,
            autoshard=autoshard,
            peers=Peers(exchanges=self.network.exchanges[process], share=share, name=name),
            **options,
        )

    def run(self, program):
        """What `program(process)` gives on each."""
        return run(self.count, program)

    def batches(self, sources, **options):
        """All batches of each process, or why there are none; `sources[process]` or the one source of all."""

        def program(process):
            source = sources[process] if isinstance(sources, list) else sources
            return list(self.dataset(process, source, **options))

        return self.run(program)
