"""Jinja chat templates in exact parts, found by running the template in jinja2's sandbox.

1. Render a sequence of roles once with a marker for each content; all must come out, in order.
2. The contents of {% generation %} blocks are trained. Without them a turn ends where the text of
the conversation up to there ends, which must start the longer text.
3. Render each conversation with its contents too: the parts must add up to the same text.
"""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from wlb.plan import UserError
from wlb.prepare.chat_template import (
    BUILT_IN,
    ChatTemplate,
    Rendered,
    TemplatePart,
    Train,
    Turns,
    trained_messages,
)
from wlb.prepare.conversation import Conversation, Role
from wlb.prepare.encode import token_text

if TYPE_CHECKING:
    from jinja2 import Template

# A private-use character that marks contents; messages that contain it are refused.
_MARK = "\U000f5eed"
_BEGIN, _END = f"{_MARK}[", f"{_MARK}]"
_MARKS = re.compile(f"({_MARK}\\[|{_MARK}\\]|{_MARK}[0-9]+{_MARK})")
_MOST_SHAPES = 4096
"""Most sequences of roles whose rendering is cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Consecutive text of a rendering with markers, or the content of message `owner`.

    owner: the message whose turn the text belongs to. is_end: whether it follows its content.
    """

    text: str
    owner: int
    is_content: bool = False
    is_generated: bool = False
    is_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A sequence of roles, rendered with markers.

    is_end_known: for each message, whether the whole text begins with the rendering of the messages
    up to this one.
    """

    pieces: tuple[_Piece, ...]
    is_end_known: tuple[bool, ...]


class JinjaTemplate:
    """A template's source and its variables (bos_token, date_string, ...)."""

    def __init__(self, source: str, *, name: str, variables: Mapping[str, Any]) -> None:
        self.name = name
        self._variables = dict(variables)
        self._template, self.has_generation, wanted = _compile(source, name)
        missing = sorted(w for w in wanted - self._variables.keys() if w.endswith("_token"))
        if missing:
            raise UserError(
                f"chat template {name} uses {', '.join(missing)}, which nothing gives; put it into "
                f"the tokenizer_config.json beside it, or give it as a variable"
            )
        self._shape = lru_cache(_MOST_SHAPES)(self._measure)

    def render(self, conversation: Conversation, turns: Turns) -> Rendered:
        """UserError for a conversation whose parts are not exactly known."""
        contents = [message.content for message in conversation.messages]
        for i, content in enumerate(contents):
            if _MARK in content:
                raise UserError(f"message {i} contains {_MARK!a}, which marks contents here")
        roles = conversation.roles
        shape = self._shape(roles)
        contents = self._as_rendered(shape, contents, roles)
        trained = set(trained_messages(conversation, turns))
        parts = tuple(
            TemplatePart(
                text=contents[piece.owner] if piece.is_content else piece.text,
                is_content=piece.is_content,
                train=self._train(piece, shape) if piece.owner in trained else Train.NO,
            )
            for piece in shape.pieces
        )
        first = [piece.owner for piece in shape.pieces]
        later = [i for i, role in enumerate(roles) if i and role == Role.USER]
        starts = [first.index(i) for i in later if shape.is_end_known[i - 1]]
        has_system = roles[0] == Role.SYSTEM
        has_bos = shape.pieces[0].text == self._variables.get("bos_token")
        prefix = first.count(0) if has_system else int(has_bos)
        is_apart = not has_system or shape.is_end_known[0]
        return Rendered(
            parts=parts,
            turns=tuple(start for start in starts if start > prefix),
            prefix=prefix if is_apart else None,
        )

    def _train(self, piece: _Piece, shape: _Shape) -> Train:
        """Return which tokens are trained of a piece of a trained message."""
        if self.has_generation:
            return Train.ALL if piece.is_generated else Train.NO
        if piece.is_content:
            return Train.ALL
        if not shape.is_end_known[piece.owner]:
            raise UserError(
                f"chat template {self.name} writes message {piece.owner} differently when more "
                f"messages follow, so where its turn ends is not known; put what the assistant "
                f"generates into {{% generation %}} blocks, or train only the last turn"
            )
        return Train.END if piece.is_end else Train.NO

    def _as_rendered(self, shape: _Shape, contents: list[str], roles: Sequence[Role]) -> list[str]:
        """The contents as the template writes them: as they are, or stripped for some roles."""
        real = _MARKS.sub("", self._text(roles, contents))
        padded = sorted({r for r, c in zip(roles, contents, strict=True) if c != c.strip()})
        kinds: list[Callable[[str], str]] = [str, str.strip, str.lstrip, str.rstrip]
        for choice in itertools.product(kinds, repeat=len(padded)):
            change = dict(zip(padded, choice, strict=True))
            made = [change.get(r, str)(c) for r, c in zip(roles, contents, strict=True)]
            text = "".join(made[p.owner] if p.is_content else p.text for p in shape.pieces)
            if text == real:
                return made
        raise UserError(
            f"chat template {self.name} changes the contents of this conversation (it does more "
            f"than remove white space around them), so what is trained is not exactly known; use "
            f"a template that writes contents as they are"
        )

    def _measure(self, roles: tuple[Role, ...]) -> _Shape:
        """Renders with markers and finds where turns end (steps 1 and 2 of the module)."""
        markers = [f"{_MARK}{i}{_MARK}" for i in range(len(roles))]
        marked = self._text(roles, markers)
        plain = marked.replace(_BEGIN, "").replace(_END, "")
        ends: list[int | None] = [None] * len(roles)
        for i, role in enumerate(roles):
            if role == Role.ASSISTANT or i == 0 or i + 1 == len(roles):
                ends[i] = self._end(roles[: i + 1], markers, plain)
        found = [int(t.strip(_MARK)) for t in _MARKS.split(marked)[1::2] if t not in (_BEGIN, _END)]
        if found != list(range(len(roles))):
            raise UserError(
                f"chat template {self.name} writes the contents of messages {found} of "
                f"{len(roles)} ({', '.join(roles)}): it repeats, leaves out or changes some, so "
                f"what is trained is not exactly known"
            )
        pieces = _pieces(marked, ends, start=str(self._variables.get("bos_token", "")))
        for piece in pieces:
            if piece.is_content and piece.is_generated and roles[piece.owner] != Role.ASSISTANT:
                raise UserError(
                    f"chat template {self.name} has the {roles[piece.owner]}'s message "
                    f"{piece.owner} in a {{% generation %}} block, which would train it"
                )
        return _Shape(pieces=tuple(pieces), is_end_known=tuple(end is not None for end in ends))

    def _end(self, roles: tuple[Role, ...], markers: list[str], plain: str) -> int | None:
        """Length of the rendering of the first messages, if `plain` begins with it."""
        try:
            text = self._text(roles, markers[: len(roles)])
        # Templates may refuse a conversation that is not complete.
        except UserError:
            return None
        text = text.replace(_BEGIN, "").replace(_END, "")
        # Some templates write a system message only together with the user's first message.
        is_whole = markers[len(roles) - 1] in text
        return len(text) if is_whole and plain.startswith(text) else None

    def _text(self, roles: Sequence[Role], contents: Sequence[str]) -> str:
        from jinja2 import TemplateError

        messages = [
            {"role": str(role), "content": content}
            for role, content in zip(roles, contents, strict=True)
        ]
        try:
            return self._template.render(
                {**self._variables, "messages": messages, "add_generation_prompt": False}
            )
        except (TemplateError, TypeError) as error:
            raise UserError(f"chat template {self.name} refuses it: {error}") from error


