"""Tests the public API: what `import wlb` offers, that it is documented and in the wheel."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import wlb

ROOT = Path(__file__).parents[1]
ADAPTERS = ROOT / "wlb" / "adapters"
NAMES = wlb.__all__
PROGRAM = """
import sys
from importlib.util import find_spec
from wlb import Planner, load_profile, profile_names
from wlb.report.render import render
planner = Planner.for_lengths([64, 40, 30, 20, 10], context_window=64, num_micro_batches=2, cp=2)
plans = list(planner.steps())
assert sum(plan.packing.num_tokens for plan in plans) == 164
assert {"cpu", "h100"} <= set(profile_names())
assert load_profile("h100").attention
assert find_spec("torch") is None
assert "<title>empty</title>" in render("base", title="empty")
print("as installed")
"""


@pytest.mark.process
def test_importing_wlb_imports_nothing_and_the_planner_no_torch() -> None:
    program = (
        "import sys, wlb; assert 'numpy' not in sys.modules; from wlb import *; "
        "assert Planner and measure; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="module 'wlb' has no attribute 'planer'"):
        _ = wlb.planer  # pyright: ignore[reportAttributeAccessIssue]
    assert set(NAMES) <= set(dir(wlb))


def test_rooms_have_what_their_stubs_name() -> None:
    """A name that is also a file's would become that file's module when the file is imported."""
    for stub in sorted((ROOT / "wlb").rglob("__init__.pyi")):
        body = ast.parse(stub.read_text("utf-8")).body
        names = [a.name for node in body if isinstance(node, ast.ImportFrom) for a in node.names]
        room = importlib.import_module(".".join(stub.parent.relative_to(ROOT).parts))
        assert all(getattr(room, name) is not None for name in names)
        assert not {*names} & {path.stem for path in stub.parent.glob("*.py")}, room
        assert {*names} <= {*dir(room)}
    body = ast.parse((ROOT / "wlb" / "__init__.pyi").read_text("utf-8")).body
    (listed,) = (node.value for node in body if isinstance(node, ast.Assign))
    assert ast.literal_eval(listed) == wlb.__all__
    assert (ROOT / "wlb" / "py.typed").exists()


@pytest.mark.process
def test_the_planner_loads_few_files() -> None:
    """A reader of the planner meets the files that it loads: today 36, 51 with a plan, and 63 with
    its sharding.
    """
    program = """
import sys
def count():
    return sum(name.partition(".")[0] == "wlb" for name in sys.modules)
from wlb import Planner
print(count())
planner = Planner.for_lengths([64, 40, 30, 20, 10], context_window=64, num_micro_batches=2, cp=2)
step = planner.next(planner.start())
print(count())
planner.shard(step, pipeline=0)
print(count())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded, planned, sharded = map(int, done.stdout.split())
    assert loaded <= 45
    assert planned <= 55
    assert sharded <= 65


def _documented(name: str) -> Iterator[tuple[str, Any]]:
    """Yields a public name and what it offers itself, beside the methods of a protocol it
    documents.
    """
    value = getattr(wlb, name)
    yield name, value
    is_protocol = value in (wlb.Packer, wlb.WorkloadModel)
    protocols = set[str]() if is_protocol else {*vars(wlb.Packer), *vars(wlb.WorkloadModel)}
    if inspect.isclass(value):
        for member, raw in vars(value).items():
            own = getattr(raw, "fget", None) or getattr(raw, "__func__", raw)
            known = member.startswith("_") or member in protocols
            if inspect.isfunction(own) and not known:
                yield f"{name}.{member}", own


