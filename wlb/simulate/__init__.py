"""Simulate training steps on a cluster: pipeline, collectives, memory and critical path."""

from wlb.simulate.critical import CriticalPath as CriticalPath
from wlb.simulate.critical import critical_path as critical_path
from wlb.simulate.graph import Node as Node
from wlb.simulate.graph import NodeKind as NodeKind
from wlb.simulate.order import PassKind as PassKind
from wlb.simulate.order import pipeline_order as pipeline_order
from wlb.simulate.pass_times import ShardedStep as ShardedStep
from wlb.simulate.pass_times import StepPrices as StepPrices
from wlb.simulate.program import Wires as Wires
from wlb.simulate.program import step_graph as step_graph
from wlb.simulate.run import RunSimulation as RunSimulation
from wlb.simulate.run import check_memory as check_memory
from wlb.simulate.run import planner_of as planner_of
from wlb.simulate.run import sharded_steps as sharded_steps
from wlb.simulate.run import simulate_run as simulate_run
from wlb.simulate.shards import FsdpExecution as FsdpExecution
from wlb.simulate.step import Simulation as Simulation
from wlb.simulate.step import Simulator as Simulator
from wlb.simulate.trace import write_trace as write_trace
