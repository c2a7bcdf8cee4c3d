"""Tables for the terminal as all comparisons print them."""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.table import Table


def new_table(
    title: str | None = None,
    *,
    labels: Iterable[str] = (),
    texts: Iterable[str] = (),
    numbers: Iterable[str],
    is_plain: bool = False,
    **options: Any,
) -> Table:
    """An empty table with columns of labels, of texts, which fold, and of numbers.

    is_plain: only the heads are ruled. options: of rich's Table, such as its caption.
    """
    plain: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False} if is_plain else {}
    table = Table(title=title, title_justify="left", caption_justify="left", **plain, **options)
    for name in labels:
        table.add_column(name, no_wrap=True)
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
