"""Balances one training step: assigns its samples to ranks and micro-batches, and delays none."""

from wlb.balance.assignment import StepBalance as StepBalance
from wlb.balance.sample_costs import slime_flops as slime_flops
from wlb.balance.step import balance_step as balance_step
from wlb.cost import Cost as Cost
