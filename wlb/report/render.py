"""Rendering of HTML pages from the jinja2 templates in wlb/report/templates.

`base.html.j2` is the frame of all pages, and each page has a template of its own. Python passes
numbers and records to the templates, which contain the sentences. All values are escaped except the
SVG of figures. A page is one file that needs no network. If a template uses a name that Python did
not pass, rendering raises an error.
"""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined


def render(template: str, *, folder: Path | None = None, **context: Any) -> str:
    """Return the HTML page that the template `<template>.html.j2` makes.

    Args:
        template: Name of the template without suffix.
        folder: Folder of the template. None means wlb/report/templates. A template of another
            folder may extend those in wlb/report/templates.
        **context: Values that the template uses, by name. Every page needs a `title`.
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
    # Templates format numbers with this filter: {{ 0.5 | num(".1%") }}. Pyright complains because
    # jinja2 does not type `filters`.
    made.filters["num"] = format  # pyright: ignore[reportUnknownMemberType]
    return made
