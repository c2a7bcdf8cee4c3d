"""Learns prices while it trains: twenty hidden devices, started with attention priced wrong.

`python -m experiments.online_prices [--quick]` writes three tables. Hidden devices: passes take the
times of a device that the run does not know (`simulate.py`), where attention costs about 2 or 0.5
times its price; 60 steps planned with the prices of step 30 are compared with runs priced right and
wrong. A slow rank: prices are right and one rank takes 20% longer. Real runs: four processes train
on the CPU twice, with attention priced at half and at twice of the CPU's profile.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments.drawing import new_figure
from experiments.online_prices.simulate import (
    Case,
    Hidden,
    Learning,
    draw_hidden,
    fixed_steps,
    run_spec,
)
from experiments.results import How, Picture, Table, show, write_results
from wlb.cost import load_profile, save_profile, scaled_profile
from wlb.plan import AS_PROFILED, TERMS, FloatArray, PriceFactors
from wlb.report import read_run
from wlb.spec import RunSpec, apply, check
from wlb.train import start

STEPS, AFTER = 30, 60
RANKS, DEVICES = (8, 16, 32), ("cuda", "cpu")
WRONG = (0.5, 2.0)
LIMIT = 0.01
FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Holds a hidden device's run. learned, right, wrong: imbalance of STEPS + AFTER steps, forward
    and both passes, shape [steps, 2]. prices: attention forward's, relative, over the true one."""

    case: Case
    held: PriceFactors
    changes: int
    learned: FloatArray
    right: FloatArray
    wrong: FloatArray
    prices: FloatArray

    def mean(self, name: str) -> FloatArray:
        """Means over the steps after those in which prices were learned."""
        return getattr(self, name)[STEPS:].mean(0)


def learn(seed: int, attention: float) -> Outcome:
    """Runs one hidden device. attention: its price over the true one, about."""
    ranks, device = RANKS[seed % len(RANKS)], DEVICES[seed % len(DEVICES)]
    hidden = draw_hidden(seed, attention=1 / attention, ranks=ranks)
    case = Case(spec=run_spec(ranks=ranks), hidden=hidden, device=device)
    run = Learning(case)
    steps = list(run.steps(STEPS))
    held = steps[-1].held
    true = hidden.prices.relative["attention_forward"]
    after = fixed_steps(case, held, AFTER, state=run.state)
    learned = [(s.forward, s.both) for s in steps] + after
    return Outcome(
        case=case,
        held=held,
        changes=len({s.held for s in steps}) - 1,
        learned=np.array(learned),
        right=np.array(fixed_steps(case, hidden.prices, STEPS + AFTER)),
        wrong=np.array(fixed_steps(case, AS_PROFILED, STEPS + AFTER)),
        prices=np.array([s.held.relative["attention_forward"] / true for s in steps]),
    )


def row_of(outcome: Outcome, attention: float, seed: int) -> list[object]:
    true, held = outcome.case.hidden.prices.relative, outcome.held.relative
    errors = [held[name] / true[name] - 1 for name in TERMS if name != "linear_forward"]
    learned, right, wrong = (outcome.mean(name) for name in ("learned", "right", "wrong"))
    excess = (learned - right).tolist()
    return [
        seed,
        f"{attention:g}x",
        outcome.case.spec.parallel.world_size,
        outcome.case.device,
        outcome.changes,
        *(100 * e for e in errors),
        *(float(x[1]) for x in (wrong, learned, right)),
        excess[1],
        excess[0],
        "yes" if max(excess) <= LIMIT else "NO",
    ]


COLUMNS = (
    *("device", "priced", "ranks", "clock", "changes"),
    *("attention F off (%)", "attention B off (%)", "linear B off (%)"),
    *("wrong", "learned", "right", "excess", "excess, forward", "within 0.01"),
)


def hidden_devices(count: int) -> tuple[Table, list[Outcome]]:
    outcomes: list[Outcome] = []
    rows: list[list[object]] = []
    for attention in WRONG:
        for seed in range(count):
            outcomes.append(learn(seed, attention))
            rows.append(row_of(outcomes[-1], attention, seed))
            Console(width=160).print(*rows[-1])
    formats = dict.fromkeys(COLUMNS[5:8], "+.1f") | dict.fromkeys(COLUMNS[8:11], ".4f")
    table = Table(
        name="hidden",
        title=f"{count} hidden devices, attention priced wrong",
        columns=COLUMNS,
        rows=rows,
        formats=formats | dict.fromkeys(COLUMNS[11:13], "+.4f"),
        note=f"Imbalance (slowest over mean micro-batch, forward and backward unless it says "
        f"forward) of {AFTER} steps after {STEPS} steps of learning, by the device's own times. "
        "off: relative price learned over the true one.",
    )
    return table, outcomes


def slow_ranks(count: int) -> Table:
    """Prices are right, and one rank is slow: no price may follow it."""
    rows: list[list[object]] = []
    for seed in range(count):
        ranks, device = RANKS[seed % len(RANKS)], DEVICES[seed % len(DEVICES)]
        hidden = Hidden(prices=AS_PROFILED, slow_rank=seed % ranks, seed=seed)
        run = Learning(Case(spec=run_spec(ranks=ranks), hidden=hidden, device=device))
        held = list(run.steps(STEPS))[-1].held
        most = max(abs(factor - 1) for factor in held.relative.values())
        rows.append([seed, ranks, device, seed % ranks, len(run.schedule.changes), 100 * most])
    return Table(
        name="slow",
        title="Prices right, one rank 20% slower in everything",
        columns=("run", "ranks", "clock", "slow rank", "changes", "largest change (%)"),
        rows=rows,
        formats={"largest change (%)": ".1f"},
        note=f"Prices after {STEPS} steps, relative to linear layers forward.",
    )