def _own_docstrings(value: type[Any]) -> str:
    """Returns a class's docstring, and what explains its fields beside, above or below them."""
    source = textwrap.dedent(inspect.getsource(value))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    found = [ast.get_docstring(node) or ""]
    lines = source.splitlines()
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            _, mark, comment = lines[(field.end_lineno or 0) - 1].partition("  # ")
            above = lines[field.lineno - 2].strip()
            is_explained = bool(mark) or above.startswith("# ")
            found += [f"{field.target.id}: {comment or above}"] * is_explained
    for before, here in itertools.pairwise(node.body):
        match before, here:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found.append(f"{name}: {text}")
    return " ".join(found)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name: str) -> None:
    """Docstrings must be our own (not what dataclass makes of the fields), and explain each
    field.
    """
    for path, value in _documented(name):
        text = inspect.getdoc(value) or ""
        assert len(text.split()) >= 3, f"{path} has no docstring"
        assert not text.startswith(f"{name}("), f"{path} has no docstring"
    value = getattr(wlb, name)
    if dataclasses.is_dataclass(value):
        assert isinstance(value, type)
        bases = [base for base in value.__mro__ if dataclasses.is_dataclass(base)]
        words = {w for base in bases for w in re.findall(r"\w+", _own_docstrings(base))}
        if value is wlb.RunSpec:  # a field per TOML section, each of which documents its keys
            words |= {f.name for f in dataclasses.fields(value)}
        public = {f.name for f in dataclasses.fields(value) if not f.name.startswith("_")}
        assert not public - words, f"fields of {name} that its docstring does not explain"


@pytest.mark.parametrize(
    "path",
    sorted(p for d in (ADAPTERS, ADAPTERS / "rl") for p in d.glob("*.py")),
    ids=lambda p: str(p.relative_to(ADAPTERS)),
)
def test_every_public_name_of_the_adapters_is_documented(path: Path) -> None:
    """The adapters are read, not imported, because their libraries may be missing."""
    tree = ast.parse(path.read_text("utf-8"))
    assert ast.get_docstring(tree)
    owners: list[ast.Module | ast.ClassDef] = [tree]
    for owner in owners:
        for node in owner.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node) or ""
                assert len(text.split()) >= 3, f"{path.name}: {node.name} has no docstring"
                if isinstance(node, ast.ClassDef):
                    owners.append(node)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    call = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.process
@pytest.mark.full
def test_wheel_and_sdist_hold_what_they_need(built: Path) -> None:
    (wheel,) = built.glob("wlb_llm-*.whl")
    (sdist,) = built.glob("wlb_llm-*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"wlb/py.typed", "wlb/__init__.pyi", "wlb/_kernels_profile/h100.json"} <= names
    assert any(name.endswith("presets/demo.toml") for name in names)
    assert "wlb/report/templates/base.html.j2" in names
    assert not any(name.startswith(("tests/", "experiments/", "slurm/")) for name in names)
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[-1] for name in archive.getnames()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "wlb").rglob("*.py")}
    assert sources <= inside
    assert {"LICENSE", "README.md", "CHANGELOG.md", "kernels_profile/h100.json"} <= inside
    assert not any(".venv" in name or name.startswith("runs/") for name in inside)


@pytest.mark.process
@pytest.mark.full
def test_the_wheel_in_a_fresh_environment(tmp_path: Path) -> None:
    """README's command builds and installs the wheel; README's example and `wlb plan` run then."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    clone = tmp_path / "clone"
    for name in files:
        if (ROOT / name).exists() and not name.startswith(("tests/", "experiments/")):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    page = (ROOT / "README.md").read_text("utf-8")
    (command,) = re.findall(r"<!-- wheel -->\n```\n(.+)\n```", page)
    command = f"source {tmp_path}/env/bin/activate && {command}"
    done = subprocess.run(["bash", "-c", command], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    example, *_ = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    (printed,) = re.findall(r"<!-- output -->\n```\n(.+?)```", page, re.DOTALL)
    done = subprocess.run(
        [str(python), "-c", example], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == printed, done.stderr
    done = subprocess.run(
        [str(python), "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "as installed\n", done.stderr
    command = [str(python.with_name("wlb")), "plan", "--synthetic", "wlb_paper", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bounded" in done.stdout
