"""Packing policies: which documents make up each micro-batch of a step."""

from wlb.packing.base import Packer, PackerOptions
from wlb.packing.bins import BinMethod, Bins, pack_bins
from wlb.packing.bounded import BoundedPacker
from wlb.packing.capacity import CapacityPacker
from wlb.packing.fixed import FixedPacker, StepGrouping
from wlb.packing.original import OriginalPacker, WindowCut
from wlb.packing.policies import baseline_for, options_for, packer_for
from wlb.packing.var_len import VarLenPacker

__all__ = [
    "BinMethod",
    "Bins",
    "BoundedPacker",
    "CapacityPacker",
    "FixedPacker",
    "OriginalPacker",
    "Packer",
    "PackerOptions",
    "StepGrouping",
    "VarLenPacker",
    "WindowCut",
    "baseline_for",
    "options_for",
    "pack_bins",
    "packer_for",
]
