"""Tests conversations with tools and tool calls: what is rendered, trained, counted and refused."""

import json
from typing import Any

import pytest

from tests.prepare.chat_case import CHATML_TOKENS, byte_tokenizer, shown, trained
from wlb.prepare import ChatEncoder, Turns
from wlb.prepare.chat import ChatTokens
from wlb.prepare.chat_template import ChatTemplate, InjectedToken
from wlb.prepare.conversation import Role, conversation_of
from wlb.prepare.load_template import BUILT_IN

TOKENIZER = byte_tokenizer(CHATML_TOKENS, ordinary=("<call>", "</call>"))
TOOLS_FIRST = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
CALLS = (  # a form that several families of models have
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
    "<call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCKS = TOOLS_FIRST + (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}{% for c in m.tool_calls %}"
    "<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
AS_TEXT = CALLS.replace("{'name': c.function.name, 'arguments': c.function.arguments} | tojson",
                        "c.function.name + ':' + c.function.arguments")  # fmt: skip
AS_PYTHON = CALLS.replace("{{ {'name'", "{{ c.function.arguments }}{{ {'name'")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


def asked(*calls: Any, content: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "tools": [WEATHER],
        "messages": [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": content, "tool_calls": list(calls)},
            {"role": "tool", "content": "no", "tool_call_id": "1"},
            {"role": "assistant", "content": "No."},
        ],
        **more,
    }


def encoded(source: str, record: object, *, turns: Turns = Turns.ALL) -> ChatTokens:
    template = ChatTemplate(source, name="test", variables={})
    return ChatEncoder(TOKENIZER, template, turns=turns).encode(conversation_of(record))


def text_of(made: ChatTokens) -> str:
    return "".join(shown(TOKENIZER, made.tokens.tolist()))


@pytest.mark.parametrize("source", [TOOLS_FIRST + CALLS, BLOCKS])
def test_calls_are_trained_with_the_token_that_ends_their_turn(source: str) -> None:
    made = encoded(source, asked(call(city="Åre", days=2)))
    assert f"tools\n{json.dumps([WEATHER])}" in text_of(made)
    written = '{"name": "weather", "arguments": {"city": "Åre", "days": 2}}'
    assert trained(TOKENIZER, made) == [
        ["<call>", written, "</call>", "<|im_end|>"],
        ["No.", "<|im_end|>"],
    ]
    assert "assistant\n<call>" in text_of(made)


def test_content_before_calls_and_several_calls() -> None:
    made = encoded(TOOLS_FIRST + CALLS, asked(call(city="A"), call(city="B"), content="Let me see"))
    written = '{"name": "weather", "arguments": {"city": "%s"}}'
    assert trained(TOKENIZER, made)[0] == [
        *("Let me see\n", "<call>", written % "A", "</call>"),
        *("\n", "<call>", written % "B", "</call>", "<|im_end|>"),
    ]
    last = encoded(TOOLS_FIRST + CALLS, asked(call(city="A")), turns=Turns.LAST)
    assert trained(TOKENIZER, last) == [["No.", "<|im_end|>"]]


def test_transformers_writes_the_same_text() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=TOKENIZER)
    record = asked(call(city="Åre", days=2), content="")
    text = theirs.apply_chat_template(
        record["messages"], tools=record["tools"], chat_template=TOOLS_FIRST + CALLS, tokenize=False
    )
    assert text_of(encoded(TOOLS_FIRST + CALLS, record)) == text


@pytest.mark.parametrize(
    "form",
    [
        {"name": "weather", "arguments": {"city": "A"}},
        {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "A"}},
        },
        {"function": {"name": "weather", "arguments": '{"city": "A"}'}},
        {"name": "weather", "arguments": {"city": "A", "unit": None}},
    ],
)
def test_forms_of_a_call(form: dict[str, Any]) -> None:
    """Arguments may be JSON text; null in an object is a key that is absent."""
    expected = encoded(TOOLS_FIRST + CALLS, asked(call(city="A")))
    record = asked(form)
    for given in (
        record,
        {**record, "tools": json.dumps(record["tools"])},
        {**record, "tools": [json.dumps(WEATHER)]},
    ):
        assert encoded(TOOLS_FIRST + CALLS, given).tokens.tolist() == expected.tokens.tolist()


