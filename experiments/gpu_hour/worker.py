"""One part in a process of its own: `python -m experiments.gpu_hour.worker PART SETTING`.

SETTING is the setting as JSON. The answer goes to PART/answer.json of the hour's folder.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from experiments.gpu_hour.parts import all_parts
from experiments.gpu_hour.running import write_whole
from experiments.gpu_hour.runs import document_window, documents
from experiments.gpu_hour.setting import Setting
from wlb.prepare.synthetic import prepare_synthetic

DOCUMENT_TOKENS = {"cuda": 6_000_000, "cpu": 200_000}


def make_documents(setting: Setting) -> None:
    """Makes the store that all runs read, once."""
    prefix = documents(setting)
    if Path(f"{prefix}.json").exists():
        return
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prepare_synthetic(
        prefix,
        family="wlb_paper",
        num_tokens=DOCUMENT_TOKENS[setting.device],
        window=document_window(setting),
        seed=0,
        overwrite=True,
    )


def main() -> None:
    name, text = sys.argv[1:]
    given = json.loads(text)
    setting = Setting(**{**given, "folder": Path(given["folder"])})
    make_documents(setting)
    part = next(part for part in all_parts(setting) if part.name == name)
    answer = part.answer(setting)
    write_whole(setting.of(name) / "answer.json", asdict(answer))


if __name__ == "__main__":
    main()
