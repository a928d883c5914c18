"""What a worker is told before it gets closures: where the state is, and the functions and datasets that they are of."""

from __future__ import annotations

from collections.abc import Sequence

from jdist.ps.closures import Installable
from jdist.ps.replica_watch import Copies
from jdist.ps.shards import ShardClient, unreached
from jdist.ps.times import Times
from jdist.ps.transport.seam import Channel, Header
from jdist.ps.wire import to_plain

REACH_S = 3.0  # within which a server answers whoever there is a way from


class Briefing:
    """Tells workers.

    Args:
        shards: the shards that keep the state.
        addresses: theirs.
        copies: of each shard, where its two copies are; none where it has one.
        times: how long an answer may take.
    """

    def __init__(self, shards: Sequence[ShardClient], addresses: Sequence[str], copies: Sequence[Copies], times: Times):
        self._shards, self._addresses, self._copies, self._times = shards, list(addresses), copies, times

    def attach(self, channel: Channel) -> None:
        """Tells a worker where the state is."""
        keepings = [to_plain(client.keeping) for client in self._shards]
        header = {"addresses": self._addresses, "keepings": keepings}
        channel.call("attach", {**header, **self.routes()}, timeout_s=self._times.lost_after_s)

    def unreached(self, channel: Channel) -> tuple[list[str], bool]:
        """Asks a worker which servers do not answer it.

        Returns:
            `(addresses, is_cut)`: whether all of these answer this process, so that it is the links to them that are cut.
        """
        timeout_s = min(REACH_S, self._times.lost_after_s)
        answer, _ = channel.call("unreached", {"timeout_s": timeout_s}, timeout_s=timeout_s + self._times.lost_after_s)
        found = answer["unreached"]
        same = [client for client in self._shards if client.channel.peer in found]
        return found, bool(same) and not unreached(same, timeout_s)

    def routes(self) -> Header:
        """Where the leader of each shard is, as workers are told; nothing where shards have one copy."""
        return {"routes": [to_plain(copies.channel.route) for copies in self._copies]} if self._copies else {}

    def install(self, channel: Channel, number: int, installable: Installable) -> str:
        """Gives a worker a function; its name there."""
        program = installable.program
        header = {"function": to_plain(installable.function), "program": program.size, "number": number}
        answer, _ = channel.call("install", header, [program], timeout_s=self._times.install_s)
        return answer["name"]

    def open_dataset(self, channel: Channel, dataset: Header) -> str | None:
        """Makes a dataset known to a worker; why it cannot be made there, or None."""
        answer, _ = channel.call("open", dataset, timeout_s=self._times.install_s)
        return answer.get("error")