def real_spec(folder: Path, profile: Path, name: str) -> RunSpec:
    """A model of 2 M parameters on CP 2 x PP 2."""
    values = {
        "run": {"name": name, "output_dir": str(folder), "device": "cpu"},
        "model": {
            "hidden_size": 128,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 4,
            "ffn_hidden_size": 256,
        },
        "parallel": {"cp": 2, "pp": 2, "dp": 1},
        "data": {
            "corpus": "stdlib",
            "bpe_vocab_size": 4096,
            "cache_dir": "runs/stores",
            "context_window": 2048,
            "num_windows": 4,
        },
        "packing": {"policy": "var_len", "s_max": 1.5, "queue_thresholds": [0.25, 0.7]},
        "training": {"steps": 40, "warmup_steps": 2},
        "eval": {"steps": 0},
        "cost": {"online": True, "profile": str(profile)},
    }
    return check(apply(RunSpec(), values, source="online_prices"))


def real_runs() -> Table:
    """Two runs of four processes, whose learned prices are compared in absolute terms."""
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        cpu = load_profile("cpu")
        for factor in WRONG:
            path = folder / f"cpu-attention-{factor:g}.json"
            one = {"linear_forward": 1.0, "linear_backward": 1.0}
            save_profile(
                path,
                scaled_profile(
                    cpu,
                    attention_forward=factor,
                    attention_backward=factor,
                    **one,
                    name=path.stem,
                    provenance=cpu.provenance,
                ),
            )
            spec = real_spec(folder, path, path.stem)
            start.train(spec, resume=None, console=Console(quiet=True))
            rows += _rows_of_run(folder / path.stem, factor)
    return Table(
        name="real",
        title="Real runs on four processes of a CPU, attention priced wrong",
        columns=("priced", "from step", *(n.replace("_", " ") for n in TERMS if n != TERMS[2])),
        rows=rows,
        formats={n.replace("_", " "): ".3f" for n in TERMS if n != TERMS[2]},
        note="Prices in force over those of the CPU's shipped profile, relative to linear layers "
        "forward, from each change on; the ranks compared the digests of all plans. Both runs are "
        "of the same model on the same machine, so they should end alike.",
    )


def _rows_of_run(folder: Path, factor: float) -> list[list[object]]:
    records = read_run(folder)
    held = [(1, AS_PROFILED), *((c.step + 1, c.prices) for c in records.prices.changes)]
    wrong = {name: factor if name.startswith("attention") else 1.0 for name in TERMS}
    return [
        [f"{factor:g}x", step, *(p.relative[n] * wrong[n] for n in TERMS if n != TERMS[2])]
        for step, p in held
        if step <= records.steps[-1].step + 1
    ]


def picture(outcomes: Sequence[Outcome]) -> Picture:
    figure, (above, below) = new_figure(height=5.4, nrows=2)
    for outcome in outcomes:
        above.step(range(1, STEPS + 1), outcome.prices, where="post", lw=0.8, alpha=0.6)
    above.axhline(1.0, color="black", lw=0.8)
    above.set(ylabel="attention's price / true", yscale="log", yticks=(0.5, 1, 2))
    above.set_yticklabels(("0.5", "1", "2"))
    above.minorticks_off()
    for name in ("wrong", "learned", "right"):
        series = np.mean([getattr(o, name)[:, 1] for o in outcomes], axis=0)
        label = name if name == "learned" else f"priced {name}"
        below.plot(range(1, series.size + 1), series, label=label)
    below.axvline(STEPS + 0.5, color="grey", ls=":", lw=1)
    below.set(ylabel="slowest / mean micro-batch", xlabel="step")
    below.legend()
    caption = (
        f"Above: attention's price over the true one in {len(outcomes)} runs. Below: imbalance of "
        f"forward and backward work by the devices' own times, mean of the runs; from step "
        f"{STEPS + 1} on (dotted) prices stay as they were learned"
    )
    return Picture(name="prices", caption=caption, figure=figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two devices; write nothing")
    options = parser.parse_args()
    count = 2 if options.quick else 20
    hidden, outcomes = hidden_devices(count)
    tables = [hidden, slow_ranks(count), real_runs()]
    show(*tables)
    if options.quick:
        return
    gains = np.array([[o.mean(n)[1] for n in ("wrong", "learned", "right")] for o in outcomes])
    excess = np.array([o.mean("learned") - o.mean("right") for o in outcomes])
    mean = gains.mean(0)
    text = (
        f"{int((excess.max(1) <= LIMIT).sum())} of {len(outcomes)} runs end within {LIMIT} of the "
        f"imbalance of the rightly priced run, forward and for both passes; the largest excess is "
        f"{excess[:, 1].max():.4f} (both passes) and {excess[:, 0].max():.4f} (forward). Mean "
        f"imbalance of both passes: {mean[0]:.4f} priced wrong, {mean[1]:.4f} learned, "
        f"{mean[2]:.4f} priced right. Model 7B, window 64K, CP 2 x PP 4, `bounded` with T 1.5 and "
        f"S_max 2; cells have 4% noise, 2% of them take five times as long, and one rank is 20% "
        f"slower. Clock: on cuda the times of linear layers hold waits for the CP group."
    )
    write_results(
        FOLDER,
        title="Prices learned while training",
        how=How.SIMULATED,
        profile=load_profile("h100"),
        text=text,
        seed=0,
        tables=tables,
        figures=[picture(outcomes)],
    )


if __name__ == "__main__":
    main()
