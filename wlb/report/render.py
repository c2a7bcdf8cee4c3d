"""HTML pages from the jinja2 templates of this room: one base, and one template for each page.

Python passes numbers and records; sentences are in the templates. Everything is escaped except the
SVG of figures. A page is one file that needs no network. A template that uses a name which is
missing in the context raises an error.
"""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined


def render(template: str, *, folder: Path | None = None, **context: Any) -> str:
    """Return the page of `templates/<template>.html.j2`.

    Args:
        template: Name of the template.
        folder: Folder that has the template, if it is not one of this room. It may extend templates
            of this room.
        **context: What the template needs; every page needs a `title`.
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
    # Used as {{ 0.5 | num(".1%") }}. pyright complains because jinja2 does not type `filters`.
    made.filters["num"] = format  # pyright: ignore[reportUnknownMemberType]
    return made
