"""Tests the code as a whole: layers, style, and who may read the environment."""

import ast
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "wlb").rglob("*.py"))


@pytest.mark.process
@pytest.mark.parametrize(
    "command", ["lint-imports", "ruff check", "ruff format --check"], ids=lambda c: c.split()[-1]
)
def test_the_linters_of_pyproject_are_content(command: str) -> None:
    program, *options = command.split()
    out = subprocess.run(
        [str(Path(sysconfig.get_path("scripts")) / program), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, f"{command}\n{out.stdout}{out.stderr}"


@pytest.mark.process
def test_importing_the_planner_leaves_torch_out() -> None:
    code = "import sys, wlb.planner; print(sorted(m for m in sys.modules if 'torch' in m))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_test_files_are_named_after_modules() -> None:
    """A test file of a room is test_<module>.py, or test_<module>_<subject>.py.

    Folders that are no room hold tests of several rooms, of scripts or of a machine.
    """
    misnamed: list[str] = []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        room = ROOT / "wlb" / test.parent.relative_to(ROOT / "tests")
        if test.parent == ROOT / "tests" or not room.is_dir():
            continue
        modules = [p.stem for p in room.iterdir() if p.is_dir() or p.suffix == ".py"]
        name = test.stem.removeprefix("test_")
        if not any(name == module or name.startswith(f"{module}_") for module in modules):
            misnamed.append(str(test.relative_to(ROOT)))
    assert misnamed == []


def _reads_environment(tree: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "putenv"}
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    imported = {
        alias.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for alias in n.names
    }
    return bool(names & (used | imported))


def test_only_world_reads_the_environment() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if _reads_environment(ast.parse(path.read_text("utf-8")))
    ]
    assert found == ["wlb/parallel/world.py"]


PLANNING = ("packing", "sharding", "planner", "balance", "cost", "memory")
DIFFER_BETWEEN_CPUS = {
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "power", "float_power"),
    *("sin", "cos", "tan", "tanh", "cbrt", "hypot", "argpartition"),
}


def _differing(tree: ast.AST) -> list[int]:
    """Lines whose result NumPy, libm or an unstable sort may make another one on other CPUs.

    Powers of whole constants are let through: they are of whole numbers.
    """
    found: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            base = node.left.value if isinstance(node.left, ast.Constant) else None
            is_constant = base is not None and isinstance(node.right, ast.Constant)
            if not (is_constant or isinstance(base, int)):
                found.append(node.lineno)
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            is_unstable = name == "argsort" and all(k.arg != "kind" for k in node.keywords)
            if name in DIFFER_BETWEEN_CPUS or is_unstable:
                found.append(node.lineno)
    return found


def test_plans_come_from_arithmetic_that_is_the_same_on_all_cpus() -> None:
    """Sums, products, quotients and square roots are exactly rounded everywhere."""
    assert _differing(ast.parse("a = np.log2(b)\nc = d**0.5\ne = f.argsort()")) == [1, 2, 3]
    found = [
        str(path.relative_to(ROOT))
        for path in MODULES
        if path.relative_to(ROOT / "wlb").parts[0] in PLANNING
        for _ in _differing(ast.parse(path.read_text("utf-8")))
    ]
    assert found == []
