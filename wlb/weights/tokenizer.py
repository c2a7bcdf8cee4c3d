"""Find the tokenizer for exported weights: the one that the run's token store names.

If no store is known, or it names no tokenizer, the result says why.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wlb.data import BlendedStore, open_store
from wlb.data.store import store_path
from wlb.plan import UserError
from wlb.prepare import load_tokenizer
from wlb.spec import RunSpec, apply
from wlb.train.stores import train_store


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTokenizer:
    """file: a tokenizer.json, or None. eos_id: id that ends a document in the store. why: source of
    the file, or why there is none."""

    why: str
    file: Path | None = None
    eos_id: int | None = None


def tokenizer_of_run(run: dict[str, Any]) -> FoundTokenizer:
    """Find the tokenizer that the token store of a run.json names, if the store still exists."""
    sections = run["spec"]
    if "data" not in sections:
        return FoundTokenizer(why="the checkpoint names no token store")
    known = {name: sections[name] for name in ("data", "model")}
    name = train_store(apply(RunSpec(), known, source="run.json", is_stored=True))
    try:
        opened = open_store(name)
    except (UserError, OSError) as error:
        return FoundTokenizer(why=f"its token store: {error}")
    stores = opened.stores if isinstance(opened, BlendedStore) else (opened,)
    # All stores of a blend have the same tokenizer; opening it checked this.
    infos = [(store, store.info) for store in stores if store.info is not None]
    eos_id = next((info.eos_id for _, info in infos if info.eos_id is not None), None)
    for store, info in infos:
        if info.tokenizer:
            file = store_path(store.prefix, "").with_name(info.tokenizer)
            if file.is_file():
                return FoundTokenizer(file=file, eos_id=eos_id, why=f"named by {store.prefix}")
            return FoundTokenizer(eos_id=eos_id, why=f"{file} is gone")
    return FoundTokenizer(eos_id=eos_id, why=f"{opened.prefix} names none")


def check_tokenizer(file: Path, vocab_size: int) -> None:
    """UserError for a file that is no tokenizer.json, or has more tokens than the model."""
    if not file.is_file():
        raise UserError(f"--tokenizer {file}: there is no such file; give a tokenizer.json")
    try:
        size = load_tokenizer(file).get_vocab_size()
    # The tokenizers library raises plain Exception.
    except Exception as error:
        raise UserError(f"--tokenizer {file} is not a tokenizer.json: {error}") from None
    if size > vocab_size:
        raise UserError(
            f"{file} has {size} tokens, but the model has {vocab_size}; give --tokenizer the file "
            f"that encoded the training text"
        )


def copy_tokenizer(file: Path, folder: Path, *, eos_id: int | None) -> None:
    """Copy tokenizer.json, and a tokenizer_config.json so that transformers uses it as it is."""
    shutil.copyfile(file, folder / "tokenizer.json")
    beside = file.with_name("tokenizer_config.json")
    if file.name == "tokenizer.json" and beside.is_file():
        shutil.copyfile(beside, folder / beside.name)
        return
    # Without a class, transformers would rebuild it as a Llama tokenizer, which differs.
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    eos = None if eos_id is None else load_tokenizer(file).id_to_token(eos_id)
    if eos is not None:
        config["eos_token"] = eos
    (folder / beside.name).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
