"""Plain LLaMA over packed rows."""

from wlb.model.llama import Attend, Llama, LocalAttend, Ops, Rows, build_reference, initial_weight
from wlb.model.loss import VocabularyShard, head_loss
from wlb.model.rope import inverse_frequencies, rope_tables, rotate

__all__ = [
    "Attend",
    "Llama",
    "LocalAttend",
    "Ops",
    "Rows",
    "VocabularyShard",
    "build_reference",
    "head_loss",
    "initial_weight",
    "inverse_frequencies",
    "rope_tables",
    "rotate",
]
