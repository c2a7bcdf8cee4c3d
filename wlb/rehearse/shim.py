"""Build and load `shim.cpp`, which lets autograd run on fake CUDA tensors without a GPU.

The shim is compiled once for each version of torch, in about 15 seconds, into the user's cache. It
was tested with CPU builds of torch, but not with a CUDA build on a machine without a GPU. This
module does not import torch, because the shim must be loaded before torch.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path

from wlb.data.folder import make_folder
from wlb.plan import UserError

SOURCE = Path(__file__).with_name("shim.cpp")
CACHE = Path.home() / ".cache" / "wlb"
_COMPILERS = ("c++", "g++", "clang++")


def load(library: Path) -> None:
    """Load the library that `build` made, then import torch.

    Afterwards autograd runs on fake CUDA tensors, and this process cannot use a real GPU.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the shim must be loaded before torch is imported")
    loaded = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    __import__("torch")
    loaded.wlb_register_guard()


def build() -> Path:
    """Return the path of the compiled `shim.cpp`, a library; compile it if necessary.

    Raises:
        UserError: If torch or a C++ compiler is missing, or compiling fails.
    """
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        raise UserError(
            "a rehearsal needs torch, which is not installed; run pip install 'wlb-llm[train]'"
        )
    version = metadata.version("torch")
    mark = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:12]
    library = CACHE / f"rehearse-{mark}.so"
    if not library.is_file():
        _compile(library, Path(found.origin).parent)
    return library


def _compile(library: Path, torch: Path) -> None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise UserError(
            f"a rehearsal compiles a C++ file, but none of {', '.join(_COMPILERS)} is on PATH; "
            f"install a C++ compiler (Debian: apt install g++)"
        )
    make_folder(library.parent)
    # Build into a temporary folder and rename at the end, because other rehearsals may build the
    # same library at the same time.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        command = [
            *(compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch / 'include'}"),
            *(str(SOURCE), "-o", str(made), f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"),
            *("-lc10", "-ltorch_cpu"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(
                f"a rehearsal could not compile its C++ file; correct what the compiler reports.\n"
                f"{' '.join(command)} failed:\n{done.stderr[-2000:]}"
            )
        os.replace(made, library)
