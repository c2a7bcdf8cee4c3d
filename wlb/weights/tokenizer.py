"""Find the tokenizer that encoded a run's training data, and write it beside exported weights.

The token store of the run names the tokenizer. tokenizer_config.json is written as well and, if the
run was trained on conversations, the chat template. If no tokenizer is found, the result says why.
"""

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wlb.data import BlendedStore, TokenStore, open_store
from wlb.data.store import StoreInfo, store_path
from wlb.plan import UserError
from wlb.prepare import ChatChoice, ChatFormat, DocumentPolicy, load_tokenizer
from wlb.prepare.encode import BYTES, read_vocabulary, tokenizer_config
from wlb.prepare.load_template import CONFIG_FILE, TEMPLATE_FILE
from wlb.spec import RunSpec, apply
from wlb.spec.blend import parse_blend
from wlb.train.stores import train_store

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTokenizer:
    """The tokenizer of a run, or the reason why none was found."""

    why: str  # where the tokenizer's file was found, or why none was found
    file: Path | None = None  # its tokenizer.json; None if none was found
    eos_id: int | None = None  # token that ends a document in the store; None = no such token
    # Contents of its tokenizer_config.json; empty if there is none.
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    # Chat format of the store's conversations; None for a store of texts.
    chat: ChatFormat | None = None
    before: tuple[int, ...] = ()  # tokens before each text of the store: BOS, or nothing
    is_bytes: bool = False  # whether the tokens of a text are its UTF-8 bytes

    def with_file(self, file: Path) -> "FoundTokenizer":
        """Return a copy that uses another tokenizer.json and the tokenizer_config.json beside it.

        Args:
            file: The tokenizer.json or the folder that contains it.

        Raises:
            UserError: The file does not exist, or a token that ends a chat turn has another id in
                it than in training.
        """
        file = file / TOKENIZER_FILE if file.is_dir() else file
        if not file.is_file():
            raise UserError(f"--tokenizer {file} does not exist; give the path of a tokenizer.json")
        config = tokenizer_config(file.with_name(CONFIG_FILE))
        for name, number in (self.chat.ends if self.chat else {}).items():
            if (found := load_tokenizer(file).token_to_id(name)) != number:
                raise UserError(
                    f"--tokenizer {file} gives the token {name} the id {found}, but the model was "
                    f"trained to end a turn with id {number}; give the tokenizer that encoded the "
                    "conversations"
                )
        return replace(self, file=file, config=config, why=f"--tokenizer {file}")

    def with_chat(self, template: str) -> "FoundTokenizer":
        """Return a copy with another chat template.

        Args:
            template: A value of `wlb prepare --chat`.

        Raises:
            UserError: No tokenizer was found.
        """
        if self.file is None:
            raise UserError(
                f"--chat {template} needs a tokenizer, but none was found ({self.why}); add "
                "--tokenizer FILE"
            )
        about = ChatChoice(template=template).about(str(self.file), read_vocabulary(self.file))
        return replace(self, chat=ChatFormat(**about["chat"]))


def tokenizer_of_run(run: dict[str, Any], *, chat: str | None = None) -> FoundTokenizer:
    """Find the tokenizer that is named by the token store of a run, if the store still exists.

    Args:
        run: Contents of the checkpoint's run.json.
        chat: A chat template to use instead of the store's, which is then not read. None means the
            store's.

    Raises:
        UserError: The stores of a blend were prepared with different chat templates.
    """
    sections = run["spec"]
    if "data" not in sections:
        return FoundTokenizer(why="the checkpoint names no token store")
    known = {name: sections[name] for name in ("data", "model", "run") if name in sections}
    data = dict(known["data"])
    # Older versions of wlb had the key data.cache_dir, the folder of the stores.
    folder = data.pop("cache_dir", None)
    spec = apply(RunSpec(), known | {"data": data}, source="run.json", is_stored=True)
    name = train_store(spec, stores=Path(folder) if folder else None)
    for prefix in (name,) if isinstance(name, str) else (p for p, _ in parse_blend(name)):
        # Raise an error if the store's description (.json) is corrupt; it may be missing.
        StoreInfo.read(store_path(prefix, ".json"))
    try:
        opened = open_store(name)
    except (UserError, OSError) as error:
        return FoundTokenizer(why=f"the run's token store cannot be opened: {error}")
    stores = opened.stores if isinstance(opened, BlendedStore) else (opened,)
    # Take the first store's values. The others are equal, because opening a blend checks that all
    # stores have the same tokenizer.
    infos = [(store, store.info) for store in stores if store.info is not None]
    eos_id = next((info.eos_id for _, info in infos if info.eos_id is not None), None)
    arguments: list[dict[str, Any]] = [i.preparation.get("arguments", {}) for _, i in infos]
    configs: list[dict[str, Any]] = [i.preparation.get("tokenizer_config", {}) for _, i in infos]
    found = FoundTokenizer(
        eos_id=eos_id,
        why=f"the token store {opened.prefix} names no tokenizer",
        config=next(filter(None, configs), dict[str, Any]()),
        chat=None if chat else _chat_of(stores),
        is_bytes=any(one.get("tokenizer") == BYTES for one in arguments),
    )
    has_bos = (
        any(one.get("policy") == DocumentPolicy.EOS_BOS for one in arguments) and not found.chat
    )
    for store, info in infos:
        if info.tokenizer:
            file = store_path(store.prefix, "").with_name(info.tokenizer)
            if file.is_file():
                # The first token of a document is BOS if the store was prepared with EOS_BOS.
                before = (int(store.read(0, 0, 1)[0]),) if has_bos else ()
                return replace(
                    found, file=file, before=before, why=f"named by the token store {store.prefix}"
                )
            return replace(found, why=f"{file} does not exist any more")
    return found


