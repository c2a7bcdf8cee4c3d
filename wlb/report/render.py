"""Pages from the jinja2 templates of this room: a base, and one template for each page.

Python gives a context of numbers and records; sentences stand in the templates. Everything is
escaped but the SVG of figures. A page is one file that needs no network. A name that a context
lacks raises instead of printing nothing.
"""

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, **context: Any) -> str:
    """The page of `templates/<template>.html.j2`; every page needs a `title`."""
    return _environment().get_template(f"{template}.html.j2").render(context)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("wlb.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # {{ 0.5 | num(".1%") }}; jinja2 leaves the values of `filters` untyped.
    made.filters["num"] = format  # pyright: ignore[reportUnknownMemberType]
    return made
