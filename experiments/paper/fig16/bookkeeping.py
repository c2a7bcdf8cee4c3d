"""Counts how a packing changes the order of training, from its plans; nothing is trained here.

It also counts the effective weight of labels. The loss of a step is the mean over its labels, so a
label counts 1 / (labels of the step). Labels of steps with many tokens, where long documents are
trained, count less. A weight of 1 means that a label counts as much as if all labels of the epoch
counted the same.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from wlb.cost import workload_for
from wlb.data import TokenStore, open_batches
from wlb.packing import PackingSummary, label_weights, measure, packer_for
from wlb.plan import IntArray, Pieces
from wlb.planner import open_planner
from wlb.spec import RunSpec

CLASSES = (0.125, 0.5, 1.0)
"""Upper ends of the classes of document length, in windows; the last class has no upper end."""
CLASS_NAMES = ("below 1/8", "1/8 to 1/2", "1/2 to 1", "1 and more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookkeeping:
    """Counts of one packing and seed."""

    summary: PackingSummary  # balance, delays and tokens per step
    num_steps: int  # steps, including the flush
    num_labels: int  # labels of the epoch
    class_labels: tuple[int, ...]  # labels of each class of document length
    class_weights: tuple[float, ...]  # mean weight of the labels of each class


def class_of(lengths: IntArray, window: int) -> IntArray:
    """Returns the class of length of each document, shape [n]."""
    return np.searchsorted(np.array(CLASSES) * window, lengths, side="right").astype(np.int64)


def bookkeeping(spec: RunSpec, store: str) -> Bookkeeping:
    """Plans a whole run and returns its counts.

    Raises:
        ValueError: If a token is not trained exactly once.
    """
    lengths = TokenStore(store).lengths
    plans = [plan.packing for plan in open_planner(spec, store, "cpu").steps()]
    pieces = Pieces.concat(*(plan.pieces for plan in plans))
    check_covered(pieces.document, pieces.start, pieces.stop, lengths)
    of_step = np.array([plan.num_targets for plan in plans])
    weight = np.repeat(label_weights(of_step), [len(plan.pieces) for plan in plans])
    cls = class_of(lengths[pieces.document], spec.data.context_window)
    labels = np.bincount(cls, pieces.num_targets, len(CLASS_NAMES))
    weights = np.bincount(cls, pieces.num_targets * weight, len(CLASS_NAMES))
    return Bookkeeping(
        summary=_summary(spec, store),
        num_steps=len(plans),
        num_labels=int(of_step.sum()),
        class_labels=tuple(int(n) for n in labels),
        class_weights=tuple((weights / np.maximum(1, labels)).tolist()),
    )


def check_covered(document: IntArray, start: IntArray, stop: IntArray, lengths: IntArray) -> None:
    """Checks that pieces contain every token of every document exactly once.

    Args:
        document: Document of each piece, shape [n].
        start: First token of each piece in its document, shape [n].
        stop: Token behind each piece's last one, shape [n].
        lengths: Tokens of each document.

    Raises:
        ValueError: If a token is missing or occurs twice.
    """
    # In order of documents and positions, each piece must begin where the previous one ends.
    order = np.lexsort((start, document))
    document, start, stop = document[order], start[order], stop[order]
    is_first = np.diff(document, prepend=-1) > 0
    before = np.where(is_first, 0, np.roll(stop, 1))
    end = np.append(is_first[1:], True)
    whole = bool(np.array_equal(document[is_first], np.arange(lengths.size)))
    if not whole or (start != before).any() or (stop[end] != lengths).any():
        raise ValueError("the steps do not hold every document's tokens exactly once")


def _summary(spec: RunSpec, store: str) -> PackingSummary:
    cost = workload_for(spec, "cpu")
    source = open_batches(
        store, tokens_per_batch=spec.tokens_per_step, seed=spec.run.seed, epochs=spec.data.epochs
    )
    batches = (batch for batch, _ in source.iterate())
    return measure(packer_for(spec, cost), batches, cost=cost).summary


def books_from_json(data: dict[str, Any]) -> Bookkeeping | None:
    """Reads stored counts; returns None if they were written by code with other fields."""
    if data.keys() != {f.name for f in fields(Bookkeeping)}:
        return None
    if data["summary"].keys() != {f.name for f in fields(PackingSummary)}:
        return None
    values: dict[str, Any] = data | {
        name: tuple(data[name]) for name in ("class_labels", "class_weights")
    }
    values["summary"] = PackingSummary(**data["summary"])
    return Bookkeeping(**values)
