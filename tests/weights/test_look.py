"""Tests a loaded model: logits, greedy generation with kept keys, texts and conversations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.prepare.chat_case import byte_tokenizer
from tests.weights.case import SPEC, logits, model_of, some_tokens, write_hub
from tests.weights.test_hub_export_chat import IM_END, model_folder, prepare, trained_on
from wlb.spec import RopeScaling
from wlb.weights import export, import_folder, load


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    hub = write_hub(tmp_path / "hub", eos_token_id=[7, 9])
    return import_folder(hub, tmp_path / "imported").checkpoint


def test_logits_are_those_of_the_model(checkpoint: Path) -> None:
    model = load(checkpoint)
    assert model.stops == (7, 9)
    tokens = some_tokens(100, SPEC.vocab_size)
    found = model.logits(tokens)
    assert found.shape == (100, SPEC.vocab_size)
    torch.testing.assert_close(found, logits(model_of(checkpoint), tokens), atol=1e-5, rtol=0)
    assert torch.equal(model.logits(tokens.tolist()), found)
    half = load(str(checkpoint), dtype="bfloat16")
    assert next(half.module.parameters()).dtype == torch.bfloat16
    assert half.logits(tokens).dtype == torch.float32


def test_greedy_generation_equals_whole_passes_and_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Rows that are kept from token to token give what a pass over all rows gives."""
    model = load(checkpoint)
    tokens = some_tokens(20, SPEC.vocab_size).tolist()
    made = model.greedy(tokens, most=30, stops=())
    assert len(made) == 30
    whole = list(tokens)
    for _ in range(30):
        whole.append(int(model.logits(whole)[-1].argmax()))
    assert tokens + made == whole
    # It ends with the first token that ends it.
    stopped = model.greedy(tokens, most=30, stops=[made[4]])
    assert stopped == made[: made.index(made[4]) + 1]
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        export(checkpoint, tmp_path / "out").folder
    )
    theirs.generation_config.eos_token_id = None
    given = torch.tensor([tokens])
    theirs_made = theirs.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=30, do_sample=False
    )
    assert theirs_made[0].tolist() == whole


def test_windows_slide_over_kept_keys(tmp_path: Path) -> None:
    """Token by token as in a whole pass, where every other layer sees 6 keys."""
    spec = replace(SPEC, sliding_window=6, full_every=2, qk_norm=True)
    spec = replace(spec, rope_scaling=RopeScaling())
    model = load(import_folder(write_hub(tmp_path / "hub", spec=spec), tmp_path / "a").checkpoint)
    whole = some_tokens(20, SPEC.vocab_size).tolist()
    made = model.greedy(whole, most=12, stops=())
    for _ in range(12):
        whole.append(int(model.logits(whole)[-1].argmax()))
    assert made == whole[20:]


@pytest.mark.parametrize("tokens", [[], [[1]], [SPEC.vocab_size], [-1]])
def test_tokens_that_cannot_be(checkpoint: Path, tokens: list[int]) -> None:
    with pytest.raises(
        ValueError, match=r"must be a list of at least one token id, each between 0 and 300"
    ):
        load(checkpoint).logits(tokens)


def test_texts_need_a_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint)
    with pytest.raises(
        ValueError, match=r"no tokenizer \(the checkpoint names no token store\); give"
    ):
        model.encode("x")
    byte_tokenizer(["</s>"]).save(str(tmp_path / "tokenizer.json"))
    model = load(checkpoint, tokenizer=tmp_path)
    assert model.encode("Hi</s>") == list(b"Hi</s>")
    assert model.decode([*b"Hi", 256]) == "Hi"


def test_a_model_of_conversations_is_asked_as_in_training(tmp_path: Path) -> None:
    hub = model_folder(tmp_path / "hub")
    model = load(trained_on(prepare(tmp_path, "--chat", str(hub)), hub))
    assert model.chats
    assert model.stops[0] == IM_END
    # The end of a turn in a message is text, which the model has not seen as its own token.
    start, asked = 257, b"a<|im_end|>"
    assert model.encode(asked.decode()) == [
        *(start, *b"user\n", *asked, IM_END, *b"\n"),
        *(start, *b"assistant\n"),
    ]
    assert model.encode_plain("a") == list(b"a")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--tokenizer", "bytes"], list(b"Hi")),
        (["--tokenizer", "HUB", "--documents", "eos_bos", "--bos", "<|im_start|>"], [257, *b"Hi"]),
    ],
)
def test_a_text_begins_as_documents_do(
    tmp_path: Path, options: list[str], expected: list[int]
) -> None:
    hub = model_folder(tmp_path / "hub")
    store = prepare(
        tmp_path, "--text-key", "output", *(str(hub) if o == "HUB" else o for o in options)
    )
    model = load(trained_on(store, hub))
    assert model.encode("Hi") == expected
    assert model.decode(model.encode_plain("Hié")) == "Hié"


def test_a_damaged_checkpoint_is_refused(checkpoint: Path) -> None:
    run = json.loads((checkpoint / "run.json").read_text("utf-8"))
    (checkpoint / "run.json").write_text(json.dumps(run | {"step": 1}), "utf-8")
    with pytest.raises(ValueError, match=r"run\.json"):
        load(checkpoint)