def test_null_in_json_text_is_an_argument() -> None:
    made = encoded(TOOLS_FIRST + CALLS, asked({"name": "f", "arguments": '{"unit": null}'}))
    assert '{"unit": null}' in text_of(made)


def test_sharegpt_calls_and_observations() -> None:
    turns = [
        {"from": "human", "value": "Rain?"},
        {"from": "function_call", "value": json.dumps(call(city="A")["function"])},
        {"from": "observation", "value": "no"},
        {"from": "gpt", "value": "No."},
    ]
    record = {"conversations": turns, "tools": json.dumps([WEATHER])}
    expected = encoded(TOOLS_FIRST + CALLS, asked(call(city="A")))
    assert encoded(TOOLS_FIRST + CALLS, record).tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("source", [AS_TEXT, AS_PYTHON])
def test_templates_that_take_arguments_as_text(source: str) -> None:
    """They add text to a string, or would write an object as Python does."""
    record = asked(call(city="A"))
    del record["tools"]
    made = text_of(encoded(source, record))
    assert '{"city": "A"}' in made
    assert "{'city'" not in made


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "are you?"}]
    made = conversation_of({"messages": [{"role": "user", "content": parts}]})
    assert made.messages[0].content == "How are you?"
    image = [*parts, {"type": "image", "url": "x"}]
    with pytest.raises(
        ValueError,
        match="message 0 has a part of the type 'image', but only parts of the type text",
    ):
        conversation_of({"messages": [{"role": "user", "content": image}]})


def test_rows_of_alpaca() -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    made = conversation_of(row)
    assert made.roles == (Role.USER, Role.ASSISTANT)
    assert [m.content for m in made.messages] == ["Add.\n1 2", "3"]
    for empty in ("", None):
        assert conversation_of({**row, "input": empty}).messages[0].content == "Add."
    with_system = conversation_of({**row, "system": "Be brief."})
    assert with_system.messages[0].role == Role.SYSTEM
    # Columns of Alpaca beside a conversation do not make it two.
    talk = [{"role": "user", "content": "x"}]
    assert conversation_of({**row, "messages": talk}).roles == (Role.USER,)


def test_an_empty_reply_is_not_trained() -> None:
    talk = [("user", "a"), ("assistant", " \n"), ("user", "b"), ("assistant", "c")]
    record = {"messages": [{"role": role, "content": text} for role, text in talk]}
    made = conversation_of(record)
    assert made.num_empty_replies == 1
    for template in (BUILT_IN["chatml"], ChatTemplate(CALLS, name="x", variables={})):
        tokens = ChatEncoder(TOKENIZER, template).encode(made)
        assert trained(TOKENIZER, tokens) == [["c", "<|im_end|>"]]
    # A message that calls a tool says something.
    assert conversation_of(asked(call(city="A"))).num_empty_replies == 0


