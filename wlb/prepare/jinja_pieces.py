"""A chat template's rendering with markers, cut into pieces that belong to one message each.

Text after a content belongs to its message up to the known end of that turn. A message that has no
content to mark (it only calls tools) owns what is between the known begin and end of its turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wlb.plan import UserError
from wlb.prepare.jinja_compile import BEGIN, END, MARKS


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplatePiece:
    """Consecutive text of a rendering with markers, or the content of message `owner`.

    owner: the message whose turn the text belongs to. is_end: whether it ends that turn.
    """

    text: str
    owner: int
    is_content: bool = False
    is_generated: bool = False
    is_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlaces:
    """Places in a rendering without marks, by message; None where one is not known.

    begins: where what an assistant generates begins, of messages that have no content. ends: where
    turns end.
    """

    begins: Sequence[int | None]
    ends: Sequence[int | None]


@dataclass(slots=True)
class _Gap:
    """Text [start, stop) between the contents of messages `before` (-1 for none) and `after`.

    open_until: where the generation block that wrote the content before it closes; `start` if none.
    """

    start: int
    stop: int
    before: int
    after: int
    open_until: int


def marked_messages(marked: str) -> list[int]:
    """The messages whose contents a rendering holds, in order."""
    tokens = MARKS.split(marked)[1::2]
    return [int(token[1:-1]) for token in tokens if token not in (BEGIN, END)]


def without_blocks(marked: str) -> str:
    return marked.replace(BEGIN, "").replace(END, "")


def pieces_of(marked: str, places: TurnPlaces, *, start: str) -> list[TemplatePiece]:
    """The rendering in pieces. start: the text that begins it, if it does, is a piece of its own
    (BOS)."""
    plain = without_blocks(marked)
    blocks, gaps, contents = _scan(marked, num_messages=len(places.ends))
    out: list[TemplatePiece] = []
    for gap in gaps:
        first = gap.start
        if gap.before < 0 and start and plain.startswith(start):
            out.append(TemplatePiece(text=start, owner=0))
            first = len(start)
        for a, b, owner, is_end in _regions(gap, places, first):
            out += _cut_at_blocks(plain, a, b, owner, is_end, blocks)
        if gap.after in contents:
            at = contents[gap.after]
            is_generated = _is_inside(blocks, at)
            text = plain[at : gap_end(plain, at)]
            out.append(
                TemplatePiece(
                    text=text, owner=gap.after, is_content=True, is_generated=is_generated
                )
            )
    return out


def gap_end(plain: str, at: int) -> int:
    """Where the marker that begins at `at` ends."""
    return plain.index(plain[at], at + 1) + 1


def _scan(marked: str, num_messages: int) -> tuple[list[range], list[_Gap], dict[int, int]]:
    """Generation blocks, the gaps between contents, and the place of each content."""
    blocks: list[range] = []
    opened: list[int] = []
    contents: dict[int, int] = {}
    edges: list[tuple[int, int, int]] = []  # (message, start, stop) of contents
    at = 0
    for token in MARKS.split(marked):
        if token == BEGIN:
            opened.append(at)
        elif token == END:
            if not opened:
                raise UserError("the chat template ends a generation block that it did not begin")
            blocks.append(range(opened.pop(), at))
        elif MARKS.fullmatch(token):
            contents[int(token[1:-1])] = at
            edges.append((int(token[1:-1]), at, at + len(token)))
            at += len(token)
        else:
            at += len(token)
    if opened:
        raise UserError("the chat template leaves a generation block without its end")
    gaps: list[_Gap] = []
    before, begin = -1, 0
    for message, start, stop in [*edges, (num_messages, at, at)]:
        inside = [b.stop for b in blocks if before >= 0 and b.start < begin <= b.stop]
        gaps.append(_Gap(begin, start, before, message, max([begin, *inside])))
        before, begin = message, stop
    return blocks, gaps, contents


def _regions(gap: _Gap, places: TurnPlaces, first: int) -> Iterator[tuple[int, int, int, bool]]:
    """(start, stop, owner, is_end) of the parts of a gap; only ends of turns may be empty."""
    at, last = first, len(places.ends) - 1
    owner = max(gap.before, 0)
    if gap.before >= 0 and places.ends[gap.before] is None:
        # What a block writes directly after a content is of the same message.
        if at < (stop := min(gap.open_until, gap.stop)):
            yield at, stop, gap.before, False
            at = stop
        owner = min(gap.before + 1, last)
    for message in range(max(gap.before, 0), min(gap.after, last + 1)):
        begin, end = places.begins[message], places.ends[message]
        if begin is not None and at < begin <= gap.stop:
            yield at, begin, min(owner, message), False
            at, owner = begin, message
        if end is not None and at <= end <= gap.stop:
            yield at, end, message, True
            at, owner = end, min(message + 1, last)
    if at < gap.stop:
        yield at, gap.stop, owner, False


def _cut_at_blocks(
    plain: str, start: int, stop: int, owner: int, is_end: bool, blocks: list[range]
) -> Iterator[TemplatePiece]:
    """The text [start, stop) in pieces that are inside or outside of generation blocks."""
    edges = sorted({e for b in blocks for e in (b.start, b.stop) if start < e < stop})
    for a, b in zip([start, *edges], [*edges, stop], strict=True):
        yield TemplatePiece(
            text=plain[a:b], owner=owner, is_generated=_is_inside(blocks, a), is_end=is_end
        )


def _is_inside(blocks: list[range], at: int) -> bool:
    return any(at in block for block in blocks)
