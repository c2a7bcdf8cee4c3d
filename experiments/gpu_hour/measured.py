"""Parts of gpu_hour that measure: kernel prices, Figure 15, step times, memory, speed-ups.

Each part returns an `Answer` with measured numbers beside claimed or predicted ones.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.gpu_hour.runs import WARM_UP_STEPS, TrainingRun, balanced
from experiments.gpu_hour.setting import Answer, Setting, Verdict, emptied_runs, python
from wlb.report.run.records import read_run
from wlb.validation.recorded import simulate_recorded

GIB = 1 << 30
# Relative errors up to which a claim holds.
PROFILE_ERROR = 0.10
"""Mean error of a profile on attention calls that it was not fitted to."""
STEP_ERROR = 0.10
MEMORY_ERROR = 0.10
SPEEDUP_ERROR = 0.05
COMPARED = ("plain_4d", "paper", "wlb")
"""Systems that are compared. The first is the baseline."""


def profile(setting: Setting) -> Answer:
    """Runs `wlb profile` and checks its errors on attention calls that it was not fitted to.

    With eight GPUs the profile includes collectives.
    """
    setting.of("profile")
    setting.profile.unlink(missing_ok=True)
    quick = ["--quick"] if setting.quick else []
    options = ["--device", setting.device, "--out", str(setting.profile), "--no-plots", *quick]
    ranks = ["--standalone", "--nproc-per-node", str(setting.gpus)]
    launcher = ["-m", "torch.distributed.run", *ranks] if setting.gpus > 1 else []
    python(*launcher, "-m", "wlb", "profile", *options)
    made = json.loads(setting.profile.read_text("utf-8"))
    answer = Answer(figures={"profile": made})
    for table in made["attention"]:
        residuals = table["provenance"]["residuals"]
        name = f"{table['backends'][0]}, {table['num_heads']} heads of {table['head_dim']}"
        error = residuals["held_batch_total_mape"]
        verdict = Verdict.HOLDS if error <= PROFILE_ERROR else Verdict.DIFFERS
        claim = f"attention's price on unseen packed calls ({name})"
        answer.claim(claim, f"error below {PROFILE_ERROR:.0%}", f"{error:.1%}", verdict)
    return answer


def sharding(setting: Setting) -> Answer:
    """Measures Figure 15, attention under each CP sharding, beside its prediction."""
    out = setting.of("sharding") / "sharding.json"
    quick = ["--quick"] if setting.quick or setting.device == "cpu" else ["--count", "24"]
    known = ["--profile", str(setting.profile)] if _has_gpu_profile(setting) else []
    command = ["--device", setting.device, "--out", str(out), *quick, *known]
    python("-m", "experiments.paper.fig15", *command)
    found = json.loads(out.read_text("utf-8"))
    answer = Answer(figures=found)
    for window, rows in found["windows"].items():
        total = {name: sum(ms) for name, ms in rows["ms"].items()}
        expected = rows["predicted_ms"]
        for name in ("per_document", "balanced"):
            claim = f"Figure 15, window {int(window):,}: {name} over per_sequence"
            answer.within(
                claim,
                expected["per_sequence"] / expected[name],
                total["per_sequence"] / total[name],
                share=STEP_ERROR,
                unit="x",
            )
        best = min(total[name] for name in ("per_sequence", "per_document"))
        verdict = Verdict.HOLDS if total["adaptive"] <= 1.02 * best else Verdict.DIFFERS
        claim = f"Figure 15, window {int(window):,}: adaptive over the better static sharding"
        answer.claim(claim, "at most 2% slower", f"{total['adaptive'] / best - 1:+.1%}", verdict)
    return answer


def _has_gpu_profile(setting: Setting) -> bool:
    return setting.device == "cuda" and setting.profile.exists()


def steps(setting: Setting, run: TrainingRun) -> Answer:
    """Trains a run and compares its step times and peak memory with their predictions."""
    answer = Answer()
    folder = setting.of(f"steps_{run.name}")
    python("-m", "wlb", "train", str(run.write(setting, folder=emptied_runs(folder))))
    profiles = {"": "the shipped profile"}
    if setting.profile.exists():
        profiles[str(setting.profile)] = "the measured profile"
    found = compared(folder / "runs" / run.name, profiles)
    answer.figures = found
    for name, priced in found["profiles"].items():
        claim = f"{run.name}: time of a step, priced by {name}"
        answer.within(claim, priced["simulated_s"], found["measured_s"], share=STEP_ERROR, unit="s")
    if setting.device == "cuda":
        claim = f"{run.name}: peak memory, estimated"
        estimate, peak = found["estimated_gib"], found["peak_gib"]
        answer.within(claim, estimate, peak, share=MEMORY_ERROR, unit="GiB")
    return answer


def compared(folder: Path, profiles: Mapping[str, str]) -> dict[str, Any]:
    """Returns times of a finished run's steps after warm-up, measured and simulated.

    Args:
        folder: The run's output folder.
        profiles: Kernel profiles to simulate with: their names or paths, each with the name of its
            results. The path "" stands for the profile in the run's configuration.
    """
    out: dict[str, Any] = {"profiles": {}}
    # Measured values are the same for every profile; the last one sets them.
    for path, name in profiles.items():
        recorded = simulate_recorded(folder, profile=path)
        out["profiles"][name] = {
            "simulated_s": float(recorded.simulated_s.mean()),
            "simulated_steps_s": recorded.simulated_s.tolist(),
            "ratio": recorded.ratio,
            "mape": recorded.mape,
            "correlation": recorded.correlation,
        }
        out["measured_s"] = float(recorded.measured_s.mean())
        out["measured_steps_s"] = recorded.measured_s.tolist()
        out["tokens_per_s"] = recorded.tokens_per_s
        out["estimated_gib"] = recorded.estimated_bytes / GIB
        if recorded.peak_bytes is not None:
            out["peak_gib"] = recorded.peak_bytes / GIB
    return out


def memory(setting: Setting, *, run: TrainingRun) -> Answer:
    """Rehearses a run on a fake GPU and compares its peak memory with the measured one.

    The part `steps` must have trained the run before.
    """
    answer, folder = Answer(), setting.of(f"memory_{run.name}")
    found = folder / "rehearsed.json"
    found.unlink(missing_ok=True)
    toml = run.write(setting, folder=folder)
    # A rehearsal replaces the GPU by a fake one, so the real one must be hidden from it.
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    python("-m", "wlb", "rehearse", str(toml), "--steps", "2", "--json", str(found), env=hidden)
    ranks = json.loads(found.read_text("utf-8"))["ranks"]
    rehearsed = max(rank["peak_bytes"] for rank in ranks) / GIB
    metrics = setting.folder / f"steps_{run.name}" / "runs" / run.name
    measured = compared(metrics, {"": "the shipped profile"})
    answer.figures = {"rehearsed_gib": rehearsed, "peak_gib": measured["peak_gib"]}
    claim = f"{run.name}: peak memory, rehearsed on a fake GPU"
    answer.within(claim, rehearsed, measured["peak_gib"], share=MEMORY_ERROR, unit="GiB")
    return answer


EXCHANGES = {
    "gather": ("sharding.exchange=gather",),
    "by_need": ("sharding.exchange=needed",),
    "by_need_overlapped": ("sharding.exchange=needed", "cp.overlap_stages=1"),
}
"""Settings of the exchange of keys between CP ranks, by the name of the run that uses them."""


def exchange(setting: Setting) -> Answer:
    """Trains our system with each exchange of keys and compares speed-ups with the simulation."""
    run, folder = balanced(setting), setting.of("exchange")
    toml = run.write(setting, folder=emptied_runs(folder))
    known = [f"cost.profile={setting.profile}"] if setting.profile.exists() else []
    measured: dict[str, float] = {}
    simulated: dict[str, float] = {}
    for way, keys in EXCHANGES.items():
        named = ["--system", "wlb", "--set", f"run.name={way}", *keys]
        python("-m", "wlb", "train", str(toml), *named)
        measured[way] = tokens_per_s(folder / "runs" / way)
        found = folder / f"{way}.json"
        # --systems without names simulates only the run itself, with this exchange.
        options = ["--systems", "--steps", str(run.steps), "--json", str(found), "--set", *keys]
        python("-m", "wlb", "simulate", str(toml), *options, *known)
        (row,) = json.loads(found.read_text("utf-8"))["runs"]
        simulated[way] = row["tokens_per_s"]
    answer = Answer(figures={"tokens_per_s": measured, "simulated_tokens_per_s": simulated})
    for way in list(EXCHANGES)[1:]:
        answer.within(
            f"{way} over gather, tokens per second",
            simulated[way] / simulated["gather"],
            measured[way] / measured["gather"],
            share=SPEEDUP_ERROR,
            unit="x",
        )
    return answer


SMALL_LAYERS = (
    *("model.hidden_size=64", "model.num_heads=32", "model.num_kv_heads=32"),
    *("model.ffn_hidden_size=64", "data.context_window=512", "data.row_multiple=16"),
)
"""Settings that make `layers` small enough to be tried on a CPU."""


def layers(setting: Setting) -> Answer:
    """Runs `experiments.gpu_hour.layers` and compares speed-ups with their predictions."""
    out = setting.of("layers") / "layers.json"
    command = ["--device", setting.device, "--out", str(out)]
    if setting.device == "cpu":
        command += ["--steps", "1", "--rounds", "1", "--set", *SMALL_LAYERS]
    elif setting.quick:
        command += ["--steps", "4", "--rounds", "1"]
    python("-m", "experiments.gpu_hour.layers", *command)
    found = json.loads(out.read_text("utf-8"))
    answer = Answer(figures=found)
    for config, systems in found["configs"].items():
        plain = systems[COMPARED[0]]
        for system in COMPARED[1:]:
            made = systems[system]
            answer.within(
                f"{config}, {system} over Plain-4D, every rank's layers measured",
                plain["predicted_s"] / made["predicted_s"],
                plain["measured_s"] / made["measured_s"],
                share=SPEEDUP_ERROR,
                unit="x",
            )
    return answer


def balance(setting: Setting) -> Answer:
    """Trains Plain-4D, the paper's system and ours and compares speed-ups with the simulation."""
    run, folder = balanced(setting), setting.of("balance")
    toml = run.write(setting, folder=emptied_runs(folder))
    simulated = folder / "simulated.json"
    speeds: dict[str, float] = {}
    for system in COMPARED:
        named = ["--system", system, "--set", f"run.name={system}"]
        python("-m", "wlb", "train", str(toml), *named)
        speeds[system] = tokens_per_s(folder / "runs" / system)
    known = f"cost.profile={setting.profile}"
    options = ["--set", known] if setting.profile.exists() else []
    compare = ["--systems", *COMPARED, "--json", str(simulated), "--steps", str(run.steps)]
    python("-m", "wlb", "simulate", str(toml), *compare, *options)
    found = json.loads(simulated.read_text("utf-8"))
    answer = Answer(figures={"tokens_per_s": speeds, "simulated": found})
    rows = {row["label"]: row for row in found["runs"]}
    for system in COMPARED[1:]:
        answer.within(
            f"{system} over Plain-4D, tokens per second",
            rows[system]["tokens_per_s"] / rows[COMPARED[0]]["tokens_per_s"],
            speeds[system] / speeds[COMPARED[0]],
            share=SPEEDUP_ERROR,
            unit="x",
        )
    return answer


def tokens_per_s(folder: Path) -> float:
    """Returns the measured throughput of a run's steps after warm-up."""
    steps = [step.measured for step in read_run(folder).steps][WARM_UP_STEPS:]
    return sum(m.num_tokens for m in steps) / sum(m.step_time_s or 0.0 for m in steps)
