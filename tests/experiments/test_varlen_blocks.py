"""Tests the launch model of `experiments.varlen_blocks` with tiny literal answers."""

import numpy as np
import pytest

from experiments.varlen_blocks.__main__ import BLOCK_NS, Pass, launched, makespan_ns, runs_of

# Heads of 128: at 1 TFLOP/s a tile of 128 rows over 128 keys takes 4 * 128**3 / 1e3 ns on one slot.
FORWARD = Pass("forward", 132e-3, 4, at_once=1, kernels=1)
BACKWARD = Pass("backward", 132e-3, 4, at_once=1, kernels=4)
TILE_NS = 4 * 128**3 * 1.0


def test_every_segment_has_the_blocks_of_the_longest():
    # A tail of 256 rows over 384 keys, and a document of 128 whose second block is empty.
    q, k = np.array([256, 128]), np.array([384, 128])
    found = FORWARD.block_ns(q, k, 7.0)
    expected = [BLOCK_NS + 2 * TILE_NS, BLOCK_NS + 3 * TILE_NS, BLOCK_NS + TILE_NS, 7.0]
    assert found.tolist() == pytest.approx(expected)


def test_backward_has_a_block_for_each_tile_of_keys():
    found = BACKWARD.block_ns(np.array([256, 128]), np.array([384, 128]), 7.0)
    full = [BLOCK_NS + n * TILE_NS for n in (2, 2, 1)]
    assert found.tolist() == pytest.approx([*full, BLOCK_NS + TILE_NS, 7.0, 7.0])


def test_blocks_start_on_the_first_free_slot():
    # Slot 0: 3, then 2; slot 1: 1, 1, 2.
    assert makespan_ns(np.array([3.0, 1.0, 1.0, 2.0, 2.0]), heads=1, slots=2) == 5.0
    assert makespan_ns(np.array([1.0]), heads=3, slots=2) == 2.0


def test_runs_launch_the_fewest_blocks():
    lengths = np.array([1280, 128, 128, 128, 1280])
    whole = [slice(0, 5)]
    assert launched(lengths, whole) == 50
    apart = [slice(0, 1), slice(1, 4), slice(4, 5)]
    assert launched(lengths, apart) == 23
    assert runs_of(lengths, heads=2, call_blocks=26) == apart
    assert runs_of(lengths, heads=2, call_blocks=28) == whole
