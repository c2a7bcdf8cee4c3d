"""Count the FLOPs of a token in a model, from the model's Hugging Face config.json.

`counted` reads the file and counts FLOPs layer by layer (`wlb.cost.families` knows the layers of
each family). `counted_workload` turns the counts into a workload, for packing and sharding. A
config.json says nothing about a device, so this workload assumes the same throughput for all FLOPs.
For a plan only the ratio of attention to everything else matters. If you have measured your device,
use its kernel profile instead.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from wlb.cost.families import COUNTED, FAMILIES, FLAT, ConfigFields, Layer, Pairs, defaults_of
from wlb.cost.protocol import (
    BACKWARD_FLOPS_PER_PAIR,
    FORWARD_FLOPS_PER_PAIR,
    TILE_ROWS,
    FlopsWorkload,
    segment_sizes,
    tile_pairs,
    token_counts,
    whole_ns,
)
from wlb.plan import FloatArray, IntArray, IntLike, UserError
from wlb.plan.read_file import Fields, read_object

RATIO = (
    "instead of the file, give as cost the length of a document in tokens at which attention "
    "costs as much as everything else, such as cost=24576"
)
"""End of error messages about a model that cannot be counted: what the user can do instead."""
FLOPS_PER_BYTE = 900.0
"""FLOPs that a GPU computes in the time in which it sends one byte to another CP rank.

In training an H100 computes about 400 TFLOP/s, and NVLink moves 450 GB/s in each direction. Between
nodes, over a link of 400 Gb/s, the value would be 8,000.
"""
KIND_NAMES = {
    "full": "full attention",
    "sliding": "sliding window",
    "chunked": "chunked attention",
    "sparse": "sparse attention",
    "hybrid": "full attention beside a recurrence",
    "linear": "linear or recurrent",
    "none": "without attention",
}
"""Kinds of layers, in the order in which `CountedModel` prints them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedModel:
    """Layers and forward FLOPs of a model according to its config.json.

    Norms, biases, RoPE and element-wise operations are not counted. Encoders of images and sound
    are not counted either, nor layers for multi-token prediction.
    """

    model_type: str  # name of the family in config.json
    kinds: dict[str, int]  # number of layers of each kind in `KIND_NAMES`
    pairs: tuple[Pairs, ...]  # costs of a query-key pair, added up over layers with equal windows
    token_flops: int  # forward FLOPs of a token in all layers and the head, without query-key pairs
    active: int  # number of parameters that one token uses, embeddings included
    total: int  # all parameters, embeddings included
    # Bytes of the float32 summaries of one span in all linear-attention layers.
    summary_bytes: int

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(self.kinds.values())

    @property
    def crossover(self) -> int | None:
        """Length of a document, in tokens, at which attention has as many FLOPs as everything else.

        The length is None in models without full attention.
        """
        if not any(not p.window for p in self.pairs):
            return None
        # Attention grows faster than everything else, so bisection finds the crossing.
        low, high = 1, 1 << 48
        while low < high:
            middle = (low + high) // 2
            d = np.array([middle], np.float64)
            if _attention(self.pairs, d)[0] < self.token_flops * middle:
                low = middle + 1
            else:
                high = middle
        return low

    def __str__(self) -> str:
        kinds = [f"{self.kinds[k]} {name}" for k, name in KIND_NAMES.items() if self.kinds.get(k)]
        size = f"{_billions(self.total)} parameters"
        if self.active < self.total:
            size = f"{_billions(self.active)} active of {size}"
        at = self.crossover
        ratio = (
            "attention never costs as much as everything else"
            if at is None
            else f"attention costs as much as everything else in a document of {at:,} tokens"
        )
        return f"{self.model_type}: {self.layers} layers ({', '.join(kinds)}); {size}; {ratio}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedWorkload(FlopsWorkload):
    """The workload of a model's average layer from its FLOPs, where one ns means one FLOP.

    Only ratios of times matter. `quadratic_ns` prices layers in which a query sees all keys before
    it. In layers with a window or chunks, W_a grows linearly once a document is longer than the
    window or chunk.
    """

    # Costs of a query-key pair, averaged over all layers: one entry per size of window or chunk.
    windows: tuple[Pairs, ...] = ()
    # Time to send the summary of one span, averaged over all layers (`wlb.cost.SummaryPrices`).
    summary_ns: float = 0.0

    def attention_ns(self, lengths: IntLike) -> IntArray:
        """Return W_a of each piece, as the mean over all layers of the model, shape [n]."""
        d = token_counts("lengths", lengths)
        return whole_ns(self.quadratic_ns * d * d + _attention(self.windows, d))

    def segment_times_ns(self, q: IntLike, kv: IntLike) -> tuple[IntArray, IntArray]:
        """Return forward and backward times of segments with q query rows and kv keys each.

        Each time is the mean over all layers of the model, with and without a window.
        """
        rows, keys = segment_sizes(q, kv)
        both = 2 * self.quadratic_ns * tile_pairs(rows, keys, tile_rows=self.tile_rows)
        for pairs in self.windows:
            both = both + _windowed(pairs, rows, keys, tile_rows=self.tile_rows)
        share = FORWARD_FLOPS_PER_PAIR / (FORWARD_FLOPS_PER_PAIR + BACKWARD_FLOPS_PER_PAIR)
        forward = whole_ns(both * share)
        return forward, whole_ns(both) - forward


