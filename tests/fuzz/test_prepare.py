"""Fuzzes what `wlb prepare` reads: records, chat templates, tokenizer_config.json, manifests."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.harness import Refused, damaged, fuzzed, misshapen, outcome
from tests.prepare.chat_case import byte_tokenizer
from wlb.plan.read_file import object_of, parse_json
from wlb.prepare import records, renderer
from wlb.prepare.chat_template import ChatTemplate, Turns
from wlb.prepare.conversation import Role, conversation_of, probe_of
from wlb.prepare.encode import load_tokenizer, read_vocabulary, text_of, tokenizer_config
from wlb.prepare.load_template import BUILT_IN, load_template
from wlb.prepare.manifest import manifest_of, open_manifest
from wlb.prepare.parts import PartSummary
from wlb.prepare.records import BadRecord, list_inputs, list_shards, read_shard

CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "yes", "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"},
    {"role": "assistant", "content": "four", "weight": 0},
]
RECORDS: list[dict[str, Any]] = [
    {"text": "a document"},
    {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "completion": "b"},
    {"instruction": "a", "input": "b", "output": "c"},
]
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "<|im_end|>", "lstrip": False},
    "chat_template": [{"name": "default", "template": BUILT_IN["chatml"].source}],
    "model_max_length": 4096,
}
PROBE = probe_of([Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT])
PIECES = [
    "{% for m in messages %}",
    "{% for i in range(100000) %}",
    "{% endfor %}",
    "{{ m['content'] }}",
    "{{ m.role }}",
    "{% if m.role == 'user' %}",
    "{% endif %}",
    "{% set x = 'a' * 1000000000 %}",
    "{% set ns = namespace(x='ab') %}",
    "{% set ns.x = ns.x ~ ns.x %}",
    "{{ ns.x }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}",
    "{{ f(1) }}",
    "{{ 'x'.ljust(100000000) }}",
    "{{ 'x'|center(100000000) }}",
    "{{ '%100000000d' % 1 }}",
    "{{ '{:100000000}'.format(1) }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ 1 // 0 }}",
    "{{ messages|tojson(indent=100000000) }}",
    "{{ raise_exception('no') }}",
    "{{ messages[0].__class__ }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{{ bos_token }}",
    "{%",
    "{{ '\ud800' }}",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepare")


def read_all(path: Path) -> list[Any]:
    """Every record of a file as text or conversation, or why it is none."""
    files, *_ = list_inputs([str(path)])
    found: list[Any] = []
    for shard in list_shards(files, shard_bytes=40):
        for position, record in read_shard(shard, text_key="text", columns=tuple):
            if isinstance(record, BadRecord):
                found.append(str(record))
                continue
            made = outcome(lambda record=record: text_of(record, "text"))
            if isinstance(made, Refused):
                made = outcome(lambda record=record: conversation_of(record))
            found.append((position.name, made))
    return found


@fuzzed()
@given(st.data())
def test_misshapen_jsonl_is_read_or_refused(folder: Path, data: st.DataObject) -> None:
    made = [json.dumps(record) for record in RECORDS]
    at = data.draw(st.integers(0, len(made) - 1))
    made[at] = data.draw(misshapen(RECORDS[at]))
    path = folder / "a.jsonl"
    path.write_bytes("\n".join(made).encode("utf-8", "surrogatepass"))
    outcome(lambda: read_all(path))


def _parquet() -> bytes:
    out = io.BytesIO()
    texts = pa.array(["a document", "b", None])
    messages = pa.array([MESSAGES[:1], [], None])
    pq.write_table(pa.table({"text": texts, "messages": messages}), out)
    return out.getvalue()


JSONL = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
FILES = {"a.jsonl": JSONL, "a.jsonl.gz": gzip.compress(JSONL), "a.txt": b"text", "a.parquet": b""}
FILES["a.json"] = json.dumps(RECORDS, indent=1).encode()
FILES["a.parquet"] = _parquet()


@pytest.mark.parametrize("name", FILES)
@fuzzed(0.3)
@given(st.data())
def test_damaged_inputs_are_read_or_refused(folder: Path, name: str, data: st.DataObject) -> None:
    path = folder / name
    path.write_bytes(data.draw(damaged(FILES[name])))
    outcome(lambda: read_all(path))


def test_a_line_of_gigabytes_of_blanks_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_MOST_BYTES", 1 << 20)
    blanks = gzip.compress(b" " * (1 << 24))
    for name in ("blank.jsonl.gz", "blank.txt.gz"):
        (folder / name).write_bytes(blanks)
    made = outcome(lambda: read_all(folder / "blank.jsonl.gz"))
    assert isinstance(made, Refused)
    assert "line at byte 0 has more than 1048576 bytes" in made.message
    assert read_all(folder / "blank.txt.gz") == [
        "the file has more than 1048576 bytes; split the file"
    ]


@fuzzed(0.3)
@given(st.data())
def test_a_misshapen_conversation_is_rendered_or_refused(data: st.DataObject) -> None:
    text = data.draw(misshapen(RECORDS[1]))
    template = ChatTemplate(BUILT_IN["chatml"].source, name="chatml", variables={})

    def render() -> str:
        record = object_of(parse_json(text, "record", wide=True), "record")
        return template.render(conversation_of(record), Turns.ALL).text

    outcome(render)


@fuzzed(0.5)
@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_any_template_renders_or_is_refused(pieces: list[str]) -> None:
    def render() -> str:
        variables = {"bos_token": "<s>"}
        template = ChatTemplate("".join(pieces), name="made", variables=variables)
        return template.render(PROBE, Turns.ALL).text

    outcome(render)


@fuzzed(0.5)
@given(st.data())
def test_a_damaged_template_renders_or_is_refused(folder: Path, data: st.DataObject) -> None:
    source = data.draw(st.sampled_from([t.source for t in BUILT_IN.values()])).encode()
    path = folder / "made.jinja"
    path.write_bytes(data.draw(damaged(source)))
    outcome(lambda: load_template(path).render(PROBE, Turns.ALL).text)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'aaaaaaaaaaaaaaaa' * 100000 }}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
        "{% endfor %}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ ','.join(['x'] * 60000000)|replace('x', 'y' * 1000) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{{ '%*d' % (1000000000, 3) }}",
        "{{ '{:{}}'.format(3, 1000000000) }}",
        "{{ range(100000)|join('x' * 1000000) }}",
        "{{ messages|tojson(indent=1000000000) }}",
        "{{ lipsum(100000) }}",
        "{{ 1 / 0 }}",
        "{% for x in y %}" * 25 + "{% endfor %}" * 25,
        "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
        "x" * 2_000_000,
    ],
    ids=lambda source: source[:40],
)
def test_templates_that_held_a_preparation_for_ever_are_refused(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limits themselves take longer to reach.
    renderer.renderer().close()
    for name, most in (("MOST_CPU_S", 1), ("MOST_BYTES", 1 << 29)):
        monkeypatch.setattr(renderer, name, most)
    good = BUILT_IN["chatml"].source

    def render() -> str:
        return ChatTemplate(source + good, name="bad", variables={}).render(PROBE, Turns.ALL).text

    assert isinstance(outcome(render), Refused)
    renderer.renderer().close()


@fuzzed(0.5)
@given(st.data())
def test_a_misshapen_tokenizer_config_is_read_or_refused(folder: Path, data: st.DataObject) -> None:
    path = folder / "tokenizer_config.json"
    if data.draw(st.booleans()):
        text = data.draw(misshapen(CONFIG)).encode("utf-8", "surrogatepass")
    else:
        text = data.draw(damaged(json.dumps(CONFIG).encode()))
    path.write_bytes(text)
    outcome(lambda: tokenizer_config(path))
    outcome(lambda: load_template(path).render(PROBE, Turns.ALL).text)


@fuzzed(0.2)
@given(st.data())
def test_a_misshapen_tokenizer_is_read_or_refused(folder: Path, data: st.DataObject) -> None:
    path = folder / "tokenizer.json"
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    good = json.loads(byte_tokenizer(["<|im_end|>"]).to_str())
    path.write_text(data.draw(misshapen(good)), "utf-8")
    outcome(lambda: load_tokenizer(path).encode("some text").ids)
    outcome(lambda: read_vocabulary(path))


@fuzzed(0.5)
@given(st.data())
def test_a_misshapen_manifest_is_the_same_or_refused(folder: Path, data: st.DataObject) -> None:
    given, parts = folder / "in.txt", folder / "parts"
    parts.mkdir(exist_ok=True)
    # Written once: examples draw by the manifest's text, which has the input's time.
    if not given.exists():
        given.write_text("text")
    files, *_ = list_inputs([str(given)])
    made = manifest_of({"seed": 3, "tokenizer": "bytes"}, files)
    path = parts / "manifest.json"
    path.write_bytes(data.draw(misshapen(made)).encode("utf-8", "surrogatepass"))
    found = outcome(lambda: open_manifest(path, made))
    assert found is True or isinstance(found, Refused)


@fuzzed(0.5)
@given(st.data())
def test_a_misshapen_part_is_read_or_refused(folder: Path, data: st.DataObject) -> None:
    path = folder / "part.json"
    PartSummary(shard=3, size=10).write(path)
    good = json.loads(path.read_text())
    path.write_bytes(data.draw(misshapen(good)).encode("utf-8", "surrogatepass"))
    outcome(lambda: PartSummary.read(path))
