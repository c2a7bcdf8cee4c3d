"""Write simulated steps in Chrome's trace format, for Perfetto (ui.perfetto.dev).

Each pipeline rank of each pipeline is shown as a process, with threads for passes (named like
`2F0`, the forward of micro-batch 0 on stage 2), messages and collectives. Process 0 shows the steps
and the critical path. Events on that path have the category `critical`; Perfetto's SQL finds them
with `select * from slice where category glob '*critical*'`. The file is written event by event
(about 300 bytes and 20 us each), so a trace of thousands of GPUs needs little memory.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wlb.plan import UserError
from wlb.simulate.critical import NAMES, event_of
from wlb.simulate.graph import Node, NodeKind
from wlb.simulate.order import Action, PassKind
from wlb.simulate.step import Simulation

TraceEvent = dict[str, Any]

STEPS, PASSES, MESSAGES, COLLECTIVES = 0, 1, 2, 3  # thread ids
CRITICAL = "critical path"
"""Name of the process and of the thread that show the critical path."""
OVERLAPPING = 100
"""Messages that overlap others are shown in threads with ids above this."""
_PASS_WORDS = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.BACKWARD_INPUT: "backward, inputs",
    PassKind.BACKWARD_WEIGHT: "backward, weights",
}


def write_trace(
    path: str | Path,
    simulation: Simulation,
    *,
    steps: Sequence[int] | None = None,
    first_step: int = 0,
) -> int:
    """Write simulated steps to a trace file, one after the other, and return the number of events.

    Args:
        path: The file to write.
        simulation: The simulated steps.
        steps: Indices of the steps; None means all.
        first_step: Number that the first simulated step has in the run. The names of steps in the
            trace count from it.
    """
    chosen = range(simulation.num_steps) if steps is None else steps
    _check(simulation, chosen)
    num = 0
    with Path(path).open("w", encoding="utf-8") as file:
        rest = json.dumps(_header(simulation, chosen))
        # The header's closing brace comes after the events, which are written one by one.
        file.write(rest[:-1] + ', "traceEvents": [')
        for event in _events(simulation, chosen, first_step):
            file.write(("\n" if num == 0 else ",\n") + json.dumps(event))
            num += 1
        file.write("\n]}\n")
    return num


def _header(simulation: Simulation, steps: Sequence[int]) -> dict[str, Any]:
    spec = simulation.simulator.spec
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "run": spec.run.name,
            "schedule": str(spec.pp.schedule),
            "virtual_stages": spec.pp.virtual_stages,
            **{name: getattr(spec.parallel, name) for name in ("tp", "cp", "pp", "dp")},
            "kernel_profile": simulation.simulator.cost.profile.name,
            "step_time_s": [float(simulation.step_time_s[s]) for s in steps],
        },
    }


def _check(simulation: Simulation, steps: Sequence[int]) -> None:
    if not steps:
        raise UserError("no step was chosen for the trace; give at least one step")
    for step in steps:
        if not 0 <= step < simulation.num_steps:
            raise UserError(
                f"step {step} was not simulated; give a step from 0 to {simulation.num_steps - 1}"
            )


def _events(simulation: Simulation, steps: Sequence[int], first_step: int) -> Iterator[TraceEvent]:
    writers: list[_Step] = []
    offset_ns = 0
    for step in steps:
        name = f"step {first_step + step}"
        writers.append(_Step(simulation=simulation, step=step, offset_ns=offset_ns, name=name))
        offset_ns += int(simulation.ends_ns[:, step].max())
    yield from _name_events(simulation, lanes=max(w.lanes for w in writers))
    for writer in writers:
        yield from writer.events()


def _name_events(simulation: Simulation, *, lanes: int) -> Iterator[TraceEvent]:
    """Yield the trace events that name and order the processes and threads in a viewer.

    Args:
        simulation: The simulated steps.
        lanes: Number of threads that show messages.
    """
    yield from _name_event(0, "process", CRITICAL)
    yield from _name_event(0, "thread", "steps", tid=STEPS)
    yield from _name_event(0, "thread", CRITICAL, tid=PASSES)
    parallel = simulation.simulator.spec.parallel
    threads = {PASSES: "passes", MESSAGES: "messages", COLLECTIVES: "collectives, optimizer"}
    threads |= {OVERLAPPING + i: f"messages {i + 1}" for i in range(1, lanes)}
    for pipeline in range(parallel.dp):
        for rank in range(parallel.pp):
            pid = _pid(pipeline, rank, parallel.pp)
            yield from _name_event(pid, "process", f"pipeline {pipeline}, rank {rank}")
            for tid, name in threads.items():
                yield from _name_event(pid, "thread", name, tid=tid)


def _name_event(pid: int, what: str, name: str, *, tid: int = 0) -> Iterator[TraceEvent]:
    at = {"ph": "M", "pid": pid, "tid": tid}
    index = pid if what == "process" else tid
    yield {"name": f"{what}_name", **at, "args": {"name": name}}
    yield {"name": f"{what}_sort_index", **at, "args": {"sort_index": index}}


def _pid(pipeline: int, rank: int, pp: int) -> int:
    return 1 + pipeline * pp + rank


@dataclass(slots=True, kw_only=True)
class _Step:
    """Makes the trace events of one simulated step."""

    simulation: Simulation  # the simulated steps
    step: int  # index of the step
    offset_ns: int  # start of the step in the trace
    name: str  # name of the step in the trace
    # (index of the node, pipeline) of all events on the critical path
    critical: frozenset[tuple[int, int]] = field(init=False)
    # for each pass, the index of its node in `simulator.graph`
    pass_nodes: dict[Action, int] = field(init=False)
    # id of the thread that shows each message, by (index of the node, pipeline)
    tids: dict[tuple[int, int], int] = field(init=False)
    lanes: int = field(init=False)  # most messages that a rank receives at the same time

    def __post_init__(self) -> None:
        simulation, graph = self.simulation, self.simulation.simulator.graph
        self.critical = frozenset(
            graph.critical_path(simulation.ends_ns, simulation.durations_ns, step=self.step)
        )
        self.pass_nodes = {
            node.action: i
            for i, node in enumerate(graph.nodes)
            if node.kind == NodeKind.PASS and node.action is not None
        }
        self.tids, self.lanes = self._message_tids()

    def events(self) -> Iterator[TraceEvent]:
        """Yield all trace events of the step."""
        graph, parallel = self.simulation.simulator.graph, self.simulation.simulator.spec.parallel
        total = int(self.simulation.ends_ns[:, self.step].max())
        yield self._complete(self.name, "step", (0, STEPS), (0, total), {"step": self.name})
        for i, node in enumerate(graph.nodes):
            for pipeline in range(parallel.dp):
                yield from self._node(i, node, pipeline)

    def _node(self, i: int, node: Node, pipeline: int) -> Iterator[TraceEvent]:
        if node.kind == NodeKind.MESSAGE:
            yield from self._arrow(i, node, pipeline)
        start, stop = self._times(i, pipeline)
        if start == stop and node.kind != NodeKind.PASS:
            return
        name, args = self._label(i, node, pipeline)
        is_critical = (i, pipeline) in self.critical
        category = f"{node.kind},critical" if is_critical else str(node.kind)
        pp = self.simulation.simulator.spec.parallel.pp
        tid = COLLECTIVES if node.action is None else PASSES
        tid = self.tids.get((i, pipeline), tid)
        # Collectives of all ranks are one node, which is drawn on every rank.
        for rank in [node.rank] if node.rank >= 0 else range(pp):
            at = (_pid(pipeline, rank, pp), tid)
            yield self._complete(name, category, at, (start, stop), args)
        if is_critical:
            where = {"pipeline": pipeline, "rank": node.rank}
            yield self._complete(name, category, (0, PASSES), (start, stop), where | args)

    def _arrow(self, i: int, node: Node, pipeline: int) -> Iterator[TraceEvent]:
        """Yield the two ends of a message's arrow, from the sending pass to the receiving pass.

        Perfetto draws the arrow only if its ends lie within these passes.

        Args:
            i: Index of the message's node.
            node: The message's node.
            pipeline: Index of the pipeline.
        """
        graph, parallel = self.simulation.simulator.graph, self.simulation.simulator.spec.parallel
        assert node.action is not None
        to_stage = node.stage + (1 if node.action.kind == PassKind.FORWARD else -1)
        sender = self.pass_nodes[node.action]
        receiver = self.pass_nodes[node.action._replace(stage=to_stage)]
        number = (self.step * len(graph.nodes) + i) * parallel.dp + pipeline
        shared = {"name": "message", "cat": "message", "id": number}
        start, stop = self._times(sender, pipeline)
        for phase, index, ns in (
            ("s", sender, max(start, stop - 1)),
            ("f", receiver, self._times(receiver, pipeline)[0]),
        ):
            pid = _pid(pipeline, graph.nodes[index].rank, parallel.pp)
            event = {**shared, "ph": phase, "pid": pid, "tid": PASSES, "ts": self._us(ns)}
            yield event | ({"bp": "e"} if phase == "f" else {})

    def _label(self, i: int, node: Node, pipeline: int) -> tuple[str, dict[str, Any]]:
        """Return the name of a trace event, and the arguments that a viewer shows with it.

        Args:
            i: Index of the node of the graph that the event shows.
            node: The node.
            pipeline: Index of the pipeline.
        """
        if node.action is None:
            name = NAMES[node.kind] + (f" of stage {node.stage}" if node.stage >= 0 else "")
            return name, {"step": self.name}
        stage, kind, micro_batch = node.action
        args: dict[str, Any] = {
            "step": self.name,
            "micro_batch": micro_batch,
            "stage": stage,
            "kind": _PASS_WORDS[kind],
        }
        if node.kind == NodeKind.MESSAGE:
            return f"output of {node.action}", args
        event = event_of(self.simulation, i, step=self.step, pipeline=pipeline)
        args["tokens"] = int(self.simulation.prices.tokens[self.step, pipeline, micro_batch])
        if event.cp_rank >= 0:
            args["slowest_cp_rank"] = event.cp_rank
        args["terms_ms"] = {term: round(s * 1e3, 6) for term, s in event.terms_s.items()}
        return str(node.action), args

    def _complete(
        self,
        name: str,
        category: str,
        at: tuple[int, int],
        times_ns: tuple[int, int],
        args: dict[str, Any],
    ) -> TraceEvent:
        """Return a trace event with a start and a duration.

        Args:
            name: Name of the event.
            category: Categories, separated by commas.
            at: (id of the event's process, id of its thread).
            times_ns: Start and end, counted from the start of the step.
            args: Arguments that a viewer shows with the event.
        """
        start, stop = times_ns
        event: TraceEvent = {"name": name, "cat": category, "ph": "X", "pid": at[0], "tid": at[1]}
        event |= {"ts": self._us(start), "dur": (stop - start) / 1000, "args": args}
        if category.endswith(",critical"):
            # "terrible" is Chrome's name of a red colour.
            event["cname"] = "terrible"
        return event

    def _us(self, ns: int) -> float:
        return (self.offset_ns + ns) / 1000

    def _times(self, i: int, pipeline: int) -> tuple[int, int]:
        stop = int(self.simulation.ends_ns[i, self.step, pipeline])
        return stop - int(self.simulation.durations_ns[i, self.step, pipeline]), stop

    def _message_tids(self) -> tuple[dict[tuple[int, int], int], int]:
        """Assign messages to threads (rows in the trace viewer) so that none overlap in a thread.

        Returns:
            Thread id of each message, by (index of the message's node in the graph of events,
                pipeline); and the most threads of messages that a rank needs.
        """
        graph, dp = self.simulation.simulator.graph, self.simulation.simulator.spec.parallel.dp
        by_rank: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for i in graph.indices(NodeKind.MESSAGE):
            for pipeline in range(dp):
                key = (pipeline, graph.nodes[i].rank)
                by_rank.setdefault(key, []).append((*self._times(i, pipeline), i))
        tids: dict[tuple[int, int], int] = {}
        lanes = 1
        for (pipeline, _), messages in by_rank.items():
            free_at: list[int] = []
            for start, stop, i in sorted(messages):
                lane = next((k for k, end in enumerate(free_at) if end <= start), len(free_at))
                free_at[lane : lane + 1] = [stop]
                tids[i, pipeline] = MESSAGES if lane == 0 else OVERLAPPING + lane
            lanes = max(lanes, len(free_at))
        return tids, lanes
