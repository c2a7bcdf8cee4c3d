"""Writes the text of the results page from the groups of runs."""

from experiments.paper.packing_training.cases import (
    BASE_PACKAGES,
    BASE_STEPS,
    BS,
    GASES,
    MSL,
    Case,
    Result,
)
from experiments.paper.packing_training.summary import Group, noise_band


def words(groups: list[Group], rates: dict[Case, Result]) -> str:
    parts = (_set_up(groups), _losses(groups), _speed(groups), _rates(rates))
    return "\n\n".join(parts)


def _of(groups: list[Group], method: str, gas: int = GASES[0]) -> Group:
    return next(g for g in groups if (g.case.method, g.case.gas) == (method, gas))


def _set_up(groups: list[Group]) -> str:
    one = groups[0].results[0]
    return (
        f"A LLaMA-like model of 5.3 million parameters is trained for {BASE_STEPS} steps on the "
        f"sources of {' and '.join(BASE_PACKAGES)}, then fine-tuned for one epoch on conversations "
        f"about the standard library's docstrings ({one.tokens:,} tokens, {one.targets:,} of them "
        f"trained, at most {MSL:,} a conversation), by `wlb train`. Rows are as in Tables 4 to 6: "
        f"online methods take bs = {BS} examples, offline ones rows of bs x msl tokens; at gas "
        f"{GASES[0]} an offline epoch has few large steps, at gas {GASES[1]} about as many as the "
        f"online methods have at {GASES[0]}. All runs share one learning rate. Held out: 1 in 10 "
        f"conversations, the same for all, always packed the same way. Seeds change the order of "
        f"examples, {len(groups[0].results)} each."
    )


def _losses(groups: list[Group]) -> str:
    band = noise_band(groups)
    mini = _of(groups, "mini_batch_posid")
    few = [g for g in groups if g.case.gas == GASES[0] and g.case.method in _OFFLINE]
    many = [g for g in groups if g.case.gas == GASES[1]]
    said = "is noise" if abs(mini.difference) <= band else "is not noise"
    return (
        f"**Losses.** A difference within {band:.3f} nats is noise (95%). MiniBatchPacking's "
        f"held-out loss less padding's is {mini.difference:+.3f}, which {said}: packing a "
        f"mini-batch changes what is computed for padding, not what is learned. Offline packing "
        f"with the same gas takes {few[0].steps:.0f} to {max(g.steps for g in few):.0f} steps for "
        f"{mini.steps:.0f} and loses {min(g.difference for g in few):.3f} to "
        f"{max(g.difference for g in few):.3f}; with as many steps "
        f"({min(g.steps for g in many):.0f} to {max(g.steps for g in many):.0f}) the difference is "
        f"{min(g.difference for g in many):+.3f} to {max(g.difference for g in many):+.3f}."
    )


def _speed(groups: list[Group]) -> str:
    mini, grouped = _of(groups, "mini_batch_posid"), _of(groups, "group_by_length_padding")
    bfd, padding = _of(groups, "multipack_bfd_posid"), _of(groups, "random_padding")
    return (
        f"**Speed.** Padding is {padding.mean('padding'):.0%} of what RandomSampling+Padding "
        f"computes and {grouped.mean('padding'):.1%} of GroupByLength's. MiniBatchPacking trains "
        f"{mini.faster:.2f} times as many tokens a second as padding, GroupByLength "
        f"{grouped.faster:.2f} times, packing by best fit decreasing {bfd.faster:.2f} times. "
        f"FixedLengthPacking attends across examples, so that its rows of {MSL:,} cost the most "
        f"attention of all packed methods."
    )


def _rates(rates: dict[Case, Result]) -> str:
    best: dict[str, tuple[Case, Result]] = {}
    for case, made in rates.items():
        if case.method not in best or made.heldout_after < best[case.method][1].heldout_after:
            best[case.method] = (case, made)
    (mini_case, mini), (bfd_case, bfd) = best["mini_batch_posid"], best["multipack_bfd_posid"]
    return (
        f"**What the few steps cost** depends on the learning rate, which the paper keeps: at its "
        f"own best rate ({bfd_case.learning_rate:g}) an epoch of {bfd.steps} steps reaches "
        f"{bfd.heldout_after:.3f}, {mini.steps} steps at theirs ({mini_case.learning_rate:g}) "
        f"{mini.heldout_after:.3f}."
    )


_OFFLINE = (
    "fixed_length",
    "fixed_length_posid",
    "multipack_posid",
    "multipack_bfd_posid",
    "sorted_posid",
    "random_posid",
)
