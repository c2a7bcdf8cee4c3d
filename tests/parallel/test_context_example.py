"""Tests that the folder's README shows what its command prints."""

from pathlib import Path

from wlb.parallel import context
from wlb.parallel.context.example import text

README = Path(context.__file__).parent / "README.md"


def test_the_readme_shows_what_the_command_prints() -> None:
    shown = (
        README.read_text("utf-8").split("<!-- example -->\n```\n")[1].split("```\n<!-- end -->")[0]
    )
    assert shown == text()
