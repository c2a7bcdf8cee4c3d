"""A run's totals, and what its page says in words."""

from dataclasses import dataclass, field

from wlb.plan import TERMS, MeasuredStep, Moments, StepMetrics, Straggler, Work
from wlb.report.run.records import RunRecords
from wlb.report.simulation.tables import layout_text

LAST_STEPS = 5


@dataclass(slots=True)
class Totals:
    """Sums over the steps of a run; slowest_ns and the like: (slowest, mean) micro-batch."""

    tokens: int = 0
    padding: int = 0
    time_s: float = 0.0
    delays: float = 0.0
    max_delay: int = 0
    losses: list[float] = field(default_factory=list[float])
    ours_ns: tuple[float, float] = (0.0, 0.0)
    plain_ns: tuple[float, float] = (0.0, 0.0)
    measured_ns: tuple[float, float] = (0.0, 0.0)
    terms: dict[str, Moments] = field(default_factory=dict[str, Moments])
    work: Work = field(default_factory=Work)

    @classmethod
    def of(cls, records: RunRecords) -> "Totals":
        made = cls()
        for step in records.steps:
            made._add(step.measured)
            made.ours_ns = _plus(made.ours_ns, step.predicted)
            if step.plain is not None:
                made.plain_ns = _plus(made.plain_ns, step.plain)
        for _, record in records.telemetry:
            slowest, mean = made.measured_ns
            made.work += record.work or Work()
            made.measured_ns = (slowest + record.slowest_ns, mean + record.mean_ns)
            for name, moments in record.terms:
                made.terms[name] = made.terms.get(name, Moments()) + moments
        return made

    def _add(self, measured: MeasuredStep) -> None:
        self.tokens += measured.num_tokens
        self.padding += measured.num_padding_tokens
        self.time_s += measured.step_time_s or 0.0
        self.delays += measured.mean_delay * measured.num_tokens
        self.max_delay = max(self.max_delay, measured.max_delay)
        if measured.loss is not None:
            self.losses.append(measured.loss)

    @property
    def padding_share(self) -> float:
        return self.padding / max(1, self.tokens)

    @property
    def mean_delay(self) -> float:
        return self.delays / max(1, self.tokens)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.time_s if self.time_s else 0.0


def _plus(sums: tuple[float, float], metrics: StepMetrics) -> tuple[float, float]:
    return sums[0] + metrics.max_workload_ns, sums[1] + metrics.mean_workload_ns


def degree(sums: tuple[float, float]) -> float:
    """Time-weighted imbalance."""
    return sums[0] / sums[1] if sums[1] else 1.0


def lead_lines(records: RunRecords, totals: Totals) -> list[str]:
    spec, done = records.spec, int(records.steps_done[-1])
    device = records.starts[-1].get("device") if records.starts else None
    layout = layout_text(spec).replace("GPUs", "GPUs" if device == "cuda" else "ranks")
    lines = [
        f"{spec.model.num_parameters / 1e6:,.1f}M parameters; {layout}"
        + (f"; on {device}." if device else ".")
    ]
    state = "ended" if done >= spec.training.steps else "so far"
    words = f"{done} of {spec.training.steps} steps {state}, {totals.tokens:,} tokens"
    if records.num_restarts:
        times = "once" if records.num_restarts == 1 else f"{records.num_restarts} times"
        words += f"; resumed {times}"
        if records.num_replaced:
            words += f", {records.num_replaced} steps that were trained again count once"
    lines.append(f"{words}.")
    if records.num_unreadable:
        lines.append(
            f"{records.num_unreadable} lines of metrics.jsonl were cut off and are left out."
        )
    return lines


