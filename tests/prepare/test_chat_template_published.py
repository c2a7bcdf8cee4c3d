"""Tests the chat templates of models that TRL ships: text equals transformers', and turns end."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.prepare.chat_case import byte_tokenizer, shown, trained
from tests.prepare.test_tool_calls import WEATHER, call
from wlb.plan import UserError
from wlb.prepare import ChatEncoder, Turns
from wlb.prepare.chat_template import ChatTemplate
from wlb.prepare.conversation import Role, conversation_of, probe_of

transformers = pytest.importorskip("transformers")
FOUND = importlib.util.find_spec("trl")
FOLDER = Path(FOUND.origin).parent / "chat_templates" if FOUND and FOUND.origin else Path("none")
FILES = sorted(FOLDER.glob("*.jinja"))
TOKENS = r"<\|?[A-Za-z_/][\w|/]*\|?>|\[/?[A-Z_]+\]|<｜[^｜]*｜>"
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = re.compile(r"end|eo[tms]|</s>|END|turn|user")
INSIDE = ("llama3_1.jinja",)
"""Templates that write tools inside the first message of the user."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not FILES, reason="TRL is not installed, or ships no templates"),
]

PLAIN = [
    {"role": "user", "content": "Rain in Oslo?"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
CALLED = [
    PLAIN[0],
    {"role": "assistant", "content": "", "tool_calls": [call(city="Oslo")]},
    {"role": "tool", "name": "weather", "content": "dry"},
    *PLAIN[1:],
]


def test_text_equals_that_of_transformers_and_turns_end() -> None:
    """A template that writes the date of today is left out."""
    rendered, calls, known = 0, 0, 0
    for file in FILES:
        source = file.read_text("utf-8")
        if "strftime_now" in source:
            continue
        tokenizer = byte_tokenizer(sorted({*re.findall(TOKENS, source), "<s>", "</s>"}))
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **VARIABLES)
        template = ChatTemplate(source, name=file.name, variables=VARIABLES)
        for messages, tools in ((PLAIN, None), (CALLED, [WEATHER])):
            encoder = ChatEncoder(tokenizer, template, turns=Turns.ALL)
            try:
                made = encoder.encode(conversation_of({"messages": messages, "tools": tools}))
            except UserError:
                continue
            given = messages
            if template._takes_content_parts:
                given = [
                    {**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages
                ]
            text = theirs.apply_chat_template(
                given, tools=tools, chat_template=source, tokenize=False
            )
            assert "".join(shown(tokenizer, made.tokens.tolist())) == text, file.name
            spans = trained(tokenizer, made)
            assert "Yes." in "".join(spans[-1]), file.name
            rendered += 1
            if made.prefix is not None:
                front = "".join(shown(tokenizer, made.tokens[: made.prefix].tolist()))
                assert text.index("Rain in Oslo?") >= len(front), file.name
                assert not tools or "weather" in front, file.name
                assert file.name not in INSIDE or not tools
                known += 1
            if tools:
                calls += 1
                assert "weather" in "".join(spans[0]), file.name
                assert "Oslo" in "".join(spans[0]), file.name
        _, end = ended(encoder)
        assert not end or ENDS.search(end), f"{file.name}: {end}"
    assert rendered >= 40
    assert calls >= 15
    assert known >= rendered - 6


ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>")
THOUGHTFUL = ("qwen3", "qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_super")
KEYED = [PLAIN[0], {"role": "assistant", "content": "No.", "reasoning_content": "hm"}]
TAGGED = [PLAIN[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nNo."}]
TWICE = [*KEYED, PLAIN[2], {"role": "assistant", "content": "Yes.", "reasoning_content": "so"}]


@pytest.mark.parametrize("kind", ["", "_training"])
@pytest.mark.parametrize("name", THOUGHTFUL)
def test_reasoning_is_written_as_transformers_does(name: str, kind: str) -> None:
    """Templates for training mark what is trained; transformers' mask of theirs equals ours."""
    source = (FOLDER / f"{name}{kind}.jinja").read_text("utf-8")
    special = {*re.findall(TOKENS, source), "<s>", "</s>"} - set(ORDINARY)
    tokenizer = byte_tokenizer(sorted(special), ordinary=ORDINARY)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **VARIABLES)
    template = ChatTemplate(source, name=name, variables=VARIABLES)
    for messages in (PLAIN[:2], KEYED, TAGGED, TWICE):
        encoder = ChatEncoder(tokenizer, template, turns=Turns.ALL)
        made = encoder.encode(conversation_of({"messages": messages}))
        expected = theirs.apply_chat_template(
            messages,
            chat_template=source,
            return_dict=True,
            return_assistant_tokens_mask=bool(kind),
        )
        assert made.tokens.tolist() == expected["input_ids"]
        if kind and not made.num_dropped:
            assert made.is_trained.astype(int).tolist() == expected["assistant_masks"]
        elif messages != PLAIN[:2]:
            said = "".join(trained(tokenizer, made)[-1])
            assert "</think>" in said or name == "qwen3_8"


def ended(encoder: ChatEncoder) -> tuple[int, str]:
    try:
        return encoder.end_of(probe_of((Role.USER, Role.ASSISTANT)))
    except UserError:
        return -1, ""
