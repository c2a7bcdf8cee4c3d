"""Parts of gpu_hour that pass or fail: the machine, the kernels, and resuming a killed run."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

from experiments.gpu_hour.runs import EIGHT_GPUS, balanced, restarted, trainings
from experiments.gpu_hour.setting import ROOT, Answer, Setting, Verdict, emptied_runs, python
from wlb.report.run.records import read_run

GPU_TESTS = ("tests/gpu", "tests/kernels", "tests/profile")
CPU_TESTS = ("tests/kernels/test_op_attend.py", "-k", "sdpa and float32 and cpu")
KILLED_AT = 5
"""Number of steps in the run's metrics after which it is killed."""


def doctor(setting: Setting) -> Answer:
    """Runs `wlb doctor` for one of the training runs; on eight GPUs, for the run on all eight."""
    folder = setting.of("doctor")
    examined = balanced(setting) if setting.gpus == EIGHT_GPUS else trainings(setting)[0]
    run = examined.write(setting, folder=folder)
    found = folder / "doctor.json"
    quick = ["--quick"] if setting.quick else []
    found.unlink(missing_ok=True)
    python("-m", "wlb", "doctor", str(run), *quick, "--json", str(found), check=False)
    findings = json.loads(found.read_text("utf-8"))
    answer = Answer(figures={"findings": findings})
    count = findings["counts"]
    said = f"{count['pass']} pass, {count['warn']} warn, {count['fail']} fail"
    verdict = Verdict.FAILED if count["fail"] else Verdict.HOLDS
    answer.claim("the machine can run this (doctor)", "0 fail", said, verdict)
    return answer


def kernels(setting: Setting) -> Answer:
    """Runs the tests that need a GPU.

    They compare kernels with a float64 reference, and parallel layouts with one process.
    """
    tests = ["-m", "gpu", *GPU_TESTS] if setting.device == "cuda" else list(CPU_TESTS)
    return tested(setting, tests)


def tested(setting: Setting, tests: list[str]) -> Answer:
    """Runs pytest with these arguments and returns how many tests passed and failed."""
    report = setting.of("kernels") / "junit.xml"
    report.unlink(missing_ok=True)
    # pyproject.toml turns warnings into errors, and pytest-benchmark warns about xdist: disable it.
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:benchmark", "--durations=8"]
    python("-m", "pytest", *tests, *options, f"--junitxml={report}", check=False)
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    bad = count["failures"] + count["errors"]
    passed = count["tests"] - bad - count["skipped"]
    broken = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    answer = Answer(figures={**count, "passed": passed, "broken": broken})
    verdict = Verdict.FAILED if bad or not passed else Verdict.HOLDS
    said = f"{passed} pass, {bad} fail, {count['skipped']} skipped"
    answer.claim(
        "kernels equal their definition, layouts equal one process", "0 fail", said, verdict
    )
    return answer


def restart(setting: Setting) -> Answer:
    """Checks that a run which is killed (SIGKILL) and resumed has the losses of a whole run."""
    folder = setting.of("restart")
    run = restarted(setting)
    whole = run.write(setting, folder=emptied_runs(folder / "whole"))
    broken = run.write(setting, folder=emptied_runs(folder / "killed"))
    python("-m", "wlb", "train", str(whole))
    killed_after = _killed(broken, folder / "killed" / "runs" / run.name / "metrics.jsonl")
    python("-m", "wlb", "train", str(broken), "--resume", "auto")
    losses: list[dict[int, float]] = []
    for name in ("whole", "killed"):
        trained = read_run(folder / name / "runs" / run.name).steps
        # The steps between the checkpoint and the kill were trained twice. The second time counts.
        losses.append({step.step: step.measured.loss for step in trained})
    differ = [step for step, loss in losses[0].items() if losses[1].get(step) != loss]
    answer = Answer(
        figures={
            "killed_after": killed_after,
            "differ": differ,
            "whole": losses[0],
            "killed": losses[1],
        }
    )
    said = "all equal" if not differ else f"steps {differ} differ"
    verdict = Verdict.HOLDS if losses[0] and not differ else Verdict.FAILED
    claim = f"killed after step {killed_after} and resumed, the losses are those of a whole run"
    answer.claim(claim, "equal to the last bit", said, verdict)
    return answer


def _killed(run: Path, metrics: Path) -> int:
    """Starts a run, kills it after at least KILLED_AT steps, and returns the steps that it made.

    Raises:
        RuntimeError: If the run ended before it was killed.
    """
    command = [sys.executable, "-m", "wlb", "train", str(run)]
    print("+", *command[1:], flush=True)
    process = subprocess.Popen(command, cwd=ROOT)
    done = 0
    while process.poll() is None and done < KILLED_AT:
        time.sleep(0.02)
        done = metrics.read_text("utf-8").count('"kind": "step"') if metrics.exists() else 0
    # Killing the launcher is enough: its ranks end with it.
    process.kill()
    if (status := process.wait()) != -signal.SIGKILL:
        raise RuntimeError(
            f"the run ended with exit status {status} after {done} steps, before it was killed"
        )
    return done
