"""Tests a run with compiled layers: same losses, graphs reported and counted; refusals."""

from pathlib import Path

import pytest
import torch

from tests.train.case import small_spec, train, write_corpus
from wlb.parallel.compiled import refuse_uncompilable

CPU = torch.device("cpu")


@pytest.mark.full
# torch hides it while it traces, which a filter that makes errors of warnings comes before.
@pytest.mark.process
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_run_has_the_losses_of_another_and_says_its_graphs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    eager, _ = train(small_spec(tmp_path, corpus, run={"name": "eager"}, training={"steps": 3}))
    assert "of a layer" not in capsys.readouterr().out
    assert "compiled" not in {line["kind"] for line in eager.lines}
    options = {"compile": True, "compile_backend": "aot_eager", "steps": 3}
    run, _ = train(small_spec(tmp_path, corpus, run={"name": "traced"}, training=options))
    assert run.losses == pytest.approx(eager.losses, rel=1e-4)
    found = [line for line in run.lines if line["kind"] == "compiled"]
    # Evaluation came first; micro-batches of a token or none may add graphs, lengths do not.
    assert found[0] == {"kind": "compiled", "steps_done": 1, "graphs": 2, "total": 2}
    total = found[-1]["total"]
    assert total <= 4
    said = capsys.readouterr().out
    assert "compiled 2 graphs of a decoder layer by step 1, 2 in all" in said
    assert f"{total} graphs of a layer, {total} at most on a rank" in said


def test_an_unknown_backend_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    options = {"compile": True, "compile_backend": "inductr"}
    corpus = write_corpus(tmp_path / "corpus")
    with pytest.raises(
        ValueError, match=r"'inductr' must be one of the backends of torch .*aot_eager, .*inductor"
    ):
        train(small_spec(tmp_path, corpus, training=options))
    assert not (tmp_path / "runs" / "small").exists()


def test_a_missing_compiler_is_named() -> None:
    """The settings go through torch's own `patch`: pytest's monkeypatch deletes them at its end."""
    import torch._inductor.config as inductor

    settings = {"cpp.cxx": (None, "/nowhere/g++"), "force_disable_caches": True}
    with (
        inductor.patch(settings),
        pytest.raises(
            ValueError, match=r"inductor' cannot compile for cpu on this machine: .*g\+\+ and"
        ),
    ):
        refuse_uncompilable("inductor", CPU)
    assert not inductor.force_disable_caches


def test_a_backend_that_can_compile_is_accepted() -> None:
    refuse_uncompilable("aot_eager", CPU)
