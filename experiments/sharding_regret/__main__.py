"""Measures how much is lost by choosing the sharding of a micro-batch by prediction.

`python -m experiments.sharding_regret [--quick]` takes micro-batches of the fitted stream, scaled
down to CPU size. The attention of every rank under every strategy is timed in turn (SDPA, one
thread, thread CPU time; slowest rank forward plus slowest rank backward, medians over rounds that
take the strategies in turn). The optimum is chosen on the odd rounds and scored, like everything
else, on the even rounds. Choices are predicted by prices fitted to other micro-batches (`fit`).
"""

import argparse
import datetime
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from scipy.optimize import nnls

from experiments.paper.fig15.case import STATIC, micro_batches
from experiments.paper.fig15.rank_times import Layout, slowest_ns, times_ns
from experiments.harness.pages import commit
from wlb.cost import (
    FlopsWorkload,
    ProfiledWorkload,
    WorkloadModel,
    attention_latency,
    causal_pairs,
    load_profile,
)
from wlb.plan import IntArray, IntLike
from wlb.sharding import adaptive, per_document, per_sequence, shard
from wlb.spec import ModelSpec, ParallelSpec

RESULTS = Path(__file__).parent / "results"
HEADS, HEAD_DIM = 2, 16
LAYOUT = Layout(
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
    dtype=torch.float32,
    device=torch.device("cpu"),
    backend="sdpa",
)
MEASURED = (*STATIC, "hybrid", "balanced")
WINDOW = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Describes micro-batches of 64K tokens with lengths divided by `shrink`, over `cp` ranks."""

    cp: int
    shrink: int

    @property
    def tokens(self) -> int:
        return WINDOW // self.shrink


SETTINGS = (
    Setting(cp=2, shrink=16),
    Setting(cp=4, shrink=8),
    Setting(cp=4, shrink=16),
    Setting(cp=8, shrink=8),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Holds the times of one micro-batch.

    adaptive: index of the plan that adaptive chose, by who predicted
    predicted: ns of each plan, by who predicted
    chosen, scored: measured ns by strategy, of the odd and of the even rounds
    """

    adaptive: dict[str, int]
    predicted: dict[str, np.ndarray]
    chosen: np.ndarray
    scored: np.ndarray

    @property
    def taken(self) -> dict[str, float]:
        """Returns the scored ns of everything that is compared."""
        out = {name: float(self.scored[i]) for i, name in enumerate(MEASURED)}
        for who, choice in self.adaptive.items():
            out[f"adaptive ({who})"] = float(self.scored[choice])
        out["optimum of two"] = float(self.scored[int(self.chosen[:2].argmin())])
        out["optimum of all"] = float(self.scored[int(self.chosen.argmin())])
        return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted(FlopsWorkload):
    """Predicts attention with fitted prices.

    forward, backward: ns of a call, segment, query row, key and query-key pair, shape [5]
    """

    forward: np.ndarray
    backward: np.ndarray

    def segment_times_ns(self, q: IntLike, kv: IntLike) -> tuple[IntArray, IntArray]:
        rows, keys = np.asarray(q, np.int64), np.asarray(kv, np.int64)
        columns = np.stack([rows > 0, rows, keys, causal_pairs(rows, keys)], 1)
        forward, backward = (np.rint(columns @ x[1:]) for x in (self.forward, self.backward))
        return forward.astype(np.int64), backward.astype(np.int64)

    def attention_call_ns(
        self, q: IntLike, kv: IntLike, offsets: IntArray
    ) -> tuple[IntArray, IntArray]:
        forward, backward = (
            np.full(offsets.size - 1, round(float(x[0]))) for x in (self.forward, self.backward)
        )
        return forward, backward


