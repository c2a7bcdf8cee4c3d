"""Limits of running somebody else's Jinja template: steps, time, and sizes of what it makes.

jinja2's sandbox keeps a template from Python and from the machine, but not from looping for ever or
filling memory. `limited_environment` counts steps (`with_steps` puts one into every loop and macro)
and refuses results before they are made, where their size follows from what goes in.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

from wlb.plan import UserError

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_STEPS = 300_000
"""Most iterations of loops and calls of a rendering; a conversation of 10,000 messages takes some
ten thousands."""
MOST_CPU_S = 3.0
MOST_CHARACTERS = 1 << 26
"""Most characters of a rendering, and of any text on the way."""
MOST_ITEMS = 1 << 20
"""Most entries of a list on the way."""
_MOST_ARGUMENT = 100_000
_MOST_BITS = 100_000
_STEPS_PER_LOOK = 64
_STEP, _JOIN = "wlb_step", "wlb_join"
_WIDE = re.compile(r"[0-9]{6}|\*|\{[^{}]*\{")
"""Formats that may pad to any width: six digits, a width from the values, or nested fields."""


class Spent(threading.local):
    """What the rendering of this thread has used."""

    steps = 0
    characters = 0
    end_s = 0.0

    def start(self) -> None:
        """Begin a rendering."""
        self.steps = self.characters = 0
        self.end_s = time.thread_time() + MOST_CPU_S

    def step(self) -> str:
        """Count an iteration or a call; TemplateLimit beyond the limits."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise _error(f"takes more than {MOST_STEPS} steps")
        if self.steps % _STEPS_PER_LOOK == 0 and time.thread_time() > self.end_s:
            raise _error(f"takes more than {MOST_CPU_S:g} s")
        return ""

    def write(self, value: Any) -> str:
        """Count what is written; `value` as text."""
        text = value if isinstance(value, str) else str(value)
        self.characters += len(text)
        if self.characters > MOST_CHARACTERS:
            raise _error(f"writes more than {MOST_CHARACTERS} characters")
        return text


class TemplateLimit(UserError):
    """A template takes more than a rendering may."""


def _error(what: str) -> TemplateLimit:
    return TemplateLimit(f"it {what}; use a template that writes each message once")


def _size(value: Any) -> int:
    return len(cast(Any, value)) if isinstance(value, str | bytes | list | tuple | dict) else 1


def _check_size(size: int, made: Any = "") -> None:
    """TemplateLimit for a text or list of `size`. made: of its kind."""
    most = MOST_ITEMS if isinstance(made, list | tuple) else MOST_CHARACTERS
    if size > most:
        raise _error(f"makes a text or list of {size}, more than {most}")


def check_operation(operator: str, left: Any, right: Any) -> None:
    """TemplateLimit for an operation whose result would be too large."""
    is_numbers = isinstance(left, int | float) and isinstance(right, int | float)
    match operator:
        case "+" if not is_numbers:
            _check_size(_size(left) + _size(right), left)
        case "*" if not is_numbers:
            times = next((v for v in (left, right) if isinstance(v, int)), 1)
            many = right if isinstance(left, int) else left
            _check_size(_size(many) * max(0, times), many)
        case "*" | "**" if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (bits + right.bit_length() if operator == "*" else bits * right) > _MOST_BITS:
                raise _error(f"computes a number of more than {_MOST_BITS} bits")
        case "%" if isinstance(left, str) and _WIDE.search(left):
            raise _error(f"formats with {left[:40]!r}")
        case _:
            pass


def check_call(subject: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """TemplateLimit for a filter, or a method of a text, whose result could be too large.

    subject: the text that it is applied to.
    """
    given = [*arguments, *named.values()]
    for value in given:
        if isinstance(value, int | float) and abs(value) > _MOST_ARGUMENT:
            raise _error(f"passes {value}, must be at most {_MOST_ARGUMENT}")
    # `replace` and `join` repeat their arguments up to once for each part of the subject.
    longest = max((len(v) for v in given if isinstance(v, str)), default=0)
    if isinstance(subject, str | list | tuple):
        some = cast("str | list[Any] | tuple[Any, ...]", subject)
        _check_size(len(some) * longest if longest * len(some) > MOST_CHARACTERS * 4 else 0)
    if isinstance(subject, str) and given and "{" in subject and _WIDE.search(subject):
        raise _error(f"formats with {subject[:40]!r}")


def _limited(filter_of: Callable[..., Any], spent: Spent) -> Callable[..., Any]:
    """A filter that checks its arguments first. jinja2 marks filters that take the environment."""
    has_context = getattr(filter_of, "jinja_pass_arg", None) is not None

    @wraps(filter_of)
    def checked(*arguments: Any, **named: Any) -> Any:
        spent.step()
        subject, *others = arguments[1:] if has_context else arguments
        check_call(subject, tuple(others), named)
        made = filter_of(*arguments, **named)
        _check_size(_size(made), made)
        return made

    return checked


def with_steps(template: "nodes.Template") -> "nodes.Template":
    """The parsed template with a step in every loop and macro, and joins (`~`) that are checked."""
    from jinja2 import nodes

    for node in list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
        step = nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno))
    _replace_joins(template)
    return template


def _replace_joins(node: "nodes.Node") -> None:
    from jinja2 import nodes

    for name, value in list(node.iter_fields()):
        listed: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
        made: list[Any] = []
        for inner in listed:
            if isinstance(inner, nodes.Node):
                _replace_joins(inner)
            if isinstance(inner, nodes.Concat):
                call = nodes.Call(nodes.Name(_JOIN, "load"), inner.nodes, [], None, None)
                inner = call.set_lineno(inner.lineno)
            made.append(inner)
        setattr(node, name, made if isinstance(value, list) else made[0])


def limited_environment(
    spent: Spent, *, filters: Mapping[str, Callable[..., Any]], **options: Any
) -> "ImmutableSandboxedEnvironment":
    """jinja2's immutable sandbox with the limits and further `filters`; `spent` counts."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Limited(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            check_operation(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            if __obj != spent.step:
                spent.step()
            # The sandbox wraps `format`, a method of text as well.
            subject = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
            if isinstance(subject, str | list | tuple):
                # `separator.join(parts)` repeats the separator, not the parts.
                is_join = bool(args) and getattr(__obj, "__name__", "") == "join"
                text = cast(Any, subject)
                check_call(*((args[0], (text,)) if is_join else (text, args)), kwargs)
            return super().call(__context, __obj, *args, **kwargs)  # pyright: ignore

    environment = Limited(finalize=spent.write, **options)
    # jinja2 does not type the environment's dictionaries.
    known: Any = environment
    for name, filter_of in {**known.filters, **filters}.items():
        known.filters[name] = _limited(filter_of, spent)
    known.globals.pop("lipsum")
    known.globals[_STEP] = spent.step
    known.globals[_JOIN] = _joined
    return environment


def _joined(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)
