"""Compiles Jinja chat templates as transformers does, with marks around {% generation %} blocks."""

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from wlb.plan import UserError
from wlb.plan.errors import shortened
from wlb.plan.read_file import WRONG_SHAPE
from wlb.prepare.jinja_limits import Spent, limited_environment, with_steps

if TYPE_CHECKING:
    from jinja2 import Template

MOST_SOURCE = 1 << 20
"""Most characters of a template; models' have some thousand."""
MARK, BEGIN, END = "\U000f5eed", "\U000f5eee", "\U000f5eef"
"""Private-use characters: of contents, and of begins and ends of generation blocks. What a template
writes beside a content, such as "[", cannot complete one. Conversations and templates that contain
one are refused."""
MARKS = re.compile(f"({BEGIN}|{END}|{MARK}[0-9]+{MARK})")
"""Finds the marks of generation blocks, and of fields (`marker`)."""


def marker(field: int) -> str:
    """What stands for a field of a message, such as its content."""
    return f"{MARK}{field}{MARK}"


def mark_in(text: str) -> str:
    """The first of the marks that `text` contains, escaped; "" for none."""
    return next((ascii(mark) for mark in (MARK, BEGIN, END) if mark in text), "")


def compile_template(source: str, name: str, spent: Spent) -> tuple["Template", bool, set[str]]:
    """The template, whether it has generation blocks, and the variables it uses. spent: counts what
    a rendering uses."""
    if len(source) > MOST_SOURCE:
        raise UserError(
            f"{name} is not a Jinja template: it has {len(source)} characters, must have at most "
            f"{MOST_SOURCE}; give the template of a model"
        )
    if found := mark_in(source):
        raise UserError(f"chat template {name} contains {found}, which marks contents here")
    from jinja2 import TemplateError, meta, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    blocks: list[int] = []

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            blocks.append(next(parser.stream).lineno)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
            return [begin, nodes.Scope(body), end]

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = limited_environment(
        spent,
        filters={"tojson": partial(json.dumps, ensure_ascii=False)},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
    )
    # jinja2 does not type the environment's dictionaries.
    open_environment: Any = environment
    open_environment.globals["raise_exception"] = refuse
    try:
        parsed = environment.parse(source)
        wanted = meta.find_undeclared_variables(parsed)
        return environment.from_string(with_steps(parsed)), bool(blocks), wanted
    # Python's compiler refuses blocks that are nested too deeply.
    except (TemplateError, *WRONG_SHAPE) as error:
        reason = shortened(str(error) or type(error).__name__, 400)
        raise UserError(f"{name} is not a Jinja template: {reason}") from error
