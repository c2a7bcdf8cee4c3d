"""Compiles Jinja chat templates as transformers does, with marks around {% generation %} blocks."""

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from wlb.plan import UserError

if TYPE_CHECKING:
    from jinja2 import Template

MARK = "\U000f5eed"
"""A private-use character that marks contents; conversations that contain it are refused."""
BEGIN, END = f"{MARK}[", f"{MARK}]"
MARKS = re.compile(f"({MARK}\\[|{MARK}\\]|{MARK}[0-9]+{MARK})")
"""Finds the marks of generation blocks, and of contents (`marker`)."""


def marker(message: int) -> str:
    """What stands for the content of a message."""
    return f"{MARK}{message}{MARK}"


def compile_template(source: str, name: str) -> tuple["Template", bool, set[str]]:
    """The template, whether it has generation blocks, and the variables it uses."""
    from jinja2 import TemplateError, meta, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

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

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    # jinja2 does not type the environment's dictionaries.
    open_environment: Any = environment
    open_environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    open_environment.globals["raise_exception"] = refuse
    try:
        wanted = meta.find_undeclared_variables(environment.parse(source))
        blocks.clear()
        return environment.from_string(source), bool(blocks), wanted
    except TemplateError as error:
        raise UserError(f"{name} is not a Jinja template: {error}") from error
