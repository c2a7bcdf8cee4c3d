"""Reads the defaults of config.json's fields from the configuration classes of transformers.

`python -m tests.cost.transformers_defaults` writes them to wlb/cost/families.json.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

import wlb.cost.families as families

FILE = Path(families.__file__).with_name("families.json")
LEFT_OUT = (
    "token_id",
    "position_embeddings",
    "output_",
    "return_",
    "is_encoder",
    "chunk_size_feed",
    "use_mamba",
    "use_cache",
    "pretraining_tp",
)
"""Parts of the names of fields that do not affect any count."""


def defaults(model_type: str) -> dict[str, Any]:
    """Returns the defaults of a family's fields, and the fields' other names in transformers."""
    made = CONFIG_MAPPING[model_type]
    fields = {field.name: field.default for field in dataclasses.fields(made)}
    kept = {
        name: value
        for name, value in sorted(fields.items())
        if (type(value) in (int, bool) or value == "auto")
        and not any(part in name for part in LEFT_OUT)
    }
    pairs = sorted(made.attribute_map.items())
    names = {k: v for k, v in pairs if v in fields}
    names |= {v: k for k, v in pairs if v not in fields and k in fields}
    return {"defaults": kept, "names": names}


def text_of_all() -> str:
    lines = [f"{json.dumps(name)}: {json.dumps(defaults(name))}" for name in families.COUNTED]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text_of_all(), "utf-8")
