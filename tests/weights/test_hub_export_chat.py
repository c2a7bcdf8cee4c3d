"""Tests what an export of a model that was trained on conversations says, up to a chat with it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.prepare.chat_case import CHATML_TOKENS, byte_tokenizer
from tests.weights.case import write_hub
from wlb.cli import main
from wlb.prepare import Turns
from wlb.prepare.conversation import Conversation, Message, Role
from wlb.prepare.load_template import BUILT_IN
from wlb.spec import ModelSpec
from wlb.train.checkpoint.folder import write_manifest
from wlb.weights import export, import_folder

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_LIMIT = 1000000000000000019884624838656
"""What transformers saves where a tokenizer has no limit of length."""
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
SPEC = ModelSpec(
    vocab_size=259,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=128,
    init_std=0.05,
)
ANSWERS = {"Hello": "Hi", "Bye": "See you", "1 + 1?": "2"}


def model_folder(folder: Path, *, vocab_size: int = SPEC.vocab_size) -> Path:
    """Writes a base model with a chat template, as people download one."""
    spec = replace(SPEC, vocab_size=vocab_size)
    write_hub(folder, spec=spec, eos_token_id=END_OF_TEXT)
    byte_tokenizer(["<|endoftext|>", *CHATML_TOKENS]).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": NO_LIMIT,
        "chat_template": "an older one",
        "auto_map": {"AutoTokenizer": ["code.py", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    generation = {"temperature": 0.6, "do_sample": True, "max_length": NO_LIMIT}
    generation |= {"eos_token_id": [END_OF_TEXT, 3]}
    (folder / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    return folder


def chats(path: Path, repeats: int = 40) -> Path:
    talks = [{"instruction": ask, "output": answer} for ask, answer in ANSWERS.items()] * repeats
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks), "utf-8")
    return path


def trained_on(store: Path, folder: Path) -> Path:
    """Returns an imported checkpoint that says it was trained on `store`."""
    made = import_folder(folder, store.parent / "imported")
    run = json.loads((made.checkpoint / "run.json").read_text("utf-8"))
    run["spec"]["training"] = {}
    run["spec"]["data"] = {"context_window": 64, "store": str(store)}
    (made.checkpoint / "run.json").write_text(json.dumps(run), "utf-8")
    (made.checkpoint / "manifest.json").unlink()
    write_manifest(made.checkpoint)
    return made.checkpoint


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def prepare(tmp_path: Path, *options: str) -> Path:
    records = str(chats(tmp_path / "chats.jsonl", 1))
    assert main(["prepare", records, "--out", str(tmp_path / "chat"), *options]) == 0
    return tmp_path / "chat"


def test_a_model_folder_is_template_and_tokenizer(tmp_path: Path) -> None:
    hub = model_folder(tmp_path / "hub")
    saved = trained_on(prepare(tmp_path, "--chat", str(hub)), hub)
    made = export(saved, tmp_path / "out")
    assert (made.stops, made.has_chat) == ((IM_END, END_OF_TEXT, 3), True)
    assert (made.folder / "chat_template.jinja").read_text("utf-8") == TEMPLATE
    same = (made.folder / "tokenizer.json").read_bytes()
    assert same == (hub / "tokenizer.json").read_bytes()
    assert read(made.folder / "tokenizer_config.json") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": NO_LIMIT,
    }
    assert read(made.folder / "config.json")["eos_token_id"] == [IM_END, END_OF_TEXT, 3]
    assert read(made.folder / "generation_config.json") == {
        "temperature": 0.6,
        "do_sample": True,
        "max_length": NO_LIMIT,
        "eos_token_id": [IM_END, END_OF_TEXT, 3],
        "pad_token_id": END_OF_TEXT,
    }


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_built_in_templates_are_exported_in_jinja(tmp_path: Path, name: str) -> None:
    """Transformers writes with them what the store was written with."""
    transformers = pytest.importorskip("transformers")
    hub = model_folder(tmp_path / "hub", vocab_size=261)
    options = ["--tokenizer", "bpe", "--vocab-size", "261"]
    made = export(trained_on(prepare(tmp_path, "--chat", name, *options), hub), tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(made.folder)
    end = BUILT_IN[name].special_tokens[-1]
    assert theirs.eos_token == end
    assert made.stops[0] == theirs.convert_tokens_to_ids(end)
    talk = [("system", " S "), ("user", "Hi\n"), ("assistant", "Yo"), ("tool", "x")]
    messages = [{"role": role, "content": text} for role, text in talk]
    given = Conversation(messages=tuple(Message(role=Role(r), content=c) for r, c in talk))
    text = BUILT_IN[name].render(given, Turns.ALL).text
    assert theirs.apply_chat_template(messages, tokenize=False) == text
    asked = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answered = [*given.messages, Message(role=Role.ASSISTANT, content="!")]
    whole = BUILT_IN[name].render(Conversation(messages=tuple(answered)), Turns.ALL).text
    assert whole.startswith(f"{asked}!{end}")


def test_an_export_says_which_template_it_lacks(tmp_path: Path) -> None:
    """A store of an earlier version, and a blend of stores with different templates."""
    hub = model_folder(tmp_path / "hub")
    store = prepare(tmp_path, "--chat", str(hub))
    about = read(tmp_path / "chat.json")
    kept = about["preparation"].pop("chat")
    (tmp_path / "chat.json").write_text(json.dumps(about), "utf-8")
    saved = trained_on(store, hub)
    with pytest.raises(ValueError, match=f"did not save the chat template; add --chat {hub}"):
        export(saved, tmp_path / "a")
    made = export(saved, tmp_path / "b", chat=str(hub))
    assert made.stops[0] == IM_END
    assert (made.folder / "chat_template.jinja").read_text("utf-8") == TEMPLATE == kept["template"]
    assert main(["export", str(saved), "--out", str(tmp_path / "c"), "--chat", "chatml"]) == 0
    other = tmp_path / "words" / "tokenizer.json"
    other.parent.mkdir()
    byte_tokenizer(CHATML_TOKENS).save(str(other))
    about["preparation"]["chat"] = kept
    (tmp_path / "chat.json").write_text(json.dumps(about), "utf-8")
    with pytest.raises(
        ValueError,
        match=r"gives the token <.im_end.> the id 257, but the model was trained to end a tu",
    ):
        export(saved, tmp_path / "d", tokenizer=other.parent)


@pytest.mark.full
@pytest.mark.process
def test_a_chat_fine_tune_stops_and_chats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Import, prepare, train, export, and a chat in transformers that ends by itself."""
    transformers = pytest.importorskip("transformers")
    hub, store = model_folder(tmp_path / "hub"), tmp_path / "chat"
    records = str(chats(tmp_path / "chats.jsonl"))
    assert main(["import", str(hub), "--out", str(tmp_path / "base")]) == 0
    assert f"--tokenizer {hub}" in capsys.readouterr().out
    assert main(["prepare", records, "--out", str(store), "--chat", str(hub)]) == 0
    settings = [
        f"data.store={store}",
        "run.name=chat",
        f"run.output_dir={tmp_path / 'runs'}",
        "run.device=cpu",
        "data.context_window=128",
        "data.num_windows=2",
        "packing.policy=fixed",
        "training.steps=60",
        "training.learning_rate=0.01",
        "training.warmup_steps=5",
        "eval.steps=0",
    ]
    assert main(["train", str(tmp_path / "base" / "model.toml"), "--set", *settings]) == 0
    out = tmp_path / "exported"
    assert main(["export", str(tmp_path / "runs" / "chat"), "--out", str(out)]) == 0
    assert f"generation stops at {IM_END}, {END_OF_TEXT}, 3" in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    for ask, answer in ANSWERS.items():
        talk = [{"role": "user", "content": ask}]
        given = tokenizer.apply_chat_template(
            talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**given, max_new_tokens=40, do_sample=False)[0].tolist()
        said = ids[given["input_ids"].shape[1] :]
        assert said[-1] == IM_END
        assert len(said) < 40
        assert tokenizer.decode(said, skip_special_tokens=True) == answer
