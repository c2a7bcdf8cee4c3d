"""Packing policies: which documents make up each micro-batch of a step."""

from wlb.packing.base import Packer, PackerOptions
from wlb.packing.fixed import FixedPacker, StepGrouping
from wlb.packing.original import OriginalPacker
from wlb.packing.var_len import VarLenPacker

__all__ = [
    "FixedPacker",
    "OriginalPacker",
    "Packer",
    "PackerOptions",
    "StepGrouping",
    "VarLenPacker",
]
