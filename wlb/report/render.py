"""Pages from the jinja2 templates of this room: a base, and one template for each page.

Python gives a context of numbers and records; sentences stand in the templates. Everything is
escaped but the SVG of figures. A page is one file that needs no network. A name that a context
lacks raises instead of printing nothing.
"""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined


def render(template: str, *, folder: Path | None = None, **context: Any) -> str:
    """The page of `templates/<template>.html.j2`; every page needs a `title`.

    folder: has the template, which may extend those of this room; None for one of them.
    """
    return _environment(folder).get_template(f"{template}.html.j2").render(context)


@cache
def _environment(folder: Path | None) -> Environment:
    ours = PackageLoader("wlb.report")
    made = Environment(
        loader=ours if folder is None else ChoiceLoader([FileSystemLoader(folder), ours]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # {{ 0.5 | num(".1%") }}; jinja2 leaves the values of `filters` untyped.
    made.filters["num"] = format  # pyright: ignore[reportUnknownMemberType]
    return made