def _pieces(marked: str, ends: Sequence[int | None], *, start: str) -> list[_Piece]:
    """The rendering in pieces, cut at the known ends of turns."""
    out: list[_Piece] = []
    content, depth, at = -1, 0, 0
    # is_direct: whether the block that wrote the last content is still open.
    is_direct = False

    def add(text: str, owner: int, is_end: bool) -> None:
        if text or is_end:
            out.append(_Piece(text=text, owner=owner, is_generated=depth > 0, is_end=is_end))

    for token in _MARKS.split(marked):
        if token in (_BEGIN, _END):
            depth += 1 if token == _BEGIN else -1
            is_direct = is_direct and depth > 0
        elif token.startswith(_MARK):
            content += 1
            is_direct = depth > 0
            out.append(_Piece(text=token, owner=content, is_content=True, is_generated=depth > 0))
            at += len(token)
        elif content < 0:
            head = start if start and token.startswith(start) else ""
            add(head, 0, False)
            add(token[len(head) :], 0, False)
            at += len(token)
        else:
            end, following = ends[content], min(content + 1, len(ends) - 1)
            if end is None:
                add(token, content if is_direct else following, False)
            else:
                cut = min(max(end - at, 0), len(token))
                add(token[:cut], content, is_end=at <= end)
                add(token[cut:], following, False)
            at += len(token)
    return out


def _compile(source: str, name: str) -> tuple["Template", bool, set[str]]:
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
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_BEGIN, _END))
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


def load_template(name: str | Path, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
    """A built-in template by name, or the Jinja template of a file.

    A `.json` file is a tokenizer_config.json with a chat_template; any other file is the template
    itself and takes bos_token and the like from a tokenizer_config.json beside it. variables:
    further variables of the template, such as date_string.
    """
    given = dict(variables or {})
    if str(name) in BUILT_IN:
        if given:
            raise UserError(f"chat template {name} has no variables, got {sorted(given)}")
        return BUILT_IN[str(name)]
    path = Path(name)
    if not path.is_file():
        raise UserError(
            f"no chat template {name}: give one of {', '.join(BUILT_IN)}, a tokenizer_config.json "
            f"or a file with a Jinja template"
        )
    config_path = path if path.suffix == ".json" else path.with_name("tokenizer_config.json")
    try:
        has_config = config_path.is_file()
        config: dict[str, Any] = json.loads(config_path.read_bytes()) if has_config else {}
    except ValueError as error:
        raise UserError(f"{config_path} is not JSON: {error}") from error
    source = _source_of(config, path) if path.suffix == ".json" else path.read_text("utf-8")
    tokens = {key: token_text(value) for key, value in config.items() if key.endswith("_token")}
    known = {key: value for key, value in tokens.items() if value is not None}
    return JinjaTemplate(source, name=str(name), variables={**known, **given})


def _source_of(config: dict[str, Any], path: Path) -> str:
    found: Any = config.get("chat_template")
    if isinstance(found, list):
        named = {t["name"]: t["template"] for t in cast(list[dict[str, str]], found)}
        found = named.get("default")
    if not isinstance(found, str):
        raise UserError(f"{path} has no chat_template; give the file that has it")
    return found
