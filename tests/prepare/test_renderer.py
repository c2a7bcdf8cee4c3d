"""Tests the process that renders chat templates: its limits, and that it goes on after them."""

import os
from collections.abc import Iterator

import pytest

from tests.prepare.chat_case import CHATML_TOKENS, byte_tokenizer
from wlb.plan import UserError
from wlb.prepare import ChatEncoder, ChatTemplate, Turns, renderer
from wlb.prepare.conversation import conversation_of
from wlb.prepare.load_template import CHATML

SAID = conversation_of({"prompt": "Hi", "completion": "Yo"})


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process under limits that are reached soon."""
    renderer.renderer().close()
    monkeypatch.setattr(renderer, "MOST_CPU_S", 1)
    monkeypatch.setattr(renderer, "MOST_BYTES", 1 << 29)
    yield
    renderer.renderer().close()


def text_of(source: str) -> str:
    return ChatTemplate(source, name="bad", variables={}).render(SAID, Turns.ALL).text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "refuses it: it takes more than 1 s of CPU time; use a template that does less",
        ),
        ("{{ 'a'|center(1000000000) }}", "it takes more memory than a rendering may"),
    ],
)
@pytest.mark.usefixtures("limited")
def test_a_template_without_end_is_refused_and_the_next_one_rendered(
    source: str, reason: str
) -> None:
    with pytest.raises(UserError, match=f"chat template bad .*{reason}"):
        text_of(source + CHATML.source)
    assert text_of(CHATML.source) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo" + (
        "<|im_end|>\n"
    )


@pytest.mark.usefixtures("limited")
def test_each_rendering_has_the_whole_limit() -> None:
    """The kernel counts the time of the process, which renders many templates."""
    busy = "{% for a in range(30) %}{% for b in range(20000) %}{% endfor %}{% endfor %}"
    for _ in range(20):
        assert text_of(busy + CHATML.source).endswith("Yo<|im_end|>\n")


def test_an_ended_process_is_started_again() -> None:
    encoder = ChatEncoder(byte_tokenizer(CHATML_TOKENS), CHATML)
    before = encoder.encode(SAID).tokens.tolist()
    renderer.renderer().close()
    assert encoder.encode(SAID).tokens.tolist() == before


@pytest.mark.process
def test_a_fork_has_a_process_of_its_own() -> None:
    assert text_of(CHATML.source)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, str(len(text_of(CHATML.source))).encode())
        os._exit(0)
    assert text_of(CHATML.source)
    assert os.waitpid(child, 0)[1] == 0
    assert int(os.read(read, 100)) == len(text_of(CHATML.source))
    os.close(read)
    os.close(write)
