"""Memory of a rank: estimates, budgets of devices, and the S_max and T that fit into a budget."""

from wlb.memory.budget import Budget as Budget
from wlb.memory.budget import cpu_budget as cpu_budget
from wlb.memory.budget import gpu_budget as gpu_budget
from wlb.memory.budget import planned_gib as planned_gib
from wlb.memory.caps import TokenCaps as TokenCaps
from wlb.memory.caps import token_caps as token_caps
from wlb.memory.estimate import MemoryEstimate as MemoryEstimate
from wlb.memory.estimate import in_flight as in_flight
from wlb.memory.estimate import memory_estimate as memory_estimate
from wlb.memory.estimate import memory_of_rank as memory_of_rank
from wlb.memory.workspace import AttentionCall as AttentionCall
from wlb.memory.workspace import attention_workspace_bytes as attention_workspace_bytes
from wlb.memory.workspace import deterministic_copies as deterministic_copies
from wlb.memory.workspace import most_attention_workspace_bytes as most_attention_workspace_bytes
