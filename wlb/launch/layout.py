"""Where the watch of a run is: its nodes, their aggregators, the root and its standby."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wlb.launch.aggregator import AggregatorJob
from wlb.launch.reporter import Reporting
from wlb.launch.root import WatchLimits


class Leader(NamedTuple):
    """Description of a node's aggregator by the first rank of the node, which starts it. port: for
    the node's ranks. root: an address at which it could be the root. token, failure_id: drawn by
    rank 0."""

    port: int
    root: tuple[str, int]
    token: str
    failure_id: str


class Attendance(NamedTuple):
    """Message of a rank at the start. node: equal on ranks of a node. leader: of its first rank."""

    node: tuple[int, str]
    leader: Leader | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLayout:
    """nodes: ranks of each node, the node of rank 0 first. leaders: of each node."""

    nodes: tuple[tuple[int, ...], ...]
    leaders: tuple[Leader, ...]
    hosts: tuple[str, ...]

    @classmethod
    def of(cls, ranks: Sequence[Attendance]) -> "WatchLayout":
        """The layout from the messages of all ranks. LookupError if nobody starts a node's
        aggregator."""
        nodes: dict[tuple[int, str], list[int]] = {}
        for rank, said in enumerate(ranks):
            nodes.setdefault(said.node, []).append(rank)
        leaders: list[Leader] = []
        for members in nodes.values():
            found = [leader for rank in members if (leader := ranks[rank].leader) is not None]
            if len(found) != 1:
                raise LookupError(f"ranks {members} of a node have {len(found)} first ranks")
            leaders += found
        return cls(
            nodes=tuple(map(tuple, nodes.values())),
            leaders=tuple(leaders),
            hosts=tuple(host for _, host in nodes),
        )

    @property
    def roots(self) -> list[tuple[str, int]]:
        """Addresses of the root and, with several nodes, its standby on the second node."""
        return [leader.root for leader in self.leaders[:2]]

    def node_of(self, rank: int) -> int:
        return next(i for i, ranks in enumerate(self.nodes) if rank in ranks)

    def job(
        self, node: int, limits: WatchLimits, sockets: tuple[socket.socket, socket.socket]
    ) -> AggregatorJob:
        """The job of a node's aggregator. sockets: for the node's ranks, and for other nodes."""
        local, root = sockets
        return AggregatorJob(
            token=self.leaders[0].token,
            ranks=list(self.nodes[node]),
            roots=self.roots,
            root_name=f"the root, on {self.hosts[0]}",
            root_ranks=list(self.nodes[0]),
            is_root=node == 0,
            is_standby=node == 1,
            listener=local.fileno(),
            root_listener=root.fileno() if node < 2 else -1,
            num_nodes=len(self.nodes),
            world_size=limits.world_size,
            silence_s=limits.silence_s,
            stuck_s=limits.stuck_s,
            logs=str(limits.logs),
        )

    def reporting(self, rank: int, place: str) -> Reporting:
        """To whom a rank reports. A rank whose aggregator is lost goes to the root, or to its
        standby if the aggregator was the root."""
        node = self.node_of(rank)
        return Reporting(
            rank=rank,
            place=place,
            token=self.leaders[0].token,
            failure_id=self.leaders[0].failure_id,
            aggregator=("127.0.0.1", self.leaders[node].port),
            host=self.hosts[node],
            node_ranks=self.nodes[node],
            others=[root for i, root in enumerate(self.roots) if i != node],
        )
