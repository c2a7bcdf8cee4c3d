"""Runs one part of gpu_hour: `python -m experiments.gpu_hour.worker PART SETTING`.

`running.run_part` starts this module in a process for each part. SETTING is the `Setting` as JSON.
The part's `Answer` goes to PART/answer.json in the folder of results.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from experiments.gpu_hour.parts import all_parts
from experiments.gpu_hour.runs import document_window, documents, make_store
from experiments.gpu_hour.setting import Setting
from experiments.harness.files import write_json

DOCUMENT_TOKENS = {"cuda": 6_000_000, "cpu": 200_000}
"""Tokens of the store that the training runs read, by device."""


def main() -> None:
    name, text = sys.argv[1:]
    given = json.loads(text)
    setting = Setting(**{**given, "folder": Path(given["folder"])})
    tokens = DOCUMENT_TOKENS[setting.device]
    make_store(documents(setting), tokens=tokens, window=document_window(setting))
    part = next(part for part in all_parts(setting) if part.name == name)
    answer = part.answer(setting)
    write_json(setting.of(name) / "answer.json", asdict(answer))


if __name__ == "__main__":
    main()
