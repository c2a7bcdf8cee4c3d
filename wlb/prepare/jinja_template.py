"""Jinja chat templates in exact parts, found by running the template in jinja2's sandbox.

1. Render a sequence of roles once with markers for contents and reasoning; all contents must come
out, in order. A message whose reasoning the template leaves out is not trained.
2. The contents of {% generation %} blocks are trained. Without them what an assistant generates
begins where the text with a generation prompt ends, and a turn ends where the text of the
conversation up to there ends, if these texts start the longer text.
3. Render each conversation with its contents too: the parts must add up to the same text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

from wlb.plan import UserError
from wlb.plan.errors import shortened
from wlb.plan.read_file import WRONG_SHAPE, malformed, read_object, read_text
from wlb.prepare.chat_template import (
    BUILT_IN,
    ChatTemplate,
    Rendered,
    TemplatePart,
    Train,
    Turns,
    trained_messages,
)
from wlb.prepare.conversation import REASONING_KEYS, Conversation, Message, Role
from wlb.prepare.encode import token_text
from wlb.prepare.jinja_compile import MARK, MARKS, compile_template, mark_in, marker
from wlb.prepare.jinja_fields import MessageForm, MessageForms, as_written, form_of, markers_of
from wlb.prepare.jinja_limits import Spent, TemplateLimit
from wlb.prepare.jinja_pieces import (
    TemplatePiece,
    TextPlace,
    TurnPlaces,
    marked_fields,
    pieces_of,
    without_blocks,
)
from wlb.prepare.tool_calls import json_text, with_other_arguments, with_text_arguments

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
_DEVELOPER = re.compile(r"""['"]developer['"]""")
_THOUGHT = "<think>x</think>x"
_MOST_SHAPES = 4096
"""Most sequences of roles whose rendering is cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A sequence of forms, rendered with markers. dropped: messages whose reasoning is left out."""

    pieces: tuple[TemplatePiece, ...]
    places: TurnPlaces
    dropped: frozenset[int]


