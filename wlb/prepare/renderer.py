"""Asks the process that renders chat templates (`render_process.py`), and names its limits."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

from wlb.plan import UserError

MOST_CPU_S = 3
"""Most seconds of CPU time of a rendering; 10,000 messages take less than one."""
MOST_BYTES = 1 << 31
"""Most address space of the process."""
_FILE = Path(__file__).with_name("render_process.py")


class TemplateLimit(UserError):
    """A template takes more than a rendering may."""


class TemplateRenderer:
    """A process that renders templates. It starts when it is asked first and again after a template
    ended it, and ends with this process, as its input then does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # the process that started it, as a fork must not share its pipes

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answer; TemplateLimit for a template that takes too long or too much memory."""
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._process, self._owner = self._started(), os.getpid()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(asked) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            except BaseException:
                # Nobody would read the answer of an interrupted question.
                self.close()
                raise
            if not answer:
                status = process.wait()
                self.close()
                if status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT):
                    name = signal.Signals(-status).name
                    raise RuntimeError(
                        f"the process that renders chat templates was ended from outside ({name}), "
                        f"perhaps for lack of memory; run the same command again"
                    )
                raise TemplateLimit(f"it {_why(status)}; use a template that does less")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            # Reads what is left, closes the pipes and waits.
            process.communicate()

    def _started(self) -> "subprocess.Popen[str]":
        # -P: modules of this folder must not hide others of the same name.
        command = [sys.executable, "-P", str(_FILE), str(MOST_CPU_S), str(MOST_BYTES)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8")


def _why(status: int) -> str:
    if status == -signal.SIGXCPU:
        return f"takes more than {MOST_CPU_S} s of CPU time"
    return f"ended the process that renders it (status {status})"


@cache
def renderer() -> TemplateRenderer:
    """The one of this process."""
    made = TemplateRenderer()
    atexit.register(made.close)
    return made
