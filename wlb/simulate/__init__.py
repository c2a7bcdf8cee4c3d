"""Simulates training steps on a cluster: pipeline, collectives, memory, critical path."""

from wlb.simulate.critical import CriticalPath, Event, critical_path
from wlb.simulate.graph import Graph, Node, NodeKind
from wlb.simulate.order import Action, Order, PassKind, pipeline_order
from wlb.simulate.prices import ShardedStep, StepPrices
from wlb.simulate.program import step_graph
from wlb.simulate.run import (
    RunSimulation,
    check_memory,
    planner_of,
    sharded_steps,
    simulate_run,
)
from wlb.simulate.step import Simulation, Simulator
from wlb.simulate.trace import trace_events, write_trace

__all__ = [
    "Action",
    "CriticalPath",
    "Event",
    "Graph",
    "Node",
    "NodeKind",
    "Order",
    "PassKind",
    "RunSimulation",
    "ShardedStep",
    "Simulation",
    "Simulator",
    "StepPrices",
    "check_memory",
    "critical_path",
    "pipeline_order",
    "planner_of",
    "sharded_steps",
    "simulate_run",
    "step_graph",
    "trace_events",
    "write_trace",
]