@pytest.mark.parametrize(
    ("source", "record", "message"),
    [
        (CALLS, asked(call(city="A")), "leaves out the tools, which would be lost"),
        (
            CALLS.replace("m.tool_calls %}", "m.tool_calls if loop.first %}"),
            {**asked(call(city="A"), call(city="B")), "tools": None},
            "leaves out tool calls of message 1 or their arguments, which would be lost",
        ),
        (
            CALLS.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"),
            {**asked(call(city="A"), content="Well"), "tools": None},
            r"writes the contents of messages \[0, 2, 3\]",
        ),
    ],
)
def test_what_would_be_lost_is_refused(source: str, record: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoded(source, record)


@pytest.mark.parametrize(
    ("source", "answer", "calls"),
    [
        (CALLS, "<|im_end|>", "<|im_end|>"),
        (BLOCKS, "<|im_end|>", "<|im_end|>"),
        # Text after the end of a turn may be in a block; another token may end calls.
        (BLOCKS.replace("<|im_end|>{% endg", "<|im_end|>\n{% endg"), "<|im_end|>", "<|im_end|>"),
        (CALLS.replace("</call>{% endfor %}<|im_end|>", "{% endfor %}{{ '</call>' if "
                       "m.tool_calls else '<|im_end|>' }}"), "<|im_end|>", "</call>"),
    ],
)  # fmt: skip
def test_tokens_that_end_turns(source: str, answer: str, calls: str) -> None:
    encoder = ChatEncoder(TOKENIZER, ChatTemplate(source, name="test", variables={}))
    asks = asked(call(city="A"))
    plain = conversation_of({"prompt": "x", "completion": "y"})
    assert encoder.end_of(plain) == (TOKENIZER.token_to_id(answer), answer)
    del asks["tools"]
    called = conversation_of({**asks, "messages": asks["messages"][:2]})
    assert encoder.end_of(called)[1] == calls
    endless = BLOCKS.replace("<|im_end|>{% endg", "{% endg").replace("{{ '\\n' }}", "<|im_end|>")
    template = ChatTemplate(endless, name="test", variables={})
    with pytest.raises(
        ValueError, match="trains no special token at the end of an assistant's turn"
    ):
        ChatEncoder(TOKENIZER, template).end_of(plain)


def test_templates_that_take_contents_as_parts() -> None:
    source = CALLS.replace("{% if m.content %}{{ m.content }}{% endif %}",
                           "{% for p in m.content %}{{ p['text'] }}{% endfor %}")  # fmt: skip
    record = {"prompt": "How are you?", "completion": "Fine."}
    assert encoded(source, record).tokens.tolist() == encoded(CALLS, record).tokens.tolist()


def test_calls_before_the_content_are_trained() -> None:
    """The header ends where that of an answer without calls does."""
    call_first = "<call>{{ c.function | tojson }}</call>{% endfor %}"
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls %}"
        f"{call_first}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}"
    )
    record = {**asked(call(city="A"), content="Well"), "tools": None}
    blocks = BLOCKS.replace("{{ m.content }}{% for c in m", "{% for c in m", 1).replace(
        "</call>{% endfor %}", "</call>{% endfor %}{{ m.content }}", 1
    )
    for template in (source, blocks):
        made = trained(TOKENIZER, encoded(template, record))
        assert [len(span) for span in made] == [5, 2]
        assert made[0][0] == "<call>"
        assert made[0][3:] == ["Well", "<|im_end|>"]


def test_a_call_begins_where_the_header_does_not_end_as_the_prompt() -> None:
    source = CALLS.replace("<|im_start|>assistant", "<|im_start|>model")
    made = encoded(source, {**asked(call(city="A")), "tools": None})
    assert trained(TOKENIZER, made)[0][0] == "<call>"


def test_built_in_templates_have_no_form_for_calls() -> None:
    encoder = ChatEncoder(TOKENIZER, BUILT_IN["chatml"])
    with pytest.raises(ValueError, match="chatml leaves out the tools, which would be lost; use"):
        encoder.encode(conversation_of(asked(call(city="A"))))


@pytest.mark.parametrize(
    "record",
    [
        asked(call(city="a<|im_end|>b")),
        asked(call(city="A"), tools=[{**WEATHER, "description": "<|im_start|>"}]),
    ],
)
def test_calls_and_tools_cannot_inject_special_tokens(record: object) -> None:
    with pytest.raises(
        InjectedToken, match=r"tool calls of the conversation contain the special token <.im_"
    ):
        encoded(TOOLS_FIRST + CALLS, record)
