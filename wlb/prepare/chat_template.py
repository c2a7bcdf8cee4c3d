"""Chat templates: a conversation as text, with the places of contents and of what is trained.

1. In every content and reasoning one character is replaced by a private-use character of its own.
The text is rendered with them, so that it says where each content is, and without them: where more
than those characters differ, the template changes contents or decides by them, and is refused.
2. The contents of {% generation %} blocks are trained. Without them what an assistant generates
begins where the text with a generation prompt ends, and its turn ends where the text of the
messages up to there ends, if the whole text begins with these texts.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from wlb.plan import UserError
from wlb.plan.errors import shortened
from wlb.plan.read_file import malformed, read_object, read_text
from wlb.prepare.conversation import REASONING_KEYS, Conversation, Message, Role
from wlb.prepare.encode import token_text
from wlb.prepare.renderer import TemplateLimit, renderer
from wlb.prepare.tool_calls import with_other_arguments, with_text_arguments

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
MOST_SOURCE = 1 << 20
"""Most characters of a template; models' have some thousand."""
_FIRST, _MOST_FIELDS = 0x100000, 0xFFF0
_RESERVED = re.compile("[\U00100000-\U0010ffff]")
"""The last plane of private-use characters: what stands in contents, and the marks of generation
blocks. Conversations and templates that contain one are refused."""
_PROBE = chr(_FIRST + _MOST_FIELDS)
"""Stands for a whole content."""
_DEVELOPER = re.compile(r"""['"]developer['"]""")
_THOUGHT = re.compile(r"(\s*(?:<think>)?)(.*?)</think>(.*)", re.DOTALL)
_TAGS_AT_END = re.compile(r"(?:\s|<[^<>\s]*>)*$")


class Turns(StrEnum):
    """Assistant messages that are trained."""

    ALL = "all"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an assistant generates, as places in a rendering.

    It is trained from `start` up to the special token in [said, stop) that ends the turn; what a
    generation block holds is trained as a whole.
    """

    start: int
    said: int  # where the content ends
    stop: int
    has_calls: bool
    is_block: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A rendered conversation, with places in its text."""

    text: str
    contents: tuple[tuple[int, int], ...]  # spans that messages wrote, ascending
    replies: tuple[Reply, ...]  # of the messages that are trained
    turns: tuple[int, ...]  # where a turn after the first one begins, where known
    prefix: int | None  # where the first turn begins; None if the system message is inside it
    num_dropped: int = 0  # messages whose reasoning the template left out


class _Marks:
    """Replaces one character of each field of messages: field 2 * i is the reasoning of message i,
    field 2 * i + 1 its content."""

    def __init__(self) -> None:
        self.cores: dict[int, str] = {}  # marked fields without white space around them
        self.replaced: dict[int, str] = {}  # characters by the code points that stand for them

    def mark(self, text: str, number: int) -> str:
        """The text with its mark; a text of white space has none."""
        if not text.strip():
            return text
        # Templates look for tags at both ends of a content.
        tags = _TAGS_AT_END.search(text)
        at = (tags.start() if tags and tags.start() else len(text.rstrip())) - 1
        self.replaced[_FIRST + number] = text[at]
        made = f"{text[:at]}{chr(_FIRST + number)}{text[at + 1 :]}"
        self.cores[number] = made.strip()
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _MarkedText:
    """A rendering with marks, as `_Marks` numbers the fields."""

    text: str
    given: dict[str, Any]  # what it was rendered from
    fields: dict[int, tuple[int, int]]  # their places
    blocks: list[tuple[int, int]]  # places of generation blocks
    lengths: list[int | None]  # of the prefixes that were asked for
    replaced: dict[int, str]  # characters by the code points that stand for them
    dropped: frozenset[int]  # messages whose reasoning is left out

    def said(self, number: int) -> int:
        """Where the content of a message ends, 0 for none."""
        return self.fields.get(2 * number + 1, (0, 0))[1]

    def begin(self, number: int) -> int | None:
        """Where the first field of a message begins, None for a message without text."""
        found = [self.fields[n][0] for n in (2 * number, 2 * number + 1) if n in self.fields]
        return min(found, default=None)

    def has_content(self, number: int) -> bool:
        return 2 * number + 1 in self.fields


def _prefix(
    upto: int, *, prompt: bool = False, then: Sequence[dict[str, Any]] = (), cut: str = ""
) -> dict[str, Any]:
    """A conversation that begins like another one, as `render_process` takes it."""
    return {"upto": upto, "prompt": prompt, "then": list(then), "cut": cut}


