"""A chat template's rendering with markers, cut into pieces that belong to one message each.

Text after a content belongs to its message up to the known end of that turn. What an assistant
generates begins where the rendering with a generation prompt ends, where that is known.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from wlb.plan import UserError
from wlb.prepare.jinja_compile import BEGIN, END, MARKS


class TextPlace(StrEnum):
    """What the template's own text is to the message that it belongs to."""

    OTHER = "other"
    REPLY = "reply"
    """An assistant generates it, before or between the fields of its message."""
    END = "end"
    """It ends the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplatePiece:
    """Consecutive text of a rendering with markers, or a field of message `owner`.

    owner: the message whose turn the text belongs to. field: number of the field, -1 for text of
    the template.
    """

    text: str
    owner: int
    field: int = -1
    is_generated: bool = False
    place: TextPlace = TextPlace.OTHER

    @property
    def is_content(self) -> bool:
        return self.field >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlaces:
    """Places in a rendering without marks, by message; None where one is not known.

    begins: where what an assistant generates begins. ends: where turns end.
    """

    begins: Sequence[int | None]
    ends: Sequence[int | None]


@dataclass(slots=True)
class _Gap:
    """Text [start, stop) between fields of the messages `before` (-1 for none) and `after`.

    field: number of the field that follows, -1 for none. open_until: where the generation block
    that wrote the field before it closes; `start` if none.
    """

    start: int
    stop: int
    before: int
    after: int
    field: int
    open_until: int


def marked_fields(marked: str) -> list[int]:
    """The fields that a rendering holds, in order."""
    tokens = MARKS.split(marked)[1::2]
    return [int(token[1:-1]) for token in tokens if token not in (BEGIN, END)]


def without_blocks(marked: str) -> str:
    return marked.replace(BEGIN, "").replace(END, "")


def pieces_of(marked: str, places: TurnPlaces, *, start: str) -> list[TemplatePiece]:
    """The rendering in pieces. start: the text that begins it, if it does, is a piece of its own
    (BOS)."""
    plain = without_blocks(marked)
    blocks, gaps = _scan(marked, num_messages=len(places.ends))
    out: list[TemplatePiece] = []
    for gap in gaps:
        first = gap.start
        if gap.before < 0 and start and plain.startswith(start):
            out.append(TemplatePiece(text=start, owner=0))
            first = len(start)
        for a, b, owner, place in _regions(gap, places, first):
            out += _cut_at_blocks(plain, a, b, owner, place, blocks)
        if gap.field >= 0:
            is_generated = _is_inside(blocks, gap.stop)
            out.append(
                TemplatePiece(text="", owner=gap.after, field=gap.field, is_generated=is_generated)
            )
    return out


def _scan(marked: str, num_messages: int) -> tuple[list[range], list[_Gap]]:
    """Generation blocks, and the gaps between fields."""
    blocks: list[range] = []
    opened: list[int] = []
    edges: list[tuple[int, int, int]] = []  # (field, start, stop)
    at = 0
    for token in MARKS.split(marked):
        if token == BEGIN:
            opened.append(at)
        elif token == END:
            if not opened:
                raise UserError("the chat template ends a generation block that it did not begin")
            blocks.append(range(opened.pop(), at))
        elif MARKS.fullmatch(token):
            edges.append((int(token[1:-1]), at, at + len(token)))
            at += len(token)
        else:
            at += len(token)
    if opened:
        raise UserError("the chat template leaves a generation block without its end")
    gaps: list[_Gap] = []
    before, begin = -1, 0
    for field, start, stop in [*edges, (-1, at, at)]:
        inside = [b.stop for b in blocks if before >= 0 and b.start < begin <= b.stop]
        after = num_messages if field < 0 else field // 2
        gaps.append(_Gap(begin, start, before, after, field, max([begin, *inside])))
        before, begin = after, stop
    return blocks, gaps


def _regions(
    gap: _Gap, places: TurnPlaces, first: int
) -> Iterator[tuple[int, int, int, TextPlace]]:
    """(start, stop, owner, place) of the parts of a gap; only ends of turns may be empty."""
    at, last = first, len(places.ends) - 1
    if gap.before == gap.after:
        yield at, gap.stop, gap.before, TextPlace.REPLY
        return
    owner = max(gap.before, 0)
    if gap.before >= 0 and places.ends[gap.before] is None:
        # What a block writes directly after a content is of the same message.
        if at < (stop := min(gap.open_until, gap.stop)):
            yield at, stop, gap.before, TextPlace.OTHER
            at = stop
        owner = min(gap.before + 1, last)
    for message in range(max(gap.before, 0), min(gap.after, last + 1)):
        begin, end = places.begins[message], places.ends[message]
        if begin is not None and at < begin <= gap.stop:
            yield at, begin, min(owner, message), TextPlace.OTHER
            at, owner = begin, message
        if end is not None and at <= end <= gap.stop:
            yield at, end, message, TextPlace.END
            at, owner = end, min(message + 1, last)
    begin = places.begins[gap.after] if gap.after <= last else None
    if begin is not None and at <= begin < gap.stop:
        if at < begin:
            yield at, begin, owner, TextPlace.OTHER
        yield begin, gap.stop, gap.after, TextPlace.REPLY
    elif at < gap.stop:
        yield at, gap.stop, owner, TextPlace.OTHER


def _cut_at_blocks(
    plain: str, start: int, stop: int, owner: int, place: TextPlace, blocks: list[range]
) -> Iterator[TemplatePiece]:
    """The text [start, stop) in pieces that are inside or outside of generation blocks."""
    edges = sorted({e for b in blocks for e in (b.start, b.stop) if start < e < stop})
    for a, b in zip([start, *edges], [*edges, stop], strict=True):
        yield TemplatePiece(
            text=plain[a:b], owner=owner, is_generated=_is_inside(blocks, a), place=place
        )


def _is_inside(blocks: list[range], at: int) -> bool:
    return any(at in block for block in blocks)