def counted(path: str | Path) -> CountedModel:
    """Count the layers and FLOPs of the model that a config.json describes.

    If the model also reads images or sound, only its language model is counted (`text_config`).

    Args:
        path: Path of the config.json, or of its folder.

    Raises:
        UserError: The file cannot be read, or its family, a kind of layer or a value is unknown.
    """
    file = Path(path)
    try:
        file = file / "config.json" if file.is_dir() else file
        values = read_object(file, wide=True)
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot read {file} ({why}); give the path of a config.json or of its folder"
        ) from None
    return counted_of(values, str(file))


def counted_of(values: dict[str, Any], where: str) -> CountedModel:
    """Count the layers and FLOPs of the model with these config.json values.

    Args:
        values: The fields of the config.json.
        where: Name of the file in error messages.
    """
    keys = Fields(values, where, remedy=RATIO)
    model_type = keys.text("model_type")
    text = values.get("text_config")
    if model_type not in FAMILIES and isinstance(text, dict):
        # A model that also reads images or sound describes its language model in `text_config`. Of
        # the keys outside it, only this one concerns the language model.
        shared = {k: values[k] for k in ("tie_word_embeddings",) if values.get(k) is not None}
        return counted_of({**shared, **cast("dict[str, Any]", text)}, f"{where}: text_config")
    model_type = FLAT.get(model_type, model_type)
    if model_type not in FAMILIES:
        raise keys.error(
            "model_type",
            f"is a family whose FLOPs wlb cannot count (it knows {', '.join(COUNTED)})",
        )
    config = ConfigFields(keys, defaults_of(model_type))
    layers = FAMILIES[model_type](config)
    table = config.whole("hidden_size") * config.whole("vocab_size")
    # The input embedding and the output head share a table if they are tied.
    tables = table if config.flag("tie_word_embeddings") else 2 * table
    return _added_up(model_type, layers, head=table, tables=tables)


def counted_workload(path: str | Path) -> CountedWorkload:
    """Return the workload of a layer, averaged over the layers that a config.json describes.

    Args:
        path: Path of the config.json, or of its folder.
    """
    return workload_of_model(counted(path))