def tiles(records: RunRecords, totals: Totals) -> list[tuple[str, str, str]]:
    """Name, value and a remark of the figures on top."""
    shown: list[tuple[str, str, str]] = []
    if totals.losses:
        last = totals.losses[-LAST_STEPS:]
        mean = sum(last) / len(last)
        note = f"mean of the last {len(last)} steps; first {totals.losses[0]:.3f}"
        shown.append(("training loss", f"{mean:.3f}", note))
    if records.evaluations:
        (_, first), (at, value) = records.evaluations[0], records.evaluations[-1]
        shown.append(("held-out loss", f"{value:.3f}", f"after {at} steps; first {first:.3f}"))
    shown.append(("tokens/s", f"{totals.tokens_per_s:,.0f}", f"{totals.time_s:,.1f} s of steps"))
    if totals.work.rank_s:
        shown.append(_work_tile(totals.work))
    ours = degree(totals.ours_ns)
    if totals.plain_ns[1]:
        plain = degree(totals.plain_ns)
        shown.append(("imbalance, Plain-4D", f"{plain:.3f}", "predicted, time-weighted"))
        note = f"predicted; {plain / ours:.2f}x better balance"
    else:
        note = "predicted, time-weighted"
    shown.append(("imbalance, ours", f"{ours:.3f}", note))
    if totals.measured_ns[1]:
        value = degree(totals.measured_ns)
        shown.append(("imbalance, measured", f"{value:.3f}", "forward, time-weighted"))
    if totals.terms:
        predicted, measured = (
            sum(getattr(totals.terms[name], key) for name in TERMS)
            for key in ("predicted_s", "measured_s")
        )
        if predicted:
            shown.append(("measured / predicted", f"{measured / predicted:.2f}", "all four terms"))
    late = f"{totals.max_delay} at most"
    shown.append(("mean token delay", f"{totals.mean_delay:.2f}", f"steps; {late}"))
    if records.tables:
        named = len(_named(records))
        shown.append(("stragglers", str(named), f"of {records.spec.parallel.world_size} ranks"))
    return shown


def _work_tile(work: Work) -> tuple[str, str, str]:
    tflops = f"{work.tflops:.3g}"
    if work.mfu is None or work.window_mfu is None:
        note = f"of documents; as full windows {work.window_tflops:.3g}"
        return "model TFLOP/s a rank", tflops, note
    note = f"{tflops} TFLOP/s a rank, of documents; as full windows {work.window_mfu:.1%}"
    return "MFU", f"{work.mfu:.1%}", note


def straggler_words(records: RunRecords) -> str:
    """The rule, and whether it found any."""
    telemetry = records.spec.telemetry
    rule = (
        f"A straggler is a rank whose measured over predicted time is more than "
        f"{telemetry.straggler_threshold:.0%} over the median rank's in "
        f"{telemetry.straggler_records} tables in a row, of {telemetry.ranks_interval} steps each."
    )
    if not records.tables:
        return f"{rule} No table of ranks was recorded."
    found = _named(records)
    if found:
        return f"{rule} Found: {len(found)}."
    worst = max(float(t.over_median.max()) for t in records.tables)
    return (
        f"{rule} None was found in {len(records.tables)} tables; the slowest rank of any was "
        f"{worst - 1:.1%} over the median."
    )


def straggler_rows(records: RunRecords) -> list[tuple[str, ...]]:
    return [
        (
            str(s.rank),
            s.host,
            *(str(n) for n in (s.node, s.tp, s.cp, s.pp, s.dp)),
            f"{s.over:.2f}x",
            str(first),
            str(last),
        )
        for s, first, last in _named(records)
    ]


def _named(records: RunRecords) -> list[tuple[Straggler, int, int]]:
    """Ranks that were ever named, as when they were slowest, first and last step; worst first."""
    found: dict[int, tuple[Straggler, int, int]] = {}
    for table in records.tables:
        for now in table.stragglers:
            worst, first, _ = found.get(now.rank, (now, table.steps_done, 0))
            slowest = now if now.over > worst.over else worst
            found[now.rank] = (slowest, first, table.steps_done)
    return sorted(found.values(), key=lambda item: -item[0].over)
