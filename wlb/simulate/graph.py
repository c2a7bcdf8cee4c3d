"""The events of a training step as a directed graph, which is built once for a layout.

Nodes are passes, messages between stages, and collectives over the data-parallel axis, in
topological order. A node starts when all its predecessors have ended. All pipelines have the same
graph, so one walk over its nodes computes the times of any number of steps and pipelines. A
collective starts on all pipelines at the same time, when the last pipeline is ready.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wlb.plan import IntArray
from wlb.simulate.order import Action, PassKind


class NodeKind(StrEnum):
    """Kinds of events in a step."""

    PASS = "pass"
    MESSAGE = "message"  # activations or gradients that are sent to another stage
    GATHER = "gather"  # FSDP all-gathers parameters before passes that wait for them
    PREFETCH = "prefetch"  # FSDP all-gathers parameters of later layers during a pass
    REDUCE_AHEAD = "reduce ahead"  # FSDP reduce-scatters gradients of layers during a pass
    REDUCE = "reduce"  # FSDP reduce-scatters gradients after a pass
    NORM = "norm"  # gradient norm
    OPTIMIZER = "optimizer"  # AdamW
    OVERHEAD = "overhead"  # time at the end of a step, as a fraction of the time in passes


JOINT = (
    NodeKind.GATHER,
    NodeKind.PREFETCH,
    NodeKind.REDUCE_AHEAD,
    NodeKind.REDUCE,
    NodeKind.NORM,
    NodeKind.OVERHEAD,
)
"""Kinds of nodes that all pipelines run together: dp collectives and the step's overhead."""


class Node(NamedTuple):
    """A node of the graph of a step: one event, such as a pass or a collective."""

    kind: NodeKind
    rank: int  # pipeline rank (of a message: the one that receives it); -1 means all ranks
    stage: int  # stage (of a message: the one that sends it); -1 means all stages
    # The pass, or the pass whose output the message carries. None for other kinds of nodes.
    action: Action | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """The events of a step in topological order."""

    nodes: tuple[Node, ...]
    predecessors: tuple[tuple[int, ...], ...]  # indices of the nodes for which each node waits
    # Number of neighbouring pipelines that share an EP group. In stages with experts they start
    # each pass together, when the last of them is ready. Weight-gradient passes do not wait.
    pipelines_per_ep_group: int = 1
    stages_with_experts: frozenset[int] = frozenset()  # stages that have layers with experts

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return 1 + max(node.rank for node in self.nodes)

    def indices(self, kind: NodeKind) -> list[int]:
        """Return the indices of all nodes of one kind."""
        return [i for i, node in enumerate(self.nodes) if node.kind == kind]

    def ends(self, durations_ns: IntArray) -> IntArray:
        """Return when each node ends, in ns after the start of the step.

        Args:
            durations_ns: Duration of each node, shape [num_nodes, num_steps, dp].

        Returns:
            End of each node, shape [num_nodes, num_steps, dp].
        """
        if durations_ns.shape[0] != len(self.nodes):
            raise ValueError(
                f"durations_ns has {durations_ns.shape[0]} rows, but the graph has "
                f"{len(self.nodes)} nodes; give one row for each node"
            )
        out = np.zeros_like(durations_ns)
        for i, (node, before) in enumerate(zip(self.nodes, self.predecessors, strict=True)):
            if before:
                ready = out[before[0]]
                for j in before[1:]:
                    ready = np.maximum(ready, out[j])
                if is_joint(node):
                    ready = ready.max(axis=1, keepdims=True)
                elif self._waits_for_ep_group(node):
                    grouped = ready.reshape(
                        len(ready), -1, min(self.pipelines_per_ep_group, ready.shape[1])
                    )
                    last = np.broadcast_to(grouped.max(axis=2, keepdims=True), grouped.shape)
                    ready = last.reshape(ready.shape)
                np.add(ready, durations_ns[i], out=out[i])
            else:
                out[i] = durations_ns[i]
        return out

    def _waits_for_ep_group(self, node: Node) -> bool:
        """Return whether the pipelines of an EP group start this node together."""
        if self.pipelines_per_ep_group == 1 or node.kind != NodeKind.PASS or node.action is None:
            return False
        is_of_weights = node.action.kind == PassKind.BACKWARD_WEIGHT
        return node.stage in self.stages_with_experts and not is_of_weights

    def critical_path(
        self, ends_ns: IntArray, durations_ns: IntArray, *, step: int = 0
    ) -> list[tuple[int, int]]:
        """Return the chain of events that determines the time of a step.

        Args:
            ends_ns: End of each node (`ends`), shape [num_nodes, num_steps, dp].
            durations_ns: Duration of each node, shape [num_nodes, num_steps, dp].
            step: Index of the step.

        Returns:
            (node, pipeline) pairs from the start of the step to its end. Each event started when
            the event before it ended.
        """
        last = ends_ns[:, step, :]
        node, pipeline = (int(x) for x in np.unravel_index(int(last.argmax()), last.shape))
        path = [(node, pipeline)]
        while before := self.predecessors[node]:
            if is_joint(self.nodes[node]):
                pipeline = int(last[list(before)].max(axis=0).argmax())
            elif self._waits_for_ep_group(self.nodes[node]):
                group = min(self.pipelines_per_ep_group, last.shape[1])
                first = pipeline - pipeline % group
                ready = last[list(before), first : first + group].max(axis=0)
                pipeline = first + int(ready.argmax())
            # If several predecessors end at the same time, take the longest one, because a pass
            # explains the delay better than a short message.
            node = max(before, key=lambda j: (last[j, pipeline], durations_ns[j, step, pipeline]))
            path.append((node, pipeline))
        return path[::-1]


def is_joint(node: Node) -> bool:
    """Return whether all pipelines run a node together: dp collectives and the step's overhead."""
    return node.kind in JOINT


def sorted_graph(
    nodes: Sequence[Node], predecessors: Sequence[Sequence[int]]
) -> tuple[Graph, npt.NDArray[np.int64]]:
    """Sort nodes topologically.

    Args:
        nodes: The events.
        predecessors: Indices of the nodes for which each node waits.

    Returns:
        The graph, and the index in the graph of each of `nodes`.

    Raises:
        ValueError: Some nodes wait for each other; the message names them.
    """
    # Nodes that become ready at the same time stay in the order in which they were given.
    sorter = TopologicalSorter[int]({i: () for i in range(len(nodes))})
    for i, before in enumerate(predecessors):
        sorter.add(i, *set(before))
    try:
        order = list(sorter.static_order())
    except CycleError as error:
        cycle: list[int] = error.args[1]
        stuck = [str(nodes[i].action or nodes[i].kind) for i in cycle]
        raise ValueError(
            f"the graph has a cycle of events that wait for each other: {', '.join(stuck[:8])}"
        ) from None
    place = np.empty(len(nodes), np.int64)
    place[order] = np.arange(len(order))
    graph = Graph(
        nodes=tuple(nodes[i] for i in order),
        predecessors=tuple(tuple(sorted({int(place[j]) for j in predecessors[i]})) for i in order),
    )
    return graph, place
