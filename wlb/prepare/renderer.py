"""Start the process that renders chat templates (`render_process.py`), and send it requests."""

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
"""The most CPU time of a rendering in seconds. 10,000 messages take less than one second."""
MOST_BYTES = 1 << 31
"""The most address space of the process in bytes."""
_FILE = Path(__file__).with_name("render_process.py")


class TemplateLimit(UserError):
    """Raised if a template needs more CPU time or memory than a rendering may have."""


class TemplateRenderer:
    """Starts a child process that renders templates (the render process), and sends it requests.

    The render process starts with the first request, and again after a template exceeded a limit.
    It ends when this process ends, because its stdin is closed then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        # PID of the process that started `_process`. A forked process must not share the pipes of
        # its parent, so it starts another `_process` of its own.
        self._owner = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer (see the docstring of `render_process`).

        Raises:
            TemplateLimit: The template exceeded a limit.
            RuntimeError: The process that renders templates was killed for another reason.
        """
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._process, self._owner = self._started(), os.getpid()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            except BaseException:
                # Nobody reads the answer after an interrupt, so end the process. Otherwise the next
                # request would get this answer.
                self.close()
                raise
            if not answer:
                status = process.wait()
                self.close()
                if status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT):
                    name = signal.Signals(-status).name
                    raise RuntimeError(
                        f"the process that renders chat templates was killed ({name}), perhaps "
                        f"because memory was short; run the same command again"
                    )
                raise TemplateLimit(f"rendering {_why(status)}; use a simpler template")
        return json.loads(answer)

    def close(self) -> None:
        """End the process that renders templates, if it runs."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            # communicate() reads what is left in the pipes, closes them, and waits for the process
            # to end.
            process.communicate()

    def _started(self) -> "subprocess.Popen[str]":
        # -P keeps this folder out of sys.path, where its files could hide standard modules of the
        # same names.
        command = [sys.executable, "-P", str(_FILE), str(MOST_CPU_S), str(MOST_BYTES)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8")


def _why(status: int) -> str:
    if status == -signal.SIGXCPU:
        return f"takes more than {MOST_CPU_S} s of CPU time"
    return f"ended the render process with status {status}"


@cache
def renderer() -> TemplateRenderer:
    """Return the `TemplateRenderer` that all chat templates of this process share."""
    made = TemplateRenderer()
    atexit.register(made.close)
    return made
