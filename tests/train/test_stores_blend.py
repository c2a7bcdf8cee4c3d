"""Tests training on a blend of stores: what it says, resuming, refusals before a rank starts."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.train.case import small_spec, train, write_store
from wlb.data import TokenStoreWriter
from wlb.train import dry_run

pytestmark = pytest.mark.dist


@pytest.fixture
def blend(tmp_path: Path) -> list[str]:
    one = write_store(tmp_path / "one", [20, 35, 50, 90] * 5)
    two = write_store(tmp_path / "two", [15, 70, 30])
    return [f"{one}:3", f"{two}:1"]


@pytest.mark.full
def test_a_run_on_a_blend_resumes_to_the_same_losses(tmp_path: Path, blend: list[str]) -> None:
    held = write_store(tmp_path / "held", [40] * 6)
    data = {"blend": blend, "heldout_store": held}
    spec = small_spec(tmp_path, tmp_path, data=data, checkpoint={"interval": 3})
    straight, said = train(spec)
    corpus = f"corpus: 23 documents, 1,090 tokens; {tmp_path}/one 75.0%, {tmp_path}/two 25.0%"
    assert corpus in " ".join(said.split())  # long paths wrap
    assert len(straight.losses) == 6
    assert len(straight.evaluations) == 2
    first = {"run": {"name": "short"}, "training": {"steps": 3}}
    train(small_spec(tmp_path, tmp_path, data=data, **first))
    again = {"run": {"name": "short"}, "training": {"steps": 6}}
    resumed, _ = train(small_spec(tmp_path, tmp_path, data=data, **again), resume=True)
    tokens = [line["measured"]["num_tokens"] for line in straight.steps]
    assert [line["measured"]["num_tokens"] for line in resumed.steps][-3:] == tokens[-3:]
    other = {**data, "blend": [blend[0], blend[1].replace(":1", ":2")]}
    changed = small_spec(tmp_path, tmp_path, data=other, run={"name": "short"})
    with pytest.raises(ValueError, match=r"weights = \[3.0, 1.0\], but this run has \[3.0, 2.0\]"):
        train(changed, resume=True)


def dry(tmp_path: Path, **sections: dict[str, object]) -> str:
    console = Console(file=StringIO(), width=200)
    dry_run.show(small_spec(tmp_path, tmp_path, **sections), console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_what_is_refused_names_the_store(tmp_path: Path, blend: list[str]) -> None:
    assert "one 75.0%" in dry(tmp_path, data={"blend": blend})
    with pytest.raises(
        ValueError,
        match=(
            r"smaller than the vocabulary of "
            r".*one, .*two, which has 320"
        ),
    ):
        dry(tmp_path, data={"blend": blend}, model={"vocab_size": 300})
    with pytest.raises(ValueError, match=r"no token store at .*gone"):
        dry(tmp_path, data={"blend": [blend[0], f"{tmp_path}/gone:1"]})
    with TokenStoreWriter(tmp_path / "other", vocab_size=300) as writer:
        writer.add([1, 2, 3])
    with pytest.raises(ValueError, match=r"different tokenizers \(vocab_size 320 and 300\)"):
        dry(tmp_path, data={"blend": [blend[0], f"{tmp_path}/other:1"]})