class ChatTemplate:
    """A template's source and its variables (bos_token, date_string, ...).

    special_tokens: texts that must each be one special token of the tokenizer. start: the text that
    every rendering begins with, if it does.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        variables: Mapping[str, Any],
        special_tokens: tuple[str, ...] = (),
        start: str = "",
    ) -> None:
        self.name, self.source = name, source
        self.variables = dict(variables)
        self.special_tokens = special_tokens
        self.knows_developer = _DEVELOPER.search(source) is not None
        self._start = start or str(self.variables.get("bos_token", ""))

    @cached_property
    def _about(self) -> dict[str, Any]:
        """Whether it has generation blocks, and the variables it uses."""
        if len(self.source) > MOST_SOURCE:
            raise UserError(
                f"{self.name} is not a Jinja template: it has {len(self.source)} characters, must "
                f"have at most {MOST_SOURCE}; give the template of a model"
            )
        if found := _RESERVED.search(self.source):
            raise UserError(
                f"chat template {self.name} contains {found[0]!a}, which marks contents here"
            )
        try:
            about = renderer().ask({"source": self.source})
        except TemplateLimit as error:
            raise TemplateLimit(f"chat template {self.name} refuses it: {error}") from None
        if reason := about.get("invalid"):
            raise UserError(f"{self.name} is not a Jinja template: {shortened(reason, 400)}")
        wanted = set(about["used"]) - self.variables.keys()
        if missing := sorted(name for name in wanted if name.endswith("_token")):
            raise UserError(
                f"chat template {self.name} uses {', '.join(missing)}, which nothing gives; put it "
                f"into the tokenizer_config.json beside it, or give it as a variable"
            )
        return about

    def check(self) -> None:
        """UserError for a template that cannot be used."""
        assert self._about

    @property
    def used(self) -> frozenset[str]:
        """The names of all variables that the source mentions."""
        return frozenset(self._about["used"])

    @property
    def has_blocks(self) -> bool:
        """Whether it has generation blocks."""
        return self._about["generation"]

    def render(self, conversation: Conversation, turns: Turns) -> Rendered:
        """UserError for a conversation of which it is not exactly known what is trained."""
        conversation = conversation if self.knows_developer else conversation.as_system()
        self._check(conversation)
        messages, trained = conversation.messages, trained_messages(conversation, turns)
        ended = [i for i, m in enumerate(messages[:-1]) if m.role == Role.ASSISTANT or i == 0]
        prompted = [] if self.has_blocks else trained
        asked = [_prefix(i + 1) for i in ended] + [_prefix(i, prompt=True) for i in prompted]
        found = self._marked_text(conversation, asked)
        ends = {
            i: stop
            for i, stop in zip(ended, found.lengths, strict=False)
            if stop is not None and stop >= found.said(i)
        }
        ends[len(messages) - 1] = len(found.text)
        trained = [i for i in trained if i not in found.dropped]
        if self.has_blocks:
            replies = self._in_blocks(messages, found, trained)
        else:
            prompts = dict(zip(prompted, found.lengths[len(ended) :], strict=True))
            replies = [self._reply(messages, found, i, prompts[i], ends.get(i)) for i in trained]
        has_system = messages[0].role in (Role.SYSTEM, Role.DEVELOPER)
        has_start = bool(self._start) and found.text.startswith(self._start)
        prefix = ends.get(0) if has_system else len(self._start) * has_start
        asks = [i for i in range(1, len(messages)) if messages[i].role == Role.USER]
        starts = [ends[i - 1] for i in asks if i - 1 in ends]
        return Rendered(
            text=found.text.translate(found.replaced),
            contents=tuple(sorted(found.fields.values())),
            replies=tuple(replies),
            turns=tuple(start for start in starts if start > (prefix or 0)),
            prefix=prefix,
            num_dropped=len(found.dropped),
        )

    def _reply(
        self,
        messages: Sequence[Message],
        found: "_MarkedText",
        number: int,
        prompt: int | None,
        stop: int | None,
    ) -> Reply:
        """What is trained of a message. prompt, stop: where the text with a generation prompt and
        that of its turn end, where the whole text begins with them."""
        if stop is None:
            raise UserError(
                f"chat template {self.name} writes message {number} differently when more "
                f"messages follow, so where its turn ends is not known; put what the assistant "
                f"generates into {{% generation %}} blocks, or train only the last turn"
            )
        # Some templates write a system message only together with the user's first message.
        if prompt is not None and prompt < found.said(number - 1):
            prompt = None
        start = prompt
        if prompt is None or prompt != found.begin(number):
            message = messages[number]
            bare = Message(role=Role.ASSISTANT, content="x")
            then = [self._given(bare, whole=_PROBE), self._given(message, whole=_PROBE)]
            asked = [_prefix(number, then=[one], cut=_PROBE) for one in then]
            _, lengths = self._ask([found.given], [_prefix(number), *asked])
            # Where the prompt adds nothing, as after a tool's answer, the header is no reply.
            candidates = [None if prompt == lengths[0] else prompt, *lengths[1:]]
            if not found.has_content(number):
                candidates.append(prompt)
            start = next((at for at in candidates if at is not None), None)
        if start is None:
            raise UserError(
                f"chat template {self.name} writes message {number} otherwise than after its "
                f"generation prompt, so where the assistant begins is not known; put what the "
                f"assistant generates into {{% generation %}} blocks"
            )
        has_calls = bool(messages[number].tool_calls)
        said = max(start, found.said(number))
        return Reply(start=start, said=said, stop=stop, has_calls=has_calls)

    def _in_blocks(
        self, messages: Sequence[Message], found: "_MarkedText", trained: Sequence[int]
    ) -> list[Reply]:
        """The generation blocks of the messages that are trained."""
        replies: list[Reply] = []
        for start, stop in found.blocks:
            inside = {n // 2 for n, (a, b) in found.fields.items() if start <= a and b <= stop}
            for number in inside:
                if messages[number].role != Role.ASSISTANT:
                    raise UserError(
                        f"chat template {self.name} has the {messages[number].role}'s message "
                        f"{number} in a {{% generation %}} block, which would train it"
                    )
            if (owner := min(inside, default=None)) is None:
                # The first assistant between the contents around the block, else the one before.
                before = max(
                    (n // 2 for n, (_, b) in found.fields.items() if b <= start), default=0
                )
                owners = [i for i, m in enumerate(messages) if m.role == Role.ASSISTANT]
                after = [n // 2 for n, (a, _) in found.fields.items() if a >= stop]
                last = min(after, default=len(messages))
                between = [i for i in owners if before < i < last]
                owner = next(iter([*between, *(i for i in (before, last) if i in owners)]), None)
            if owner in trained:
                said = min(stop, max(start, found.said(owner)))
                has_calls = bool(messages[owner].tool_calls)
                replies.append(
                    Reply(start=start, said=said, stop=stop, has_calls=has_calls, is_block=True)
                )
        return replies

    def _check(self, conversation: Conversation) -> None:
        """UserError for marks in the conversation, and for reasoning that would be lost."""
        for i, message in enumerate(conversation.messages):
            if found := _RESERVED.search(message.reasoning + message.content):
                raise UserError(f"message {i} contains {found[0]!a}, which marks contents here")
            if message.reasoning and not self._writes_reasoning[0]:
                remedy = (
                    "write it as <think>...</think> in front of the content, or remove it"
                    if self._writes_reasoning[1]
                    else "use a template that writes it, or remove it"
                )
                raise UserError(
                    f"chat template {self.name} leaves out the reasoning of message {i}, which "
                    f"would be lost; {remedy}"
                )
        if found := _RESERVED.search(conversation.literals):
            raise UserError(
                f"its tools or tool calls contain {found[0]!a}, which marks contents here"
            )
        if len(conversation.messages) * 2 > _MOST_FIELDS:
            raise UserError(
                f"it has {len(conversation.messages)} messages, must have at most "
                f"{_MOST_FIELDS // 2}; split the conversation"
            )

    def _marked_text(
        self, conversation: Conversation, prefixes: Sequence[dict[str, Any]]
    ) -> "_MarkedText":
        """The rendering with marks. UserError for contents, calls or tools that are not in it as
        they are."""
        plain = [self._given(message) for message in conversation.messages]
        marks = _Marks()
        marked = [self._given(m, (marks, i)) for i, m in enumerate(conversation.messages)]
        tools = json.loads(conversation.tools) if conversation.tools else None
        others = self._without(conversation, marked)
        given = {"messages": marked, "tools": tools}
        texts, lengths = self._ask(
            [{"messages": plain, "tools": tools}, *others.values(), given], prefixes
        )
        text, blocks = cast("tuple[str, list[tuple[int, int]]]", texts[-1])
        for what, (other, _) in zip(others, texts[1:-1], strict=True):
            if other == text:
                raise UserError(
                    f"chat template {self.name} {what}, which would be lost; use the template of a "
                    f"model that has a form for them, or remove them"
                )
        fields = self._fields(conversation, text, marks)
        if text.translate(marks.replaced) != texts[0][0]:
            raise self._changes("")
        return _MarkedText(
            text=text,
            given=given,
            fields=fields,
            blocks=blocks,
            lengths=lengths,
            replaced=marks.replaced,
            dropped=frozenset(n // 2 for n in marks.cores if n % 2 == 0 and n not in fields),
        )

    def _fields(
        self, conversation: Conversation, text: str, marks: "_Marks"
    ) -> dict[int, tuple[int, int]]:
        """The places of the fields by number; a reasoning may be left out."""
        found = [(ord(m[0]) - _FIRST, m.start()) for m in _RESERVED.finditer(text)]
        contents = [number for number, _ in found if number % 2]
        owners = [number // 2 for number, _ in found]
        is_ordered = owners == sorted(owners) and len({n for n, _ in found}) == len(found)
        if not is_ordered or contents != [number for number in marks.cores if number % 2]:
            raise UserError(
                f"chat template {self.name} writes the contents of messages "
                f"{[number // 2 for number in contents]} of {len(conversation.messages)} "
                f"({', '.join(conversation.roles)}): it repeats, leaves out or "
                f"changes some, so what is trained is not exactly known"
            )
        fields: dict[int, tuple[int, int]] = {}
        for number, at in found:
            core = marks.cores[number]
            start = at - core.index(chr(_FIRST + number))
            if start < 0 or not text.startswith(core, start):
                raise self._changes(f" of message {number // 2}")
            fields[number] = (start, start + len(core))
        return fields

    def _changes(self, where: str) -> UserError:
        return UserError(
            f"chat template {self.name} changes the contents{where} of this conversation (it does "
            f"more than remove white space around them, or take <think>...</think> from their "
            f"beginning), so what is trained is not exactly known; use a template that writes "
            f"contents as they are"
        )

    def _without(
        self, conversation: Conversation, messages: list[dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """The conversation without tools, and with other arguments of each call, by what is left
        out where the text stays the same."""
        tools, made = conversation.tools, dict[str, dict[str, Any]]()
        given = {"messages": messages, "tools": json.loads(tools) if tools else None}
        if tools:
            made["does not write tools"] = {**given, "tools": None}
        for i, message in enumerate(conversation.messages):
            for k, changed in enumerate(with_other_arguments(message.tool_calls or "[]")):
                other = {**messages[i], "tool_calls": self._calls(changed)}
                changes = {"messages": [*messages[:i], other, *messages[i + 1 :]]}
                made[f"leaves out tool calls of message {i} (call {k})"] = {**given, **changes}
        return made

    def _given(
        self, message: Message, marks: "tuple[_Marks, int] | None" = None, *, whole: str = ""
    ) -> dict[str, Any]:
        """The message as the template gets it.

        marks: what marks its fields, and its number. whole: what stands for each of its fields.
        """

        def field_of(text: str, which: int) -> str:
            if whole:
                return whole if text.strip() else text
            return marks[0].mark(text, 2 * marks[1] + which) if marks else text

        found = None
        if message.role == Role.ASSISTANT and not message.reasoning:
            found = _THOUGHT.fullmatch(message.content)
        if found and "think>" not in found[2] + found[3]:
            content = f"{found[1]}{field_of(found[2], 0)}</think>{field_of(found[3], 1)}"
        else:
            content = field_of(message.content, 1)
        made = self._shaped(message.role, content)
        if message.reasoning:
            # Three names are in use, and transformers gives them all too.
            made |= dict.fromkeys(REASONING_KEYS, field_of(message.reasoning, 0))
        made |= {"name": message.name} if message.name else {}
        made |= {"tool_call_id": message.call_id} if message.call_id else {}
        made |= {"tool_calls": self._calls(message.tool_calls)} if message.tool_calls else {}
        return made

    def _shaped(self, role: Role, content: str) -> dict[str, Any]:
        parts = [{"type": "text", "text": content}] if content else []
        return {"role": str(role), "content": parts if self._takes_parts else content}

    def _calls(self, text: str) -> list[dict[str, Any]]:
        calls = json.loads(text)
        return with_text_arguments(calls) if self._takes_text else calls

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether contents must be lists of parts: a text is left out or refused."""
        said = (_PROBE, [{"type": "text", "text": _PROBE}])
        asked = [[{"role": "user", "content": content}] for content in said]
        text, parts = self._tried(asked)
        return _PROBE not in text and _PROBE in parts

    @cached_property
    def _takes_text(self) -> bool:
        """Whether arguments of calls must be JSON text: objects are refused, or written as Python
        writes them."""
        function = {"name": "f", "arguments": {"wlb": "probe"}}
        calls = [{"type": "function", "function": function}]
        asked = [
            [self._shaped(Role.USER, "x"), self._shaped(Role.ASSISTANT, "") | {"tool_calls": given}]
            for given in (calls, with_text_arguments(calls))
        ]
        objects, texts = self._tried(asked)
        return bool(texts) and (not objects or "{'wlb': 'probe'}" in objects)

    @cached_property
    def _writes_reasoning(self) -> tuple[bool, bool]:
        """Whether reasoning is written that is under its key, and in tags before the content."""
        answers = [
            self._shaped(Role.ASSISTANT, "x") | dict.fromkeys(REASONING_KEYS, _PROBE),
            self._shaped(Role.ASSISTANT, f"<think>{_PROBE}</think>x"),
        ]
        asked = [[self._shaped(Role.USER, "x"), answer] for answer in answers]
        under_key, in_tags = self._tried(asked)
        return _PROBE in under_key, _PROBE in in_tags

    def _tried(self, conversations: Sequence[list[dict[str, Any]]]) -> list[str]:
        """The texts of conversations, "" where the template refuses one."""
        given = [{"messages": messages, "tools": None} for messages in conversations]
        texts, _ = self._ask(given, may_fail=True)
        return [text or "" for text, _ in texts]

    def _ask(
        self,
        given: Sequence[dict[str, Any]],
        prefixes: Sequence[dict[str, Any]] = (),
        *,
        may_fail: bool = False,
    ) -> tuple[list[tuple[str | None, Any]], list[int | None]]:
        """Render each of `given`, as `render_process` describes it.

        UserError if the first or the last one fails, unless `may_fail`.
        """
        # transformers gives tools and documents to every template.
        base = {**self.variables, "add_generation_prompt": False, "documents": None}
        asked = {
            "source": self.source,
            "given": [{**base, **one} for one in given],
            "prefixes": list(prefixes),
        }
        self.check()
        try:
            answer = renderer().ask(asked)
        except TemplateLimit as error:
            raise TemplateLimit(f"chat template {self.name} refuses it: {error}") from None
        texts = answer["texts"]
        failed = [reason for text, reason in (texts[0], texts[-1]) if text is None]
        if failed and not may_fail:
            reason = shortened(failed[0], 400)
            if "strftime_now" in reason:
                reason += (
                    " here, because with today's date a store would differ from day to day; write "
                    "a date in place of strftime_now(...) in a copy of the template"
                )
            raise UserError(f"chat template {self.name} refuses it: {reason}")
        return texts, answer["lengths"]


CHATML = ChatTemplate(
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{{ m['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    name="chatml",
    variables={},
    special_tokens=("<|im_start|>", "<|im_end|>"),
)
"""ChatML. It adds no system message; the newline after a message is not trained."""

LLAMA3 = ChatTemplate(
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + "
    "('ipython' if m['role'] == 'tool' else m['role']) + '<|end_header_id|>\\n\\n' }}"
    "{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    name="llama3",
    variables={},
    special_tokens=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    start="<|begin_of_text|>",
)
"""The template of Llama 3, without the date that 3.1 adds to the system message."""

BUILT_IN = {template.name: template for template in (CHATML, LLAMA3)}


def trained_messages(conversation: Conversation, turns: Turns) -> list[int]:
    """Indices of the assistant's messages that are trained: not those that say nothing."""
    messages = conversation.messages
    found = [i for i, m in enumerate(messages) if m.role == Role.ASSISTANT]
    if turns == Turns.LAST:
        found = found[-1:]
    return [i for i in found if messages[i].is_trained and not messages[i].is_empty_reply]


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
    template = ChatTemplate(source, name=str(name), variables={**known, **given})
    template.check()
    return template


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
