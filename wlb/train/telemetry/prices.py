"""`cost.online`: prices that a run learns from its own passes while it trains.

Every cost.online_interval measured steps the ranks' votes (`wlb.cost.learn`) ride on the all-reduce
of a telemetry record. All ranks then take the same decision, and prices change for plans from a
step on that no rank has seen: planner processes drop what they planned of it and plan it again.
"""

from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np

from wlb.cost import (
    Measured,
    ProfiledWorkload,
    RankCells,
    StageLayers,
    StageTimes,
    ballot,
    counted_votes,
    experts_ns_per_token,
    linear_prices,
    next_prices,
    price_base,
    stage_times,
    without_collectives,
)
from wlb.cost.learn import LoadPrices
from wlb.parallel.mesh import EP, Mesh
from wlb.parallel.observe import Cell, Part, Pass
from wlb.plan import TERMS, FloatArray, PipelinePlan, PriceChange, PriceSchedule
from wlb.plan.prices import UNIT
from wlb.spec import Recompute, RunSpec
from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.clock import StepTimes

ATTENTION, LINEAR = TERMS[:2], TERMS[2:]
"""Forward and backward."""
WINDOWS = 4


def first_step_unseen(spec: RunSpec, step: int) -> int:
    """The first step that no rank may have looked at, nor a planner process planned, while any rank
    records `step`: ranks look 2 steps or data.prefetch ahead and may be in the next step already,
    and a planner process is planner.ahead steps ahead of them."""
    return step + 2 + max(2, spec.data.prefetch) + spec.planner.ahead


class PriceMeter:
    """A rank's cells since the last vote, beside the prices of the profile itself.

    Times are those of the term alone: what backward computes again counts as forward. base: the
    workload that the run started from. Times of linear layers on CUDA hold the wait for the CP
    group's slowest rank in attention, which is taken off. Experts' products are compared with the
    price of the rows that a rank computed or waited for (`expert_tokens`), so that their load is
    in no factor.
    """

    def __init__(self, spec: RunSpec, mesh: Mesh, base: ProfiledWorkload) -> None:
        self.spec, self.mesh = spec, mesh
        self.holds_waits = mesh.device.type == "cuda"
        once = replace(base, recompute=Recompute.NONE, expert_load=1.0)
        self._base = once if self.holds_waits else without_collectives(once)
        recomputing = replace(self._base, recompute=base.recompute)
        forward, backward = experts_ns_per_token(self._base)
        _, both = experts_ns_per_token(recomputing)
        self._routed = (forward, backward, both - backward)
        self._attends_again = base.linear.again.attention
        stages = {s: StageLayers.of(spec, s) for s in spec.stages_of(mesh.at.pp)}
        self._stages = {s: of for s, of in stages.items() if of.layers}
        self._again = {of: _runs_again(self._base, recomputing, of) for of in stages.values()}
        self._cells = RankCells()
        self.num_steps = 0

    def clear(self) -> None:
        """Forget all cells, as after steps of the warm-up."""
        self._cells.clear()
        self.num_steps = 0

    def add(self, plan: PipelinePlan, times: StepTimes, experts: FloatArray | None = None) -> None:
        """A step that this rank executed. experts: `expert_tokens`."""
        self.num_steps += 1
        priced = {of: stage_times(plan, self._base, of) for of in set(self._stages.values())}
        for stage, of in self._stages.items():
            base = priced[of]
            for i, sharding in enumerate(plan.shardings):
                if sharding.tokens[self.mesh.at.cp]:
                    more = 0.0 if experts is None else float(experts[i]) - sharding.num_tokens
                    self._add_cell(i, stage, plan, base, times, more)

    def _add_cell(
        self,
        i: int,
        stage: int,
        plan: PipelinePlan,
        base: StageTimes,
        times: StepTimes,
        more: float,
    ) -> None:
        """more: tokens that experts computed beyond the micro-batch's own."""
        of, last = self._stages[stage], len(plan.micro_batches) - 1
        forward, backward, weight = (Cell(kind, stage, i) for kind in Pass)
        linear = [
            times.part_ns(forward, Part.LAYERS),
            times.part_ns(backward, Part.LAYERS) + times.part_ns(weight, Part.LAYERS),
        ]
        forward_more, backward_more, again_more = (
            ns * more * (of.layers - of.dense) for ns in self._routed
        )
        of_linear = (
            int(base.linear_forward_ns[i] + forward_more),
            int(base.linear_backward_ns[i] + backward_more),
        )
        of_attention = (base.attention_forward_ns[i], base.attention_backward_ns[i])
        waits = [0, 0]
        for k, (name, cell) in enumerate(zip(ATTENTION, (forward, backward), strict=True)):
            own_ns = int(of_attention[k][self.mesh.at.cp])
            measured_ns = times.part_ns(cell, Part.ATTENTION)
            self._cells.add(name, own_ns, measured_ns)
            if self.holds_waits and own_ns:
                waits[k] = measured_ns * int(of_attention[k].max() - own_ns) // own_ns
        linear[0] -= waits[0]
        linear[1] -= waits[1] + waits[0] * self._attends_again
        per_token, a_call = self._again[of]
        again_ns = per_token * plan.shardings[i].num_tokens + a_call + again_more
        linear[1] -= round(linear[0] * again_ns / of_linear[0])
        # FSDP's collectives are in the first forward and the last backward pass.
        has_fsdp = self.mesh.fsdp_size > 1
        shifted = (i == 0, i == last or (i == 0 and any(self._again[of])))
        for k, name in enumerate(LINEAR):
            is_shifted = has_fsdp and shifted[k]
            self._cells.add(name, of_linear[k], linear[k], layers=of.layers, is_shifted=is_shifted)

    def ballot(self) -> FloatArray:
        """This rank's vote, of the cells since the last one, which are forgotten."""
        vote = self._cells.vote()
        self.clear()
        return ballot(vote)


