"""Padded batches with one document per row, for loops without variable-length attention kernels.

An attention mask of shape [rows, width] cannot keep documents of a row apart, so each row is one
document. Labels are unshifted, and IGNORE on padding and on a document's first token. Documents are
never truncated: one that is longer than `max_length` raises UserError.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from wlb.adapters.collate.flat import TokenArray, flatten
from wlb.parallel.rows import IGNORE
from wlb.plan import IntArray, IntLike, UserError, check_at_least


class Side(StrEnum):
    """On which side of a row the padding is."""

    RIGHT = "right"
    LEFT = "left"


class PadTo(StrEnum):
    """Rule for the width of a batch."""

    LONGEST = "longest"
    """As wide as the longest document of the batch."""
    MAX_LENGTH = "max_length"
    """Always `max_length` wide, for compiled models and fixed buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PadOptions:
    """How documents are padded to a `PaddedBatch`.

    `side` and `pad_to` may be given as strings, such as "left" and "max_length".
    """

    pad_token_id: int  # token of the padding
    side: Side = Side.RIGHT
    pad_to: PadTo = PadTo.LONGEST
    # Most tokens of a document; a longer document raises UserError. None means no limit.
    max_length: int | None = None
    # The width is rounded up to a multiple of this number of tokens, which must divide max_length.
    # None means no rounding.
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "side", Side(self.side))
        object.__setattr__(self, "pad_to", PadTo(self.pad_to))
        check_at_least("pad_token_id", self.pad_token_id, 0)
        if self.max_length is not None:
            check_at_least("max_length", self.max_length, 1)
        elif self.pad_to is PadTo.MAX_LENGTH:
            raise UserError(
                "pad_to = max_length needs a width, but max_length = None; set max_length"
            )
        if self.pad_to_multiple_of is not None:
            check_at_least("pad_to_multiple_of", self.pad_to_multiple_of, 1)
            if (self.max_length or 0) % self.pad_to_multiple_of:
                raise UserError(
                    f"max_length = {self.max_length} must be a multiple of pad_to_multiple_of = "
                    f"{self.pad_to_multiple_of}; round max_length up or down"
                )

    def width(self, lengths: IntArray) -> int:
        """Return the width in tokens of a batch whose documents have `lengths`, shape [rows]."""
        longest = int(lengths.max())
        if self.max_length is not None and longest > self.max_length:
            raise UserError(
                f"example {int(lengths.argmax())} has {longest} tokens, more than max_length = "
                f"{self.max_length}, and this collator does not truncate; shorten or remove the "
                "example, or raise max_length"
            )
        if self.pad_to is PadTo.MAX_LENGTH:
            return self.max_length or longest
        multiple = self.pad_to_multiple_of or 1
        return -(-longest // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedBatch:
    """A batch with one padded document per row. All arrays are int64 [rows, width]."""

    input_ids: IntArray
    labels: IntArray  # unshifted; IGNORE on padding and on first tokens
    attention_mask: IntArray  # 1 on tokens, 0 on padding
    position_ids: IntArray  # counted from 0 in each document; 0 on padding

    @property
    def lengths(self) -> IntArray:
        """Return the number of tokens of each document, without padding, shape [rows]."""
        return self.attention_mask.sum(1)


def pad(
    examples: Sequence[IntLike], *, labels: Sequence[IntLike] | None = None, options: PadOptions
) -> PaddedBatch:
    """Return a batch with one row for each example.

    Args:
        examples: Token ids of each document, as lists or arrays.
        labels: Unshifted labels, as long as each example; by default its tokens.
        options: Layout of the batch.

    Raises:
        UserError: An example is empty, longer than `max_length`, or has more or fewer tokens than
            labels.
    """
    flat = flatten(examples, labels=labels)
    lengths = flat.lengths
    width = options.width(lengths)
    columns = np.arange(width)
    if options.side is Side.RIGHT:
        is_token = columns < lengths[:, None]
    else:
        is_token = columns >= width - lengths[:, None]

    def rows(values: TokenArray, padding: int) -> IntArray:
        out = np.full(is_token.shape, padding, np.int64)
        out[is_token] = values
        return out

    return PaddedBatch(
        input_ids=rows(flat.input_ids, options.pad_token_id),
        labels=rows(flat.labels, IGNORE),
        attention_mask=is_token.astype(np.int64),
        position_ids=rows(flat.position_ids, 0),
    )
