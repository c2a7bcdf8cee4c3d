"""Tables for the terminal as all commands print them: a number is never cut.

Where a table is wider than its terminal, its columns are printed in several blocks below each
other, each with the labels again; every column keeps its name, and none is left out. Pipes and
files get the whole width.
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
"""Columns of an output that is no terminal; more than any table needs."""
_FOLDED = 24
"""Columns that a text which folds gets before numbers move to another block."""


def console(*, stderr: bool = False, **options: Any) -> Console:
    """The console of a command. options: of rich's Console, such as markup."""
    made = Console(stderr=stderr, highlight=False, **options)
    if made.is_terminal:
        return made
    return Console(stderr=stderr, highlight=False, width=WHOLE, **options)


class BlockTable(Table):
    """A rich table that becomes several blocks where it is too wide. num_labels: first columns,
    which every block has.
    """

    num_labels = 1

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
        """Columns of each block, each with the labels."""
        labels, others = self.columns[: self.num_labels], self.columns[self.num_labels :]
        taken = sum(_width(column, unfolded=True) for column in labels)
        if taken > width // 2:
            taken = sum(map(_width, labels))
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
    moved = copy.copy(column)
    moved._index = at  # pyright: ignore[reportPrivateUsage]
    return moved


def _width(column: Column, *, unfolded: bool = False) -> int:
    """Columns of the terminal that a column needs, with padding and a line beside it. unfolded:
    also if it may fold.
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
    """An empty table with columns of labels, of texts, which fold, and of numbers.

    Every block of a narrow terminal has the labels, or the first text if there is no label.
    is_plain: only the heads are ruled. options: of rich's Table, such as its caption.
    """
    plain: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False} if is_plain else {}
    # A title with brackets is no markup.
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
    """An empty table of names and their values, which fold between words."""
    table = Table(title=Text(title, style="table.title"), title_justify="left", show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    return table