def _runs_again(
    once: ProfiledWorkload, recomputing: ProfiledWorkload, stage: StageLayers
) -> tuple[float, float]:
    """Prices of forward work that a stage's backward runs again: ns a token, and ns a call."""
    both, own = linear_prices(recomputing, stage), linear_prices(once, stage)
    return both.per_token[1] - own.per_token[1], both.per_call[1] - own.per_call[1]


def expert_tokens(step: ExecutedStep, mesh: Mesh) -> FloatArray | None:
    """Tokens of each micro-batch whose experts' products are in this rank's times, [n]; None
    without experts. This is the mean of the pipelines that an EP group spans, times the load of
    this rank on a CPU, and on CUDA that of the most loaded rank, for which the others wait."""
    load = step.sums.experts
    if load is None:
        return None
    assert mesh.experts is not None
    meets = mesh.parallel.meeting_pipelines
    first = mesh.at.dp // meets * meets
    tokens = step.plan.packing.rows[step.plan.pipelines[first : first + meets]].mean(0)
    is_cuda = mesh.device.type == "cuda"
    return tokens * (load.mean_rank if is_cuda else load.ranks[mesh.experts.get_local_rank(EP)])


class LearnPrices(Hook):
    """Decides on prices where votes were counted, and tells planners, records and screen.

    The votes of `WINDOWS` decisions count together: they are on the profile's own prices, so those
    before a change of prices hold as well. So do the loads of experts of these steps, which are
    counted, not voted on: all ranks know them."""

    def __init__(self, spec: RunSpec, base: ProfiledWorkload) -> None:
        self.spec, self.base = spec, price_base(base)
        self._votes: deque[FloatArray] = deque(maxlen=WINDOWS)
        self._loads: deque[list[float]] = deque([[]], maxlen=WINDOWS)
        self._has_warned = False

    def rolled_back(self, run: RunContext, saved_in: Path) -> None:
        self._votes.clear()
        self._loads = deque([[]], maxlen=WINDOWS)

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        if step.sums.experts is not None:
            self._loads[-1].append(step.sums.experts.mean_rank)
        if step.votes is None or run.is_last_step:
            return
        measured, change = self.decide(step.votes, run.prices, step.plan.step)
        if change is not None:
            run.prices = run.prices.changed(change, base=self.base).from_step(step.plan.step)
            run.feed.announce(run.prices)
        self._tell(run, step, measured, change)

    def decide(
        self, votes: FloatArray, known: PriceSchedule, step: int
    ) -> tuple[Measured | None, PriceChange | None]:
        """What the ranks measured, and the change that follows if any. votes: of all ranks after
        `step`, summed."""
        self._votes.append(votes)
        measured, cost = counted_votes(np.sum(self._votes, axis=0)), self.spec.cost
        if measured is None:
            return None, None
        prices = next_prices(
            known.latest,
            measured,
            threshold=cost.online_threshold,
            max_change=cost.online_max_change,
            is_first=not known.changes,
            loads=self._expert_loads(known),
        )
        if prices is None:
            return measured, None
        first = max(first_step_unseen(self.spec, step), known.last_step + 1)
        return measured, PriceChange(step=first, prices=prices)

    def _expert_loads(self, known: PriceSchedule) -> LoadPrices | None:
        """Of the steps of the last decisions; the steps from now on are the next one's."""
        loads = [load for interval in self._loads for load in interval]
        self._loads.append([])
        if not loads:
            return None
        held = known.latest.expert_load or round(UNIT * self.spec.cost.expert_load)
        return LoadPrices(held=held, measured=round(UNIT * sum(loads) / len(loads)))

    def _tell(
        self,
        run: RunContext,
        step: ExecutedStep,
        measured: Measured | None,
        change: PriceChange | None,
    ) -> None:
        run.report.write(
            "prices",
            step=step.plan.step,
            steps_done=run.steps_done,
            base=self.base,
            votes=0 if step.votes is None else int(step.votes[0].sum()),
            measured=measured.factors if measured else None,
            change=change and change.to_json(),
        )
        if change is not None:
            factors = ", ".join(
                f"{name.replace('_', ' ')} {factor:.3f}"
                for name, factor in change.prices.relative.items()
                if name != "linear_forward"
            )
            if change.prices.expert_load:
                factors += f", load of experts' ranks {change.prices.expert_load / UNIT:.3f}"
            run.report.say(
                f"prices learned by step {run.steps_done}, over those of {self.base} and relative "
                f"to linear forward: {factors}; plans use them from step {change.step + 1} on"
            )
            self._warn(run, change.prices.expert_load / UNIT)

    def _warn(self, run: RunContext, learned: float) -> None:
        """Say once that memory was planned for fewer rows of experts than a rank has."""
        cost = self.spec.cost
        if self._has_warned or learned <= cost.expert_load * (1 + cost.online_threshold):
            return
        self._has_warned = True
        run.report.say(
            f"the learned load of experts' ranks, {learned:.3f}, exceeds cost.expert_load = "
            f"{cost.expert_load:g}, for which S_max, T and memory were estimated and which a run "
            f"keeps: set cost.expert_load = {learned:.3f} and start again if memory is short"
        )
