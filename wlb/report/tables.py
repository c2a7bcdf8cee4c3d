"""Tables for the terminal, which all commands use. They never cut a number or leave out a column.

A table that is wider than the terminal is printed as several blocks, one below the other. Each
block has some of the columns and repeats the labels of the rows. In a pipe or a file, tables have
their whole width.
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
"""Width in characters that is assumed for pipes and files. No table is wider."""
_FOLDED = 24
"""A column of text is broken into lines of at least this many characters. If the table is still too
wide, columns of numbers move to another block."""


def console(*, stderr: bool = False, **options: Any) -> Console:
    """Return the rich Console on which a command prints.

    Args:
        stderr: Whether it prints to stderr instead of stdout.
        **options: Further arguments of `rich.console.Console`.
    """
    made = Console(stderr=stderr, highlight=False, **options)
    if made.is_terminal:
        return made
    return Console(stderr=stderr, highlight=False, width=WHOLE, **options)


class BlockTable(Table):
    """A rich table that is printed in several blocks of columns if the terminal is too narrow."""

    num_labels = 1  # every block repeats this many of the table's first columns

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
            # Print the caption separately, because rich would break it into lines as narrow as a
            # block.
            yield Text(str(self.caption), style="table.caption")

    def _blocks(self, width: int) -> Iterator[list[Column]]:
        """Divide the table into blocks that fit the terminal, and yield the columns of each block.

        Every block begins with the columns that label the rows.

        Args:
            width: Width of the terminal in characters.
        """
        labels, others = self.columns[: self.num_labels], self.columns[self.num_labels :]
        taken = sum(_width(column, unfolded=True) for column in labels)
        # Break labels into lines if they would take more than half of the terminal.
        if taken > width // 2:
            taken = sum(map(_width, labels))
        # Subtract one character for the left border.
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
    """Return a copy of a column that has the index `at` in its table."""
    moved = copy.copy(column)
    moved._index = at  # pyright: ignore[reportPrivateUsage]
    return moved


def _width(column: Column, *, unfolded: bool = False) -> int:
    """Return the width of a column in characters, with its padding and a border.

    Args:
        column: The column.
        unfolded: Whether a column of text is measured without breaking it into lines.
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
    """Return a table without rows that has columns for labels, texts and numbers, in this order.

    Args:
        title: Title above the table; None = no title.
        labels: Headings of the columns that label rows. A table that is too wide for the terminal
            is printed in several blocks of columns, each of which repeats these columns. If there
            are none, the first text column is repeated.
        texts: Headings of columns whose cells may be broken into lines.
        numbers: Headings of columns whose cells are never broken or cut.
        is_plain: Whether to draw only the line below the headings, and no borders.
        **options: Further arguments of `rich.table.Table`, such as `caption`.
    """
    plain: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False} if is_plain else {}
    # Make the title a Text, so that rich does not take brackets in it for markup.
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
    """Return a table without rows that has a column for names and a column for values."""
    table = Table(title=Text(title, style="table.title"), title_justify="left", show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    return table
