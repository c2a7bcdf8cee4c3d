"""Jinja chat templates in exact parts, found by running the template in jinja2's sandbox.

1. Render a sequence of roles once with a marker for each content; all must come out, in order.
2. The contents of {% generation %} blocks are trained. Without them a turn ends where the text of
the conversation up to there ends, which must start the longer text.
3. Render each conversation with its contents too: the parts must add up to the same text.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

from wlb.plan import UserError
from wlb.plan.errors import shortened
from wlb.plan.read_file import WRONG_SHAPE, malformed, read_object
from wlb.prepare.chat_template import (
    BUILT_IN,
    ChatTemplate,
    Rendered,
    TemplatePart,
    Train,
    Turns,
    trained_messages,
)
from wlb.prepare.conversation import Conversation, Message, Role
from wlb.prepare.encode import token_text
from wlb.prepare.jinja_compile import MARKS, compile_template, mark_in, marker
from wlb.prepare.jinja_limits import Spent, TemplateLimit
from wlb.prepare.jinja_pieces import (
    TemplatePiece,
    TurnPlaces,
    marked_messages,
    pieces_of,
    without_blocks,
)
from wlb.prepare.tool_calls import json_text, with_other_arguments, with_text_arguments

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
_MOST_SHAPES = 4096
"""Most sequences of roles whose rendering is cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What the template's own text may depend on in a message: everything but its content."""

    role: Role
    has_content: bool
    tool_calls: str = ""
    name: str = ""
    call_id: str = ""

    @classmethod
    def of(cls, message: Message) -> "_Form":
        return cls(
            role=message.role,
            has_content=bool(message.content),
            tool_calls=message.tool_calls,
            name=message.name,
            call_id=message.call_id,
        )


