"""Tests that pages that people read first are true.

Links lead somewhere, commands parse, and figures are those of the pages that they are taken from.
"""

import argparse
import ast
import doctest
import re
import shlex
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

import wlb
from wlb.cli import main as run_command
from wlb.spec import RunSpec, list_keys, presets

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TOUR = 12
KEYS = {key.name for key in list_keys(RunSpec)}


def _tracked(pattern: str) -> list[Path]:
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for line in found.stdout.splitlines() if (path := ROOT / line).exists()]


PAGES = _tracked("*.md")
WITH_EXAMPLES = [page for page in PAGES if "\n>>> " in page.read_text("utf-8")]
ROOMS = sorted(path.parent for path in (ROOT / "wlb").glob("*/__init__.py"))


def _anchors(page: Path) -> set[str]:
    """Returns what GitHub calls the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def _links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _links(page):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), f"{target.name} has no heading {anchor!r}"


def test_the_readme_says_on_its_first_screen_what_has_not_run() -> None:
    first = README.read_text("utf-8").split("\n## ")[0]
    assert "No job on several GPUs has run it yet" in " ".join(first.split())
    assert "](https://arxiv.org/abs/2503.17924)" in first


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_each_room_has_a_page(room: Path) -> None:
    assert (room / "README.md").exists()
    assert f"({room.name}/README.md)" in (ROOT / "wlb" / "README.md").read_text("utf-8")


def _commands(page: Path) -> list[str]:
    """Returns lines of code blocks without their comments, `&&` taken apart."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
    lines = [re.sub(r"\s+#.*", "", line) for block in blocks for line in block.splitlines()]
    return [part.strip() for line in lines for part in line.split("&&")]


WRITTEN = sorted(
    {
        (str(page.relative_to(ROOT)), command)
        for page in PAGES
        if "results" not in page.parts and page.name not in ("CHANGELOG.md", "LOG.md")
        for command in _commands(page)
    }
)


class Parsed(Exception):
    """Says that the command line was understood; the command is not run."""


@pytest.mark.parametrize(("page", "command"), [c for c in WRITTEN if re.match(r"wlb [a-z]", c[1])])
def test_commands_of_wlb_parse(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *args: object, **options: object) -> None:
        raise Parsed(parse(self, *args, **options))  # pyright: ignore

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Parsed) as parsed:
        run_command(shlex.split(command)[1:])
    options = parsed.value.args[0]
    for item in getattr(options, "overrides", None) or []:
        key = item.partition("=")[0]
        assert key in KEYS, f"{page}: {key} is no configuration key"
    preset = getattr(options, "preset", None)
    if preset and re.fullmatch(r"\d+[bm]_\d+k|demo\w*", str(preset)):
        assert preset in presets()


def test_scripts_and_modules_of_commands_exist() -> None:
    for page, command in WRITTEN:
        for module in re.findall(r"python -m ((?:experiments|wlb)[\w.]*)", command):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), page
        for script in re.findall(r"(?:sbatch|bash) ([\w./]+)", command):
            assert (ROOT / script).exists() or "my" in script, f"{page}: {script}"


def test_figures_of_the_readme_are_those_of_their_pages() -> None:
    """Each result says how it was obtained, and links the page that has its figures."""
    section = README.read_text("utf-8").split("<!-- results -->")[1].split("<!-- end -->")[0]
    results = section.strip().split("\n- ")
    assert len(results) == 5
    for result in results:
        assert re.search(r"\*(Measured|Simulated|Predicted)", result), result
        (link,) = re.findall(r"\]\(([^)]+)\)", result)
        text = (ROOT / link).read_text("utf-8")
        for figure in re.findall(r"\d+\.\d+%?", result):
            assert figure in text, f"{figure} is not on {link}"


def test_figures_beside_the_paper_are_those_of_their_pages() -> None:
    """Each section of experiments/RESULTS.md links the pages that have its figures."""
    page = ROOT / "experiments" / "RESULTS.md"
    sections = re.split(r"\n##+ ", page.read_text("utf-8"))
    assert len(sections) >= 25
    for section in sections[1:]:
        links = re.findall(r"\]\(([\w/.]+\.md)\)", section)
        text = " ".join((page.parent / link).read_text("utf-8") for link in links)
        for figure in re.findall(r"\b\d\.\d{3,}\b", section):
            assert figure in text, f"{figure} is on no page that '{section[:40]}' links"


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_pages_print_what_they_say(page: Path) -> None:
    """Runs the `>>>` lines of a page in order, in one namespace."""
    found = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert found.attempted
    assert not found.failed


def test_each_room_has_an_example() -> None:
    assert {room / "README.md" for room in ROOMS} <= set(WITH_EXAMPLES)


def test_examples_of_own_parts_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the blocks of wlb/EXTENDING.md one after the other, as a reader would type them."""
    text = (ROOT / "wlb" / "EXTENDING.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {"__name__": "extending"}
    for block in blocks:
        exec(compile(block, "EXTENDING.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "longest_first imbalance" in printed
    assert "bounded imbalance" in printed


def test_the_tour_has_twelve_files() -> None:
    text = (ROOT / "wlb" / "README.md").read_text("utf-8").split("## A tour")[1].split("\n## ")[0]
    assert len(re.findall(r"^\| \[[\w/]+\.py\]", text, re.MULTILINE)) == TOUR


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "wlb" / "README.md").read_text("utf-8").split("## Public API")[1]
    names = set(wlb.__all__) - {"__version__"}
    assert not [name for name in sorted(names) if not re.search(rf"`{name}[`(]", text)]


def test_class_names_are_unique_in_wlb() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in (ROOT / "wlb").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: places for name, places in found.items() if len(places) > 1}


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_records_document_each_field_where_it_stands() -> None:
    """No record lists its fields in its docstring ("name: ... other: ...")."""
    found: list[str] = []
    for path in (ROOT / "wlb").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and _is_dataclass(node):
                text = ast.get_docstring(node) or ""
                named = {
                    field.target.id
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                }
                listed = [name for name in named if re.search(rf"\b{name}(, \w+)*: ", text)]
                found += [f"{path.relative_to(ROOT)}: {node.name}"] * (len(listed) > 1)
    assert not found


def test_the_workflow_runs_what_a_contributor_runs() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    assert "run: bash .ci/run" in text
    assert (ROOT / ".ci" / "run").exists()


def test_forms_of_issues_are_read() -> None:
    yaml = pytest.importorskip("yaml")
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert {"bug.yml", "gpu_hour.yml"} <= {form.name for form in forms}
    for form in forms:
        made = yaml.safe_load(form.read_text("utf-8"))
        if form.name == "config.yml":
            continue
        assert {"name", "description", "body"} <= set(made)
        ids = [part["id"] for part in made["body"] if part["type"] != "markdown"]
        assert len(set(ids)) == len(ids) > 0


def test_words_are_spelled_right() -> None:
    """Runs codespell, whose settings are in pyproject.toml."""
    done = subprocess.run(["codespell"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
