"""Tables for the terminal, used by all commands; a number is never cut.

A table that is wider than its terminal is printed in several blocks below each other. Each block
repeats the labels, and no column is left out. Pipes and files get the whole width.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

WHOLE = 10_000
"""Width in characters of an output that is not a terminal. No table needs more."""
_FOLDED = 24
"""A column of text may fold to this many characters before numbers move to another block."""


def console(*, stderr: bool = False, **options: Any) -> Console:
    """Return the console on which a command prints; `options` go to rich's Console."""
    made = Console(stderr=stderr, highlight=False, **options)
    if made.is_terminal:
        return made
    return Console(stderr=stderr, highlight=False, width=WHOLE, **options)


class BlockTable(Table):
    """A rich table that is printed in several blocks if it is too wide."""

    num_labels = 1  # number of first columns that every block repeats

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        blocks = list(self._blocks(options.max_width))
        if len(blocks) == 1:
            yield from super().__rich_console__(console, options)
            return
        for i, columns in enumerate(blocks):
            part = copy.copy(self)
            part.columns = [_placed(column, at) for at, column in enumerate(columns)]
            part.title = self.title if i == 0 else None
            part.caption = None
            yield from Table.__rich_console__(part, console, options)
        if self.caption:
            # Below a narrow block the caption would fold into its few columns.
            yield Text(str(self.caption), style="table.caption")

    def _blocks(self, width: int) -> Iterator[list[Column]]:
        """Yield the columns of each block, the labels included."""
        labels, others = self.columns[: self.num_labels], self.columns[self.num_labels :]
        taken = sum(_width(column, unfolded=True) for column in labels)
        # Labels that would fill half the terminal are folded.
        if taken > width // 2:
            taken = sum(map(_width, labels))
        # One character is the left border.
        free = width - 1 - taken
        block: list[Column] = []
        left = free
        for column in others:
            if block and _width(column) > left:
                yield [*labels, *block]
                block, left = [], free
            block.append(column)
            left -= _width(column)
        yield [*labels, *block]


def _placed(column: Column, at: int) -> Column:
    """Return a copy of a column at another index of its table."""
    moved = copy.copy(column)
    moved._index = at  # pyright: ignore[reportPrivateUsage]
    return moved


def _width(column: Column, *, unfolded: bool = False) -> int:
    """Return the characters that a column needs, with padding and the line beside it.

    Args:
        column: The column.
        unfolded: Measure a column that may fold without folding it.
    """
    texts = [str(cell) for cell in (column.header, *column.cells)]
    lines = [line for text in texts for line in text.splitlines()]
    if not (column.no_wrap or unfolded):
        words = [word for line in lines for word in line.split()]
        return 3 + min(_FOLDED, max(map(cell_len, words), default=0))
    return 3 + max(map(cell_len, lines), default=0)


def new_table(
    title: str | None = None,
    *,
    labels: Iterable[str] = (),
    texts: Iterable[str] = (),
    numbers: Iterable[str] = (),
    is_plain: bool = False,
    **options: Any,
) -> BlockTable:
    """Return an empty table with columns of labels, of texts, and of numbers.

    Args:
        title: Title above the table.
        labels: Names of the columns that every block of a narrow terminal repeats. Without labels,
            the first text is repeated.
        texts: Names of columns whose cells may fold.
        numbers: Names of columns that are never folded or cut.
        is_plain: Draw a line only below the heads.
        **options: Further arguments of rich's Table, such as its caption.
    """
    plain: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False} if is_plain else {}
    # As a Text, a title with brackets is not taken for markup.
    shown = None if title is None else Text(title, style="table.title")
    table = BlockTable(
        title=shown, title_justify="left", caption_justify="left", **plain, **options
    )
    for name in labels:
        table.add_column(name, no_wrap=True)
    for name in texts:
        table.add_column(name, overflow="fold")
    table.num_labels = max(1, sum(column.no_wrap for column in table.columns))
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def facts_table(title: str) -> Table:
    """Return an empty table of names and values; values fold between words."""
    table = Table(title=Text(title, style="table.title"), title_justify="left", show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    return table