_Forms = tuple[_Form, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A sequence of forms, rendered with markers."""

    pieces: tuple[TemplatePiece, ...]
    places: TurnPlaces


class JinjaTemplate:
    """A template's source and its variables (bos_token, date_string, ...)."""

    def __init__(self, source: str, *, name: str, variables: Mapping[str, Any]) -> None:
        self.name, self.source = name, source
        self.variables = dict(variables)
        self._spent = Spent()
        self._template, self.has_generation, wanted = compile_template(source, name, self._spent)
        self.used = frozenset(wanted)
        missing = sorted(w for w in wanted - self.variables.keys() if w.endswith("_token"))
        if missing:
            raise UserError(
                f"chat template {name} uses {', '.join(missing)}, which nothing gives; put it into "
                f"the tokenizer_config.json beside it, or give it as a variable"
            )
        self._shape = lru_cache(_MOST_SHAPES)(self._measure)

    def render(self, conversation: Conversation, turns: Turns) -> Rendered:
        """UserError for a conversation whose parts are not exactly known."""
        messages = conversation.messages
        contents = [message.content for message in messages]
        for i, content in enumerate(contents):
            if found := mark_in(content):
                raise UserError(f"message {i} contains {found}, which marks contents here")
        if found := mark_in(conversation.literals):
            raise UserError(f"its tools or tool calls contain {found}, which marks contents here")
        forms = tuple(map(_Form.of, messages))
        shape = self._shape(forms, conversation.tools)
        contents = self._as_rendered(shape, contents, forms, conversation.tools)
        trained = set(trained_messages(conversation, turns))
        parts = tuple(
            TemplatePart(
                text=contents[piece.owner] if piece.is_content else piece.text,
                is_content=piece.is_content,
                train=self._train(piece, shape, forms) if piece.owner in trained else Train.NO,
            )
            for piece in shape.pieces
        )
        first = [piece.owner for piece in shape.pieces]
        ends, later = shape.places.ends, range(1, len(forms))
        begun = [i for i in later if forms[i].role == Role.USER and ends[i - 1] is not None]
        starts = [first.index(i) for i in begun if i in first]
        has_system = forms[0].role == Role.SYSTEM
        has_bos = shape.pieces[0].text == self.variables.get("bos_token")
        prefix = first.count(0) if has_system else int(has_bos)
        is_apart = not has_system or ends[0] is not None
        return Rendered(
            parts=parts,
            turns=tuple(start for start in starts if start > prefix),
            prefix=prefix if is_apart else None,
        )

    def _train(self, piece: TemplatePiece, shape: _Shape, forms: _Forms) -> Train:
        """Return which tokens are trained of a piece of a trained message."""
        form, places = forms[piece.owner], shape.places
        is_known = form.has_content or places.begins[piece.owner] is not None
        if not self.has_generation and piece.is_content:
            return Train.ALL
        if places.ends[piece.owner] is None and not (self.has_generation and form.has_content):
            raise UserError(
                f"chat template {self.name} writes message {piece.owner} differently when more "
                f"messages follow, so where its turn ends is not known; put what the assistant "
                f"generates into {{% generation %}} blocks, or train only the last turn"
            )
        if self.has_generation:
            return Train.ALL if piece.is_generated else Train.NO
        if not is_known:
            raise UserError(
                f"chat template {self.name} writes message {piece.owner}, which only calls tools, "
                f"otherwise than after its generation prompt, so where the assistant begins is not "
                f"known; put what the assistant generates into {{% generation %}} blocks"
            )
        if not piece.is_end:
            return Train.NO
        return Train.CALLS if form.tool_calls else Train.END

    def _as_rendered(
        self, shape: _Shape, contents: list[str], forms: _Forms, tools: str
    ) -> list[str]:
        """The contents as the template writes them: as they are, or stripped for some roles."""
        roles = [form.role for form in forms]
        real = MARKS.sub("", self._text(forms, contents, tools))
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

    def _measure(self, forms: _Forms, tools: str) -> _Shape:
        """Renders with markers and finds where turns end (steps 1 and 2 of the module)."""
        markers = [marker(i) if form.has_content else "" for i, form in enumerate(forms)]
        marked = self._text(forms, markers, tools)
        plain = without_blocks(marked)
        places = self._places(forms, markers, tools, plain)
        expected = [i for i, form in enumerate(forms) if form.has_content]
        if (found := marked_messages(marked)) != expected:
            raise UserError(
                f"chat template {self.name} writes the contents of messages {found} of "
                f"{len(forms)} ({', '.join(f.role for f in forms)}): it repeats, leaves out or "
                f"changes some, so what is trained is not exactly known"
            )
        self._check_tools(forms, markers, tools, marked)
        pieces = pieces_of(marked, places, start=str(self.variables.get("bos_token", "")))
        for piece in pieces:
            role = forms[piece.owner].role
            if piece.is_content and piece.is_generated and role != Role.ASSISTANT:
                raise UserError(
                    f"chat template {self.name} has the {role}'s message {piece.owner} in a "
                    f"{{% generation %}} block, which would train it"
                )
        return _Shape(pieces=tuple(pieces), places=places)

    def _places(self, forms: _Forms, markers: list[str], tools: str, plain: str) -> TurnPlaces:
        begins: list[int | None] = [None] * len(forms)
        ends: list[int | None] = [None] * len(forms)
        for i, form in enumerate(forms):
            if form.role == Role.ASSISTANT or i == 0 or i + 1 == len(forms):
                ends[i] = self._end(forms[: i + 1], markers, tools, plain)
            if form.role == Role.ASSISTANT and not form.has_content:
                begins[i] = self._end(forms[:i], markers, tools, plain, is_prompt=True)
        return TurnPlaces(begins=tuple(begins), ends=tuple(ends))

    def _end(
        self, forms: _Forms, markers: list[str], tools: str, plain: str, *, is_prompt: bool = False
    ) -> int | None:
        """Length of the rendering of the first messages, if `plain` begins with it."""
        try:
            text = self._text(forms, markers[: len(forms)], tools, is_prompt=is_prompt)
        except TemplateLimit:
            raise
        # Templates may refuse a conversation that is not complete.
        except UserError:
            return None
        text = without_blocks(text)
        # Some templates write a system message only together with the user's first message.
        is_whole = bool(text) and markers[len(forms) - 1] in text
        return len(text) if is_whole and plain.startswith(text) else None

    def _check_tools(self, forms: _Forms, markers: list[str], tools: str, marked: str) -> None:
        """UserError for a template that leaves out tools or calls: the text must depend on them."""
        if tools and self._text(forms, markers, "") == marked:
            raise UserError(
                f"chat template {self.name} does not write tools, which would be lost; use the "
                f"template of a model that has a form for them, or remove them"
            )
        for i, form in enumerate(forms):
            for changed in with_other_arguments(form.tool_calls) if form.tool_calls else ():
                others = (*forms[:i], replace(form, tool_calls=changed), *forms[i + 1 :])
                text = self._text(others, markers, tools)
                if text == marked:
                    raise UserError(
                        f"chat template {self.name} leaves out tool calls of message {i}, which "
                        f"would be lost; use the template of a model that has a form for them"
                    )
                content = markers[i]
                is_before = content and text.split(content)[0] != marked.split(content)[0]
                if is_before and not self.has_generation:
                    raise UserError(
                        f"chat template {self.name} writes tool calls of message {i} before its "
                        f"content, so where the assistant begins is not known; put what the "
                        f"assistant generates into {{% generation %}} blocks"
                    )

    @cached_property
    def _takes_text(self) -> bool:
        """Whether arguments of calls must be JSON text: objects are refused, or written as Python
        writes them."""
        call = {"type": "function", "function": {"name": "f", "arguments": {"wlb": "probe"}}}
        forms = (
            _Form(role=Role.USER, has_content=True),
            _Form(role=Role.ASSISTANT, has_content=False, tool_calls=json_text([call])),
        )
        for takes_text in (False, True):
            try:
                text = self._text(forms, ["x", ""], "", takes_text=takes_text)
            except TemplateLimit:
                raise
            except UserError:
                continue
            if "{'wlb': 'probe'}" not in text:
                return takes_text
        return False

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether contents must be lists of parts: a text is left out or refused."""
        form, content = _Form(role=Role.USER, has_content=True), marker(0)
        for takes_parts in (False, True):
            try:
                if content in self._text([form], [content], "", takes_parts=takes_parts):
                    return takes_parts
            except TemplateLimit:
                raise
            except UserError:
                continue
        return False

    def _text(
        self,
        forms: Sequence[_Form],
        contents: Sequence[str],
        tools: str,
        *,
        is_prompt: bool = False,
        takes_text: bool | None = None,
        takes_parts: bool | None = None,
    ) -> str:
        from jinja2 import TemplateError

        is_parts = self._takes_parts if takes_parts is None else takes_parts
        messages: list[dict[str, Any]] = []
        for form, content in zip(forms, contents, strict=True):
            parts = [{"type": "text", "text": content}] if content else []
            message: dict[str, Any] = {"role": str(form.role)}
            message["content"] = parts if is_parts else content
            message |= {"name": form.name} if form.name else {}
            message |= {"tool_call_id": form.call_id} if form.call_id else {}
            if form.tool_calls:
                calls = json.loads(form.tool_calls)
                is_text = self._takes_text if takes_text is None else takes_text
                message["tool_calls"] = with_text_arguments(calls) if is_text else calls
            messages.append(message)
        given = {"messages": messages, "add_generation_prompt": is_prompt}
        # transformers gives tools and documents to every template.
        given |= {"tools": json.loads(tools) if tools else None, "documents": None}
        self._spent.start()
        try:
            return self._template.render({**self.variables, **given})
        except TemplateLimit as error:
            raise TemplateLimit(f"chat template {self.name} refuses it: {error}") from error
        # What a template computes may fail in any way that its expressions can.
        except (TemplateError, *WRONG_SHAPE) as error:
            reason = shortened(str(error) or type(error).__name__, 400)
            raise UserError(f"chat template {self.name} refuses it: {reason}") from error


def load_template(name: str | Path, variables: Mapping[str, Any] | None = None) -> ChatTemplate:
    """A built-in template by name, or the Jinja template of a model's folder or of a file.

    A folder has chat_template.jinja, or a tokenizer_config.json with a chat_template. A `.json`
    file is a tokenizer_config.json; any other file is the template itself. Both take bos_token and
    the like from the tokenizer_config.json beside them. variables: further variables of the
    template, such as date_string.
    """
    given = dict(variables or {})
    if str(name) in BUILT_IN:
        if given:
            raise UserError(f"chat template {name} has no variables, got {sorted(given)}")
        return BUILT_IN[str(name)]
    path, config_path = template_files(name)
    config = read_object(config_path, wide=True) if config_path.is_file() else {}
    with malformed(path, "give the chat template of a model"):
        is_config = path.suffix == ".json"
        source = _source_of(config, path) if is_config else path.read_bytes().decode("utf-8")
    tokens = {key: token_text(value) for key, value in config.items() if key.endswith("_token")}
    known = {key: value for key, value in tokens.items() if value is not None}
    return JinjaTemplate(source, name=str(name), variables={**known, **given})


def template_files(name: str | Path) -> tuple[Path, Path]:
    """The file that has the template, and the tokenizer_config.json beside it, which may be absent.

    UserError where there is no template.
    """
    path = Path(name)
    if path.is_dir():
        path = path / TEMPLATE_FILE if (path / TEMPLATE_FILE).is_file() else path / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            f"no chat template {name}: give one of {', '.join(BUILT_IN)}, a model's folder, a "
            f"{CONFIG_FILE} or a file with a Jinja template"
        )
    return path, path if path.suffix == ".json" else path.with_name(CONFIG_FILE)


def _source_of(config: dict[str, Any], path: Path) -> str:
    found: Any = config.get("chat_template")
    if isinstance(found, list):
        named = {t["name"]: t["template"] for t in cast(list[dict[str, str]], found)}
        found = named.get("default")
    if not isinstance(found, str):
        raise UserError(f"{path} has no chat_template; give the file that has it")
    return found
