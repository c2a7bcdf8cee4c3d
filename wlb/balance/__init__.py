"""One training step, balanced: samples to mini-batches, ranks and micro-batches, none delayed."""

from wlb.balance.assignment import StepBalance as StepBalance
from wlb.balance.sample_costs import slime_flops as slime_flops
from wlb.balance.step import balance_step as balance_step
from wlb.cost import Cost as Cost
