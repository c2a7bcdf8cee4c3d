"""Replaces the worker of gpu_hour by parts that pass, compute wrongly, raise, die or hang."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.gpu_hour.setting import Answer, Setting

WRONG_KERNEL = """
import torch

def attention(q, k, v):
    return torch.softmax(q @ k.T, -1) @ v  # the scale is missing

def test_equals_the_definition():
    q, k, v = (torch.randn(8, 16, dtype=torch.float64) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    torch.testing.assert_close(attention(q, k, v), expected)
"""


def hang(folder: Path) -> None:
    """Starts a child process and waits.

    It is called before slow imports, so that the child exists before the part's time limit.
    """
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "child").write_text(str(child.pid))
    time.sleep(600)


def answer_of(name: str, setting: "Setting") -> "Answer":
    from experiments.gpu_hour.checks import tested
    from experiments.gpu_hour.setting import Answer, Verdict

    if name == "wrong_kernel":
        test = setting.of(name) / "test_wrong_kernel.py"
        test.write_text(WRONG_KERNEL)
        return tested(setting, [str(test)])
    if name == "raises":
        raise RuntimeError("planted")
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    answer = Answer()
    answer.claim("one and one", "2", "2", Verdict.HOLDS)
    answer.within("a step", 1.05, 1.0, share=0.10, unit="s")
    answer.within("another step", 1.5, 1.0, share=0.10, unit="s")
    return answer


def main() -> None:
    name, text = sys.argv[1:]
    sys.stdout.write(f"the log of {name}\n")
    sys.stdout.flush()
    given = json.loads(text)
    if name == "hangs":
        hang(Path(given["folder"]) / name)
    from experiments.gpu_hour.setting import Setting

    setting = Setting(**{**given, "folder": Path(given["folder"])})
    answer = answer_of(name, setting)
    (setting.of(name) / "answer.json").write_text(json.dumps(asdict(answer)))


if __name__ == "__main__":
    main()