def workload_of_model(
    model: CountedModel, *, flops_per_byte: float = FLOPS_PER_BYTE
) -> CountedWorkload:
    """Return the workload of one layer of a model: the mean of the counted FLOPs of its layers.

    The workload prices the exchange of keys as 0.

    Args:
        model: Counted FLOPs of the model.
        flops_per_byte: FLOPs that a GPU computes in the time in which it sends one byte to another
            CP rank. This number sets the price of the summaries of linear-attention layers.
    """
    n = model.layers
    # The workload counts only forward FLOPs, because backward's are proportional to them. So its
    # unit of time is the time of one forward FLOP and of the backward FLOPs that belong to it.
    # While a byte is sent, a GPU computes `flops_per_byte` FLOPs, of which only forward's share
    # counts.
    share = FORWARD_FLOPS_PER_PAIR / (FORWARD_FLOPS_PER_PAIR + BACKWARD_FLOPS_PER_PAIR)
    full = sum(p.flops for p in model.pairs if not p.window)
    return CountedWorkload(
        quadratic_ns=full / n / 2,
        linear_ns_per_token=model.token_flops / n,
        tile_rows=TILE_ROWS,
        windows=tuple(p._replace(flops=p.flops / n) for p in model.pairs if p.window),
        summary_ns=model.summary_bytes / n * flops_per_byte * share,
    )


def _added_up(model_type: str, layers: list[Layer], *, head: int, tables: int) -> CountedModel:
    """Add up the counts of all layers, the output head and the embeddings.

    Args:
        model_type: Name of the family.
        layers: The model's layers.
        head: Parameters of the output head, from which its FLOPs are counted.
        tables: Stored parameters of embedding and output head together. Tied ones count once.
    """
    kinds: dict[str, int] = {}
    pairs: dict[tuple[int, bool], float] = {}
    for layer in layers:
        kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
        for one in layer.pairs:
            # Pairs with equal windows are added up over layers.
            within = (one.window, one.chunked)
            pairs[within] = pairs.get(within, 0) + one.flops
    active = sum(layer.active for layer in layers)
    return CountedModel(
        model_type=model_type,
        kinds=kinds,
        pairs=tuple(Pairs(flops, *within) for within, flops in sorted(pairs.items())),
        token_flops=2 * (active + head) + sum(layer.token_flops for layer in layers),
        active=active + tables,
        total=sum(layer.total for layer in layers) + tables,
        summary_bytes=4 * sum(layer.summary for layer in layers),
    )


def _attention(pairs: tuple[Pairs, ...], d: FloatArray) -> FloatArray:
    """Return the forward FLOPs of attention in whole documents, shape [n].

    Args:
        pairs: Costs of a query-key pair in each attention. The FLOPs of all of them are added up.
        d: Tokens of each document, shape [n].
    """
    total = np.zeros_like(d)
    for one in pairs:
        total += _windowed(one, d, d, tile_rows=1) if one.window else one.flops * d * d / 2
    return total


def _windowed(pairs: Pairs, q: FloatArray, kv: FloatArray, *, tile_rows: int) -> FloatArray:
    """Return the forward FLOPs of segments in a layer with windowed or chunked attention, [n].

    A query sees the latest keys up to the size of the window, or the earlier keys of its chunk.

    Args:
        pairs: Cost of a query-key pair, and the size of the window or chunk in tokens.
        q: Query rows of each segment, shape [n]. They are the last q of the first kv tokens of the
            segment's document.
        kv: Keys of each segment, shape [n].
        tile_rows: Query rows that a kernel computes together. Only a layer with a window uses this.
    """
    if not pairs.chunked:
        return pairs.flops * tile_pairs(q, kv, tile_rows=tile_rows, sliding=pairs.window)
    return pairs.flops * (_chunk_pairs(kv, pairs.window) - _chunk_pairs(kv - q, pairs.window))


def _chunk_pairs(d: FloatArray, chunk: int) -> FloatArray:
    """Count the query-key pairs of a document's first d tokens if queries only see their chunk."""
    whole = np.floor(d / chunk)
    # Causal pairs of a chunk form a triangle. The last chunk may have fewer tokens: `rest`.
    rest = d - whole * chunk
    return whole * (chunk * (chunk + 1) / 2) + rest * (rest + 1) / 2


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e8 else f"{parameters / 1e6:.1f}M"
