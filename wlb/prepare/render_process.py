"""The process that compiles and renders chat templates, so that the kernel can limit them.

jinja2's sandbox keeps a template from Python and from the machine, but not from looping for ever or
filling memory. A template runs here, and the process that takes too long or too much is ended or
gets a MemoryError; `renderer.py` starts it and says which. A line of JSON asks, a line answers:

    {"source"} -> {"generation", "used"}, or {"invalid": reason}
    {"source", "given", "prefixes"} -> {"texts", "lengths"}

given: the variables of each rendering; a text comes back as [text, blocks], or [null, reason].
prefixes: conversations that begin like the last of `given`: its first `upto` messages, those in
`then`, with a generation prompt or not. A length comes back for each that the last text begins
with, else null. `cut`: only the text in front of it counts.

It runs as a file and imports nothing of wlb, so that it starts fast.
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
"""What `{% generation %}` blocks begin and end with in a rendering."""
_MARKS = re.compile(f"([{BEGIN}{END}])")
MOST_CHARACTERS = 1 << 26
"""Most characters of a rendering."""


class Generation(Extension):
    """The blocks of transformers around what an assistant generates."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
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
    """The filter `tojson` as transformers has it, which does not escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def refuse(message: str) -> None:
    """`raise_exception` of templates."""
    raise TemplateError(message)


@lru_cache(16)
def compiled(source: str) -> tuple[Template, dict[str, Any]]:
    """The template with what there is to know about it, as transformers compiles it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    known: Any = environment  # jinja2 does not type the environment's dictionaries
    known.filters["tojson"] = to_json
    known.globals["raise_exception"] = refuse
    known.globals.pop("lipsum")  # text by chance, with which stores would differ
    parsed = environment.parse(source)
    has_blocks = any(BEGIN in data.data for data in parsed.find_all(nodes.TemplateData))
    used = sorted(meta.find_undeclared_variables(parsed))
    return environment.from_string(source), {"generation": has_blocks, "used": used}


def rendered(template: Template, given: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the places of what is in generation blocks."""
    marked = template.render(given)
    if len(marked) > MOST_CHARACTERS:
        raise TemplateError(f"it writes more than {MOST_CHARACTERS} characters")
    texts: list[str] = []
    blocks: list[tuple[int, int]] = []
    opened: list[int] = []
    at = 0
    for piece in _MARKS.split(marked):
        if piece == BEGIN:
            opened.append(at)
        elif piece == END:
            if not opened:
                raise TemplateError("it ends a generation block that it did not begin")
            blocks.append((opened.pop(), at))
        else:
            texts.append(piece)
            at += len(piece)
    if opened:
        raise TemplateError("it leaves a generation block without its end")
    return "".join(texts), blocks


def answer(asked: dict[str, Any], limit: "CpuLimit") -> dict[str, Any]:
    """The answer to one line."""
    limit.start()
    try:
        template, about = compiled(asked["source"])
    # Python's compiler refuses blocks that are nested too deeply.
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
    """The length of a prefix's rendering, if `whole` begins with it."""
    messages = given["messages"][: prefix["upto"]] + prefix["then"]
    changed = {**given, "messages": messages, "add_generation_prompt": prefix["prompt"]}
    try:
        text, _ = rendered(template, changed)
    # Templates may refuse a conversation that is not complete.
    except Exception:
        return None
    cut = prefix["cut"]
    if cut and cut not in text:
        return None
    text = text[: text.index(cut)] if cut else text
    return len(text) if text and whole.startswith(text) else None


def reason_of(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it takes more memory than a rendering may"
    return str(error) or type(error).__name__


class CpuLimit:
    """The kernel ends this process when one rendering takes longer than `seconds` of CPU time."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._most = resource.getrlimit(resource.RLIMIT_CPU)[1]

    def start(self) -> None:
        """Begin a rendering."""
        end = math.ceil(time.process_time()) + self._seconds
        soft = end if self._most == resource.RLIM_INFINITY else min(end, self._most)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, self._most))


def main(seconds: int, most_bytes: int) -> None:
    """Answer until there is nothing more to read."""
    # An interrupt is for the process that asks; this one ends when its input does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Ignored by a shell that started us, it would end no template that takes too long.
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
