"""Render chat templates in a separate process, whose CPU time and memory the kernel limits.

jinja2's sandbox keeps a template away from Python and from the machine, but it does not prevent an
endless loop or the use of all memory. So templates run in this process. The kernel ends it when a
rendering takes too long, and an allocation beyond the limit raises MemoryError. `renderer.py`
starts the process. Each request is one line of JSON on stdin, and each answer one line on stdout:

    {"source"} -> {"generation", "used"}, or {"invalid": reason}
    {"source", "given", "prefixes"} -> {"texts", "lengths"}

    generation   whether the template has {% generation %} blocks
    used         names of the variables that it uses
    given        for each rendering, the values of the template's variables
    texts        for each rendering, [text, spans of its generation blocks] or [null, reason]
    prefixes     further conversations to render, each an object {"upto", "then", "prompt", "cut"}:
                 the first `upto` messages of the last conversation in `given`, followed by the list
                 of messages `then`, and by a generation prompt if `prompt` is true. If `cut` is not
                 "", only the rendered text before that string counts.
    lengths      for each prefix the length of its text, or null if the last text does not begin
                 with it

This file runs as a script and imports nothing of wlb, so that it starts fast.
"""

import json
import math
import re
import resource
import signal
import sys
import time
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

BEGIN, END = "\U0010fffc", "\U0010fffd"
"""Characters that mark the beginning and the end of `{% generation %}` blocks in a rendering."""
_MARKS = re.compile(f"([{BEGIN}{END}])")
MOST_CHARACTERS = 1 << 26
"""The most characters that a rendered text may have."""


class Generation(Extension):
    """The tag `{% generation %}`, with which transformers marks what an assistant generates."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return nodes that write the character BEGIN, the content of a block, and then END."""
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (BEGIN, END))
        return [begin, nodes.Scope(body), end]


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON without escaping HTML, like the filter `tojson` of transformers."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def refuse(message: str) -> None:
    """Raise TemplateError. Templates call it as `raise_exception`, as in transformers."""
    raise TemplateError(message)


@lru_cache(16)
def compiled(source: str) -> tuple[Template, dict[str, Any]]:
    """Compile a template with the settings of transformers.

    Returns:
        The template, and two facts about it: "generation" (whether it has generation blocks) and
        "used" (names of the variables that it uses).
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    known: Any = environment  # jinja2 does not type the environment's dictionaries
    known.filters["tojson"] = to_json
    known.globals["raise_exception"] = refuse
    known.globals.pop("lipsum")  # its random text would change each store
    parsed = environment.parse(source)
    has_blocks = any(BEGIN in data.data for data in parsed.find_all(nodes.TemplateData))
    used = sorted(meta.find_undeclared_variables(parsed))
    return environment.from_string(source), {"generation": has_blocks, "used": used}


def rendered(template: Template, given: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Render a template, and return its text and the spans [start, stop) of generation blocks."""
    marked = template.render(given)
    if len(marked) > MOST_CHARACTERS:
        raise TemplateError(f"the template writes more than {MOST_CHARACTERS} characters")
    texts: list[str] = []
    blocks: list[tuple[int, int]] = []
    opened: list[int] = []
    at = 0
    for piece in _MARKS.split(marked):
        if piece == BEGIN:
            opened.append(at)
        elif piece == END:
            if not opened:
                raise TemplateError("the template ends a generation block that it did not begin")
            blocks.append((opened.pop(), at))
        else:
            texts.append(piece)
            at += len(piece)
    if opened:
        raise TemplateError("the template does not end a generation block")
    return "".join(texts), blocks


def answer(asked: dict[str, Any], limit: "CpuLimit") -> dict[str, Any]:
    """Return the answer to one request. The module's docstring describes requests and answers."""
    limit.start()
    try:
        template, about = compiled(asked["source"])
    # Catch everything: Python's compiler, for example, refuses blocks that are nested too deeply.
    except Exception as error:
        return {"invalid": reason_of(error)}
    if "given" not in asked:
        return about
    texts: list[Any] = []
    for given in asked["given"]:
        limit.start()
        try:
            texts.append(rendered(template, given))
        except Exception as error:
            texts.append([None, reason_of(error)])
    whole = texts[-1][0] or ""
    lengths: list[int | None] = []
    for prefix in asked["prefixes"]:
        limit.start()
        lengths.append(length_of(template, asked["given"][-1], prefix, whole))
    return {"texts": texts, "lengths": lengths}


def length_of(
    template: Template, given: dict[str, Any], prefix: dict[str, Any], whole: str
) -> int | None:
    """Render the beginning of a conversation, and return the number of characters of its text.

    Args:
        template: The chat template.
        given: Variables of the whole conversation.
        prefix: Describes the beginning (see "prefixes" in the module's docstring).
        whole: Text of the whole conversation.

    Returns:
        The number of characters, or None if `whole` does not begin with the text.
    """
    messages = given["messages"][: prefix["upto"]] + prefix["then"]
    changed = {**given, "messages": messages, "add_generation_prompt": prefix["prompt"]}
    try:
        text, _ = rendered(template, changed)
    # A template may refuse an incomplete conversation.
    except Exception:
        return None
    cut = prefix["cut"]
    if cut and cut not in text:
        return None
    text = text[: text.index(cut)] if cut else text
    return len(text) if text and whole.startswith(text) else None


def reason_of(error: Exception) -> str:
    """Return the message of an error that a template raised."""
    if isinstance(error, MemoryError):
        return "the template needs more memory than a rendering may use"
    return str(error) or type(error).__name__


class CpuLimit:
    """Limits the CPU seconds of each rendering. At the limit, Linux ends this process."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._most = resource.getrlimit(resource.RLIMIT_CPU)[1]

    def start(self) -> None:
        """Begin to count the CPU time of a rendering. Call this before each one."""
        end = math.ceil(time.process_time()) + self._seconds
        soft = end if self._most == resource.RLIM_INFINITY else min(end, self._most)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, self._most))


def main(seconds: int, most_bytes: int) -> None:
    """Answer requests until stdin is closed.

    Args:
        seconds: The most CPU time of one rendering, in seconds.
        most_bytes: The most address space of this process, in bytes.
    """
    # Ctrl-C reaches this process too. Ignore it, because the parent process handles the interrupt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Restore the default action of SIGXCPU: a shell may have started this process with the signal
    # ignored, and then the limit on CPU time would not work.
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    soft = most_bytes if most == resource.RLIM_INFINITY else min(most_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (soft, most))
    limit = CpuLimit(seconds)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line), limit)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
