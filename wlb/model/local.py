"""Inputs of a model in one process, where documents are whole and all keys are local."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from wlb.kernels import Scores, Segments, attend
from wlb.model.delta_rule import SpanLayout
from wlb.model.elementwise import inverse_frequencies, rope_tables
from wlb.model.llama import LayerRows, LinearRows, LocalAttend, Rows
from wlb.plan import IntArray
from wlb.spec import ModelSpec


def local_rows(
    spec: ModelSpec,
    offsets: Sequence[int] | IntArray,
    *,
    backend: str = "reference",
    labels: Tensor | None = None,
    loss_scale: float = 1.0,
) -> Rows:
    """Make all inputs of the model except the tokens, for packed documents in one process.

    Args:
        spec: Sizes and options of the model.
        offsets: Where documents begin and end, shape [documents + 1]. For example [0, 3, 5] means
            two documents, of 3 and 2 tokens.
        backend: Name of the attention kernel, a key of `wlb.kernels.BACKENDS`.
        labels: Target of each row, shape [T]. None if no loss is computed.
        loss_scale: The model multiplies the summed loss by this.
    """
    device = torch.device("cpu") if labels is None else labels.device
    lengths = np.diff(np.asarray(offsets)).tolist()
    positions = torch.cat([torch.arange(n, device=device) for n in [0, *lengths]])

    def of(*, slides: bool) -> LayerRows:
        scores = Scores.of(spec, slides=slides)
        segments = Segments.from_offsets(offsets, offsets, device=device, scores=scores)

        def call(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
            return attend(q_THD, k_TGD, v_TGD, segments, backend=backend)

        tables = rope_tables(positions, inverse_frequencies(spec, device, slides=slides))
        return LayerRows(*tables, LocalAttend(call))

    return Rows(
        **of(slides=False)._asdict(),
        labels=labels,
        loss_scale=loss_scale,
        sliding=of(slides=True) if spec.num_sliding_layers else None,
        linear=LinearRows(SpanLayout.of(lengths, device), None) if spec.num_linear_layers else None,
    )
