"""A decoder over packed rows: LLaMA, Mistral, Qwen, Gemma and mixtures of experts."""

from wlb.model.elementwise import inverse_frequencies as inverse_frequencies
from wlb.model.elementwise import rope_tables as rope_tables
from wlb.model.elementwise import rotate as rotate
from wlb.model.expert_layer import ExpertRows as ExpertRows
from wlb.model.llama import Attend as Attend
from wlb.model.llama import LayerRows as LayerRows
from wlb.model.llama import LinearRows as LinearRows
from wlb.model.llama import Llama as Llama
from wlb.model.llama import LocalAttend as LocalAttend
from wlb.model.llama import Ops as Ops
from wlb.model.llama import Rows as Rows
from wlb.model.llama import build_reference as build_reference
from wlb.model.llama import initial_weight as initial_weight
from wlb.model.local import local_rows as local_rows
from wlb.model.loss import VocabularyShard as VocabularyShard
from wlb.model.loss import capped as capped
from wlb.model.loss import head_loss as head_loss