def fit(lengths: list[IntArray], rounds: int) -> Fitted:
    """Fits prices to the times of every rank under both static strategies, by relative errors.

    Prices are those of a call, a segment, a query row, a key and a query-key pair, forward and
    backward apart (non-negative least squares). The shipped `cpu` profile is shown beside them
    ("profile"): it was measured on longer segments, and at this scale SDPA's gathering and padding,
    which it does not know, is a large part of the time.
    """
    features: list[list[float]] = []
    took: list[np.ndarray] = []
    for setting in SETTINGS:
        for pieces in lengths:
            cut = shrunk(pieces, setting.shrink)
            plans = [f(cut, cp=setting.cp) for f in (per_sequence, per_document)]
            times = np.median(times_ns(plans, LAYOUT, rounds=rounds), axis=0)
            for plan, of_plan in zip(plans, times, strict=True):
                for rank in range(setting.cp):
                    spans = plan.for_rank(rank)
                    q, kv = spans.stop - spans.start, spans.stop
                    sums = (q.size, q.sum(), kv.sum(), causal_pairs(q, kv).sum())
                    features.append([1.0, *(float(x) for x in sums)])
                    took.append(of_plan[:, rank])
    a, b = np.array(features), np.array(took)
    forward, backward = (nnls(a / b[:, i : i + 1], np.ones(len(a)))[0] for i in range(2))
    return Fitted(forward=forward, backward=backward)


def cost_of(cp: int) -> ProfiledWorkload:
    model = ModelSpec(
        hidden_size=HEADS * HEAD_DIM,
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        ffn_hidden_size=HEADS * HEAD_DIM,
    )
    return ProfiledWorkload(
        model=model,
        parallel=ParallelSpec(tp=1, cp=cp, pp=1),
        profile=load_profile("cpu"),
        micro_batch_tokens=WINDOW // 8,
    )


def shrunk(lengths: IntArray, factor: int) -> IntArray:
    return np.maximum(1, np.rint(lengths / factor)).astype(np.int64)


def measure(lengths: IntArray, cp: int, costs: dict[str, WorkloadModel], rounds: int) -> Case:
    """Times one micro-batch under every strategy.

    costs: workload models by which adaptive chooses, by name; hybrid and balanced choose by "fit"
    """
    plans = [shard(lengths, cp=cp, strategy=name, cost=costs["fit"]) for name in MEASURED]
    times = times_ns(plans, LAYOUT, rounds=rounds)
    return Case(
        adaptive={
            who: MEASURED.index(adaptive(lengths, cp=cp, cost=cost).strategy)
            for who, cost in costs.items()
        },
        predicted={
            who: np.array([attention_latency(p, cost).slowest_kernels_ns for p in plans])
            for who, cost in costs.items()
        },
        chosen=slowest_ns(times[0::2]).sum(1),
        scored=slowest_ns(times[1::2]).sum(1),
    )


def table(title: str, cases: list[Case]) -> list[str]:
    """Returns the regret of every strategy and choice: its time over the optimum's, minus 1.

    Times are summed over micro-batches. The "optimum of two" knows per_sequence and per_document
    (the paper's), that "of all" hybrid and balanced as well. The optimum's own choice suffers from
    noise, so a regret is a little too small and may be negative, but by no more than the noise
    floor: the gain of the optimum if it were chosen on the rounds it is scored on. How far the two
    halves of the rounds differ is printed too.
    """
    taken = [case.taken for case in cases]
    total = {name: sum(t[name] for t in taken) for name in taken[0]}
    lines = [
        f"### {title}: {len(cases)} micro-batches",
        "",
        "| | CPU ms a micro-batch | regret to optimum of two | to optimum of all | per case, "
        "median / p95 |",
        "|---|---|---|---|---|",
    ]
    for name in total:
        each = np.array([t[name] / t["optimum of all"] - 1 for t in taken])
        lines.append(
            f"| {name} | {total[name] / len(cases) / 1e6:.2f} | "
            f"{100 * (total[name] / total['optimum of two'] - 1):+.2f}% | "
            f"{100 * (total[name] / total['optimum of all'] - 1):+.2f}% | "
            f"{100 * np.median(each):+.2f}% / {100 * np.percentile(each, 95):+.2f}% |"
        )
    return [*lines, "", *facts(cases, total), ""]


