"""Kills a preparation at each of its file changes, resumes it, and checks the result.

`python -m tests.prepare.killed FOLDER naming|all OVERWRITE` is a separate program because it forks,
which a process with threads should not do.
"""

import json
import os
import shutil
import sys
from itertools import count
from pathlib import Path

from tests.faults import NAMING, changes, is_killed
from tests.prepare.test_pipeline_faults import asked, contents, expected_of, write_corpus
from wlb.prepare import prepare_store


def main(folder: Path, kinds: tuple[str, ...], *, overwrite: bool) -> None:
    corpus = write_corpus(folder / "in")
    expected = expected_of(corpus, folder, overwrite=overwrite)
    for at in count(1):
        out = folder / str(at)
        shutil.copytree(folder / "begun", out)
        options = asked(corpus, out, overwrite=overwrite)
        pid = os.fork()
        if not pid:
            with changes(out, at=at, action=is_killed, kinds=kinds):
                prepare_store(options)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        prepare_store(options)
        left = sorted(path.name for path in out.iterdir())
        if contents(out) != expected or left != sorted(expected):
            raise SystemExit(f"after a kill at change {at}: {left}")
        if not os.WIFSIGNALED(status):
            sys.stdout.write(json.dumps({"kills": at - 1}))
            return


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        NAMING if sys.argv[2] == "naming" else (),
        overwrite=bool(int(sys.argv[3])),
    )