class JinjaTemplate:
    """A template's source and its variables (bos_token, date_string, ...)."""

    def __init__(self, source: str, *, name: str, variables: Mapping[str, Any]) -> None:
        self.name, self.source = name, source
        self.variables = dict(variables)
        self._spent = Spent()
        self._template, self.has_generation, wanted = compile_template(source, name, self._spent)
        self.used = frozenset(wanted)
        self.knows_developer = _DEVELOPER.search(source) is not None
        missing = sorted(w for w in wanted - self.variables.keys() if w.endswith("_token"))
        if missing:
            raise UserError(
                f"chat template {name} uses {', '.join(missing)}, which nothing gives; put it into "
                f"the tokenizer_config.json beside it, or give it as a variable"
            )
        self._shape = lru_cache(_MOST_SHAPES)(self._measure)

    def render(self, conversation: Conversation, turns: Turns) -> Rendered:
        """UserError for a conversation whose parts are not exactly known."""
        conversation = conversation if self.knows_developer else conversation.as_system()
        for i, message in enumerate(conversation.messages):
            if found := mark_in(message.reasoning + message.content):
                raise UserError(f"message {i} contains {found}, which marks contents here")
            if message.reasoning and self._reasoning_key is None:
                remedy = (
                    "write it as <think>...</think> in front of the content, or remove it"
                    if self._keeps_tags
                    else "use a template that writes it, or remove it"
                )
                raise UserError(
                    f"chat template {self.name} leaves out the reasoning of message {i}, which "
                    f"would be lost; {remedy}"
                )
        if found := mark_in(conversation.literals):
            raise UserError(f"its tools or tool calls contain {found}, which marks contents here")
        shape, forms, texts = self._as_rendered(conversation)
        trained = set(trained_messages(conversation, turns)) - shape.dropped
        parts = tuple(
            TemplatePart(
                text=texts[piece.field] if piece.is_content else piece.text,
                is_content=piece.is_content,
                train=self._train(piece, shape, forms) if piece.owner in trained else Train.NO,
            )
            for piece in shape.pieces
        )
        first = [piece.owner for piece in shape.pieces]
        ends, later = shape.places.ends, range(1, len(forms))
        begun = [i for i in later if forms[i].role == Role.USER and ends[i - 1] is not None]
        starts = [first.index(i) for i in begun if i in first]
        has_system = forms[0].role in (Role.SYSTEM, Role.DEVELOPER)
        has_bos = shape.pieces[0].text == self.variables.get("bos_token")
        prefix = first.count(0) if has_system else int(has_bos)
        is_apart = not has_system or ends[0] is not None
        return Rendered(
            parts=parts,
            turns=tuple(start for start in starts if start > prefix),
            prefix=prefix if is_apart else None,
            num_dropped=len(shape.dropped),
        )

    def _train(self, piece: TemplatePiece, shape: _Shape, forms: MessageForms) -> Train:
        """Return which tokens are trained of a piece of a trained message."""
        form, places = forms[piece.owner], shape.places
        is_known = form.has_content or places.begins[piece.owner] is not None
        if not self.has_generation and (piece.is_content or piece.place == TextPlace.REPLY):
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
        if piece.place != TextPlace.END:
            return Train.NO
        return Train.CALLS if form.tool_calls else Train.END

    def _as_rendered(self, conversation: Conversation) -> tuple[_Shape, MessageForms, list[str]]:
        """The shape, the forms, and the fields as the template writes them."""
        tools, real, before = conversation.tools, "", ()
        # Many templates leave <think>...</think> in a content, others take it out.
        for is_split in (False, True):
            found = [form_of(message, is_split=is_split) for message in conversation.messages]
            forms = tuple(form for form, _ in found)
            if forms == before:
                break
            before = forms
            texts = [text for _, fields in found for text in fields]
            shape = self._shape(forms, tools)
            real = real or MARKS.sub("", self._text(forms, texts, tools))
            if written := as_written(shape.pieces, texts, real):
                return shape, forms, written
        raise UserError(
            f"chat template {self.name} changes the contents of this conversation (it does more "
            f"than remove white space around them, or take <think>...</think> from their "
            f"beginning), so what is trained is not exactly known; use a template that writes "
            f"contents as they are"
        )

    def _measure(self, forms: MessageForms, tools: str) -> _Shape:
        """Renders with markers and finds where turns end (steps 1 and 2 of the module)."""
        markers = markers_of(forms)
        marked = self._text(forms, markers, tools)
        plain = without_blocks(marked)
        places = self._places(forms, markers, tools, plain)
        found = marked_fields(marked)
        contents, owners = [field for field in found if field % 2], [field // 2 for field in found]
        is_ordered = owners == sorted(owners) and len(set(found)) == len(found)
        if not is_ordered or contents != [2 * i + 1 for i, f in enumerate(forms) if f.has_content]:
            raise UserError(
                f"chat template {self.name} writes the contents of messages "
                f"{[field // 2 for field in contents]} of {len(forms)} "
                f"({', '.join(f.role for f in forms)}): it repeats, leaves out or "
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
        dropped = {i for i, f in enumerate(forms) if f.has_reasoning and 2 * i not in found}
        return _Shape(pieces=tuple(pieces), places=places, dropped=frozenset(dropped))

    def _places(
        self, forms: MessageForms, markers: list[str], tools: str, plain: str
    ) -> TurnPlaces:
        begins: list[int | None] = [None] * len(forms)
        ends: list[int | None] = [None] * len(forms)
        # Without a generation prompt or with blocks, what is before a content is never trained.
        has_prompt = "add_generation_prompt" in self.used and not self.has_generation
        for i, form in enumerate(forms):
            if form.role == Role.ASSISTANT or i == 0 or i + 1 == len(forms):
                ends[i] = self._end(forms[: i + 1], markers, tools, plain)
            if form.role == Role.ASSISTANT and (has_prompt or not form.has_content):
                begins[i] = self._end(forms[:i], markers, tools, plain, is_prompt=True)
            # Where the prompt adds nothing, as after a tool's answer, the header is no reply.
            begin = begins[i] if form.has_content else None
            if begin is not None and not plain.startswith(MARK, begin):
                is_same = begin == self._end(forms[:i], markers, tools, plain)
                begins[i] = None if is_same else begin
        return TurnPlaces(begins=tuple(begins), ends=tuple(ends))

    def _end(
        self,
        forms: MessageForms,
        markers: list[str],
        tools: str,
        plain: str,
        *,
        is_prompt: bool = False,
    ) -> int | None:
        """Length of the rendering of the first messages, if `plain` begins with it."""
        try:
            text = self._text(forms, markers[: 2 * len(forms)], tools, is_prompt=is_prompt)
        except TemplateLimit:
            raise
        # Templates may refuse a conversation that is not complete.
        except UserError:
            return None
        text = without_blocks(text)
        # Some templates write a system message only together with the user's first message.
        is_whole = bool(text) and markers[2 * len(forms) - 1] in text
        return len(text) if is_whole and plain.startswith(text) else None

    def _check_tools(
        self, forms: MessageForms, markers: list[str], tools: str, marked: str
    ) -> None:
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
                content = markers[2 * i + 1]
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
        said = (
            Message(role=Role.USER, content="x"),
            Message(role=Role.ASSISTANT, content="", tool_calls=json_text([call])),
        )
        forms = [form_of(message)[0] for message in said]
        for takes_text in (False, True):
            try:
                text = self._text(forms, ["", "x", "", ""], "", takes_text=takes_text)
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
        form, _ = form_of(Message(role=Role.USER, content="x"))
        content = marker(1)
        for takes_parts in (False, True):
            try:
                if content in self._text([form], ["", content], "", takes_parts=takes_parts):
                    return takes_parts
            except TemplateLimit:
                raise
            except UserError:
                continue
        return False

    @cached_property
    def _keeps_tags(self) -> bool:
        """Whether reasoning in front of a content, in tags, is written."""
        said = Message(role=Role.USER, content="x"), Message(role=Role.ASSISTANT, content=_THOUGHT)
        forms = [form_of(message, is_split=True)[0] for message in said]
        markers = markers_of(forms)
        try:
            return markers[2] in self._text(forms, markers, "")
        except TemplateLimit:
            raise
        except UserError:
            return False

    @cached_property
    def _reasoning_key(self) -> str | None:
        """The key under which the template takes reasoning; None for a template without a form."""
        said = (
            Message(role=Role.USER, content="x"),
            Message(role=Role.ASSISTANT, content="x", reasoning="x"),
        )
        forms = [form_of(message)[0] for message in said]
        markers = markers_of(forms)
        for key in REASONING_KEYS:
            try:
                if markers[2] in self._text(forms, markers, "", reasoning_key=key):
                    return key
            except TemplateLimit:
                raise
            except UserError:
                continue
        return None

    def _text(
        self,
        forms: Sequence[MessageForm],
        texts: Sequence[str],
        tools: str,
        *,
        is_prompt: bool = False,
        takes_text: bool | None = None,
        takes_parts: bool | None = None,
        reasoning_key: str | None = None,
    ) -> str:
        """The rendering. texts: two fields of each message."""
        from jinja2 import TemplateError

        is_parts = self._takes_parts if takes_parts is None else takes_parts
        messages: list[dict[str, Any]] = []
        for i, form in enumerate(forms):
            reasoning, text = texts[2 * i : 2 * i + 2]
            content = form.filled(reasoning, text)
            parts = [{"type": "text", "text": content}] if content else []
            message: dict[str, Any] = {"role": str(form.role)}
            message["content"] = parts if is_parts else content
            if form.has_key:
                message[reasoning_key or self._reasoning_key or ""] = reasoning
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
            if "strftime_now" in reason:
                reason += (
                    " here, because with today's date a store would differ from day to day; write "
                    "a date in place of strftime_now(...) in a copy of the template"
                )
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
    remedy = "give the chat template of a model"
    with malformed(path, remedy):
        is_config = path.suffix == ".json"
        source = _source_of(config, path) if is_config else read_text(path, remedy=remedy)
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