def facts(cases: list[Case], total: dict[str, float]) -> list[str]:
    both = np.array([c.chosen[:2] + c.scored[:2] for c in cases])
    wins = 100 * float((both[:, 1] < both[:, 0]).mean())
    hindsight = {n: sum(float(c.scored[:n].min()) for c in cases) for n in (2, len(MEASURED))}
    gained = [
        100 * (total[name] / hindsight[n] - 1)
        for name, n in (("optimum of two", 2), ("optimum of all", len(MEASURED)))
    ]
    spread = 100 * np.median([np.abs(c.chosen / c.scored - 1) for c in cases])
    lines = [
        f"- per_document is measured faster than per_sequence in {wins:.0f}% of them.",
        f"- Noise floor: chosen on the very rounds it is scored on, the optimum would be "
        f"{gained[0]:.2f}% (two), {gained[1]:.2f}% (all) faster; the halves of the rounds differ "
        f"by {spread:.1f}% (median).",
    ]
    for who in cases[0].adaptive:
        pairs = zip(cases, both, strict=True)
        agree = 100 * np.mean([c.adaptive[who] == int(b.argmin()) for c, b in pairs])
        ratio = np.array([c.predicted[who] / (c.chosen + c.scored) * 2 for c in cases])
        error = 100 * np.abs(ratio / np.median(ratio) - 1).mean()
        lines.append(
            f"- {who}: picks the faster of the two in {agree:.0f}%; predicted over measured time "
            f"{np.median(ratio):.2f} (median), {error:.0f}% mean error around that."
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="5 micro-batches per setting, and write nothing"
    )
    parser.add_argument("--count", type=int, default=52, help="micro-batches per setting")
    parser.add_argument(
        "--fitted", type=int, default=6, help="other micro-batches per setting, to fit prices"
    )
    parser.add_argument("--rounds", type=int, default=8, help="rounds of timing, a multiple of 8")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = 5 if options.quick else options.count
    console = Console(width=160)
    others = micro_batches("original", window=WINDOW, count=options.fitted, seed=options.seed + 1)
    fitted = fit(others, options.rounds)
    windows = micro_batches("original", window=WINDOW, count=count, seed=options.seed)
    cases: list[Case] = []
    lines: list[str] = []
    for setting in SETTINGS:
        costs: dict[str, WorkloadModel] = {"fit": fitted, "profile": cost_of(setting.cp)}
        made = [
            measure(shrunk(lengths, setting.shrink), setting.cp, costs, options.rounds)
            for lengths in windows
        ]
        found = table(f"CP {setting.cp}, {setting.tokens:,} tokens", made)
        console.print("\n".join(found), markup=False, highlight=False)
        lines += found
        cases += made
    prices = "; ".join(
        f"{name} " + " / ".join(f"{x:.3g}" for x in values)
        for name, values in (("forward", fitted.forward), ("backward", fitted.backward))
    )
    head = [
        "# Regret against the measured optimum",
        f"`python -m experiments.sharding_regret`, {datetime.date.today()}, commit {commit()}, "
        f"seed {options.seed}, {options.rounds} rounds. SDPA on one CPU thread, {HEADS} heads of "
        f"{HEAD_DIM}, float32; thread CPU time, slowest rank forward + slowest rank backward.",
        "",
        f"Fitted prices in ns (call / segment / query row / key / pair), from {options.fitted} "
        f"other micro-batches a setting: {prices}.",
        "",
    ]
    all_cases = table("All", cases)
    console.print("\n".join([*head, *all_cases]), markup=False, highlight=False)
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        text = "\n".join([*head, *all_cases, *lines])
        (RESULTS / "README.md").write_text(text.rstrip() + "\n", "utf-8")


if __name__ == "__main__":
    main()