def _chat_of(stores: tuple[TokenStore, ...]) -> ChatFormat | None:
    """Return the chat format with which conversations in the stores were encoded.

    None means that no store contains conversations.

    Raises:
        UserError: The stores have different chat formats, or a store of conversations does not
            contain its chat format.
    """
    formats: dict[str, ChatFormat] = {}
    for store in stores:
        preparation = store.info.preparation if store.info else {}
        arguments: dict[str, Any] = preparation.get("arguments", {}).get("encoder", {})
        if "chat" in preparation:
            formats[store.prefix] = ChatFormat(**preparation["chat"])
        elif "chat" in arguments:
            raise UserError(
                f"the token store {store.prefix} was prepared by an older version of wlb that did "
                f"not save the chat template; add --chat {arguments['chat']}"
            )
    found = list(formats.values())
    if any(one != found[0] for one in found):
        raise UserError(
            f"the token stores {', '.join(formats)} were prepared with different chat templates; "
            "choose one for the export with --chat TEMPLATE"
        )
    return found[0] if found else None


def check_tokenizer(file: Path, vocab_size: int) -> None:
    """Raise UserError unless a file is a tokenizer.json that fits the model's vocabulary.

    Args:
        file: The file.
        vocab_size: Size of the model's vocabulary; the tokenizer may have fewer tokens.
    """
    try:
        size = load_tokenizer(file).get_vocab_size()
    # Catch every Exception, because the tokenizers library raises no narrower class.
    except Exception as error:
        raise UserError(
            f"--tokenizer {file} cannot be read as a tokenizer.json: {error}; give the "
            "tokenizer.json that encoded the training text"
        ) from None
    if size > vocab_size:
        raise UserError(
            f"the tokenizer {file} has {size} tokens, more than the model's vocabulary of "
            f"{vocab_size}; set --tokenizer to the file that encoded the training text"
        )


def write_tokenizer(found: FoundTokenizer, folder: Path) -> None:
    """Write a tokenizer into a folder, so that transformers encodes as in training.

    The files are tokenizer.json, tokenizer_config.json and, if known, chat_template.jinja.

    Args:
        found: A tokenizer whose `file` is not None.
        folder: The folder of exported weights.
    """
    assert found.file is not None
    shutil.copyfile(found.file, folder / TOKENIZER_FILE)
    template = found.file.with_name(TEMPLATE_FILE)
    if found.chat is not None:
        (folder / TEMPLATE_FILE).write_text(found.chat.template, "utf-8")
    elif found.file.name == TOKENIZER_FILE and template.is_file():
        shutil.copyfile(template, folder / TEMPLATE_FILE)
    beside = found.file.with_name(CONFIG_FILE)
    if found.chat is None and found.file.name == TOKENIZER_FILE and beside.is_file():
        shutil.copyfile(beside, folder / CONFIG_FILE)
        return
    config = _config_of(found, found.file)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG_FILE).write_text(text, "utf-8")


def _config_of(found: FoundTokenizer, file: Path) -> dict[str, Any]:
    """Return the contents of the tokenizer_config.json to write.

    Args:
        found: The tokenizer.
        file: Its tokenizer.json.
    """
    # Leave out auto_map, because the custom code that it names is not copied.
    config = {key: value for key, value in found.config.items() if key != "auto_map"}
    # With this class transformers uses tokenizer.json unchanged. With another class or none, it
    # would change the tokenizer by the rules of the model_type.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if found.chat is not None:
        config.pop("chat_template", None)
        return config | found.chat.variables
    eos = None if found.eos_id is None else load_tokenizer(file).id_to_token(found.eos_id)
    return config if eos is None else config | {"eos_token": eos}
