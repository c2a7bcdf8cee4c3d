"""Packing policies: which documents make up each micro-batch of a step."""

from wlb.packing.base import Packer, PackerOptions
from wlb.packing.bins import BinMethod, Bins, pack_bins
from wlb.packing.bounded import BoundedPacker
from wlb.packing.capacity import CapacityPacker
from wlb.packing.examples import ExamplesPacker
from wlb.packing.fixed import FixedPacker, StepGrouping
from wlb.packing.ilp.model import Objective
from wlb.packing.ilp.packers import (
    IlpFixedPacker,
    IlpOptions,
    IlpReport,
    IlpVarLenPacker,
    solve_fixed,
    solve_var_len,
)
from wlb.packing.ilp.solvers import Solver
from wlb.packing.original import OriginalPacker, WindowCut
from wlb.packing.policies import baseline_for, caps_of, options_for, packer_for, with_s_max
from wlb.packing.refine import refine
from wlb.packing.saved import PackedBatches, Packs, SavedPacker
from wlb.packing.study.measure import PackingRun, PackingSummary, label_weights, measure
from wlb.packing.var_len import VarLenPacker, place

__all__ = [
    "BinMethod",
    "Bins",
    "BoundedPacker",
    "CapacityPacker",
    "ExamplesPacker",
    "FixedPacker",
    "IlpFixedPacker",
    "IlpOptions",
    "IlpReport",
    "IlpVarLenPacker",
    "Objective",
    "OriginalPacker",
    "PackedBatches",
    "Packer",
    "PackerOptions",
    "PackingRun",
    "PackingSummary",
    "Packs",
    "SavedPacker",
    "Solver",
    "StepGrouping",
    "VarLenPacker",
    "WindowCut",
    "baseline_for",
    "caps_of",
    "label_weights",
    "measure",
    "options_for",
    "pack_bins",
    "packer_for",
    "place",
    "refine",
    "solve_fixed",
    "solve_var_len",
    "with_s_max",
]
