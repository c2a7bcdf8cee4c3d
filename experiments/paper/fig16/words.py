"""Writes the text of the page, with its numbers and their limits."""

from collections.abc import Sequence

import numpy as np

from experiments.harness.pages import Against
from experiments.harness.streams import RATIO
from experiments.paper.fig16.arms import CONTROL, DELAYS, LONG
from experiments.paper.fig16.corpus import source_versions
from experiments.paper.fig16.study import Study
from experiments.paper.fig16.summary import (
    NO_DELAY,
    Group,
    Measure,
    against,
    band,
    cut_share,
    final,
    joint_factor,
    long_loss,
    loss_at,
    train_loss,
    verdict,
)
from wlb.data import TokenStore

ROUNDED_TABLES = frozenset({"a49c849", "346eb9b", "f2799b9", "3f5ea17", "9f62118", "cdc72cb"})
"""Commits at which FSDP's cast of inputs rounded the RoPE tables to bfloat16."""


def words(study: Study, groups: Sequence[Group], grid: Sequence[int]) -> str:
    parts = [_set_up(study, groups), _result(groups), _normalisers(groups)]
    parts += [_long_documents(groups), _delays(groups, grid[-1]), _chance(groups)]
    parts += [_cuts(groups), _order(groups), _limits(groups)]
    return "\n\n".join(part for part in parts if part)


def against_rows(groups: Sequence[Group]) -> list[Against]:
    """Compares our numbers with the paper's sentences about Figures 6 and 16."""
    found = _by_name(groups)
    rows = (
        ("fixed-8", "training loss, window of 8 global batches", "+1.6% on average"),
        ("var_len", "training loss, WLB-LLM", "almost the same trend as fixed-length packing"),
    )
    out: list[Against] = []
    for name, what, paper in rows:
        if name not in found:
            continue
        g = found[name]
        theirs = g.values(train_loss) - g.differences(train_loss)
        ours = float((g.differences(train_loss) / theirs).mean())
        width = band(groups, g, train_loss) / float(theirs.mean())
        out.append(Against(what=what, paper=paper, ours=f"{ours:+.2%}{_pm(width, '.2%')}"))
    if "var_len" in found:
        delay = found["var_len"].book(lambda b: b.summary.mean_delay)
        out.append(Against(what="mean delay of a token, WLB-LLM", paper=0.5, ours=round(delay, 2)))
    return out


def _by_name(groups: Sequence[Group]) -> dict[str, Group]:
    return {g.arm.name: g for g in groups}


def _pm(width: float, spec: str = ".4f") -> str:
    return f" ± {width:{spec}}" if np.isfinite(width) else ""


def _said(groups: Sequence[Group], g: Group, measure: Measure = final) -> str:
    """Formats an arm's difference from its baseline, as in "bounded +0.0012 ± 0.0020 (noise)"."""
    return f"{g.arm.title} {_difference(groups, g, measure)}"


def _difference(groups: Sequence[Group], g: Group, measure: Measure = final) -> str:
    mean = float(g.differences(measure).mean())
    return f"{mean:+.4f}{_pm(band(groups, g, measure))} ({verdict(groups, g, measure)})"


def _set_up(study: Study, groups: Sequence[Group]) -> str:
    spec, store = study.scale_spec(), TokenStore(study.stores.train)
    one = groups[0].results[0]
    seeds = sorted(len(g.results) for g in groups)
    said = f"{seeds[0]} to {seeds[-1]}" if seeds[0] < seeds[-1] else f"{seeds[0]}"
    model = spec.model
    return (
        f"A LLaMA-like model of {model.num_parameters / 1e6:.2f} million parameters "
        f"({model.num_layers} layers of {model.hidden_size}) is trained on {one.num_tokens:,} "
        f"tokens of {store.num_documents:,} documents, each once, in steps of "
        f"{spec.num_micro_batches} windows of {spec.data.context_window:,} (text of "
        f"{source_versions()}, checksum "
        f"{study.stores.checksum[:12]}). All arms of a seed begin with the same weights, are given "
        f"the same documents in the same order, and follow one cosine schedule to their last step; "
        f"every run's ledger was checked to hold every token once. Policies decide with W_a / W_l "
        f"= {RATIO} at a full window, as the 7B model at 128K. Held out: "
        f"{study.scale.heldout_fraction:.0%} of the documents, always packed the "
        f"same way. Seeds: {said} an arm."
    )


def _result(groups: Sequence[Group]) -> str:
    policies = [g for g in groups if g.arm.group == "policy" and not g.is_baseline]
    if not policies:
        return ""
    return (
        "**Policies.** Held-out loss after the epoch, less original's: "
        + "; ".join(_said(groups, g) for g in policies)
        + "."
    )


def _normalisers(groups: Sequence[Group]) -> str:
    found = _by_name(groups)
    pairs = [(found[n], found[f"{n}-constant"]) for n in ("var_len", "bounded")
             if f"{n}-constant" in found and n in found]  # fmt: skip
    if not pairs:
        return ""
    said: list[str] = []
    for mean, constant in pairs:
        weight = mean.class_weights[-1]
        beside = against(groups, mean.arm.name)
        pair = [_difference(beside, g) for g in beside if g.arm == constant.arm]
        said.append(
            f"under a step's mean a label of a document of a window or more weighs {weight:.2f} "
            f"with {mean.arm.title}; {_said(groups, mean)}, {_said(groups, constant)}; the "
            f"constant's less the mean's {', '.join(pair) or 'has no seed in common'}"
        )
    return f"**Normaliser.** {_first_up('; '.join(said))}."


def _long_documents(groups: Sequence[Group]) -> str:
    """Describes the losses of long documents, whose weights differ most between arms."""
    others = [g for g in groups if g.arm.group != "delay" and not g.is_baseline]
    if not others or not all(np.isfinite(g.differences(long_loss)).all() for g in others):
        return ""
    said = "; ".join(_said(others, g, long_loss) for g in others)
    return (
        f"**Documents of a window and more.** Their held-out loss, less original's: {said}. "
        f"{_together(others, long_loss)}"
    )


def _first_up(text: str) -> str:
    return text[:1].upper() + text[1:]


def _delays(groups: Sequence[Group], tokens: int) -> str:
    found = _by_name(groups)
    named = [(d, found[f"hold-{d}"]) for d in DELAYS if f"hold-{d}" in found]
    if not named:
        return ""
    at = loss_at(tokens)
    said = "; ".join(
        f"{d} step{'s' * (d > 1)} {float(g.differences(final).mean()):+.4f}"
        f"{_pm(band(groups, g, final))} ({verdict(groups, g, final)}; at {tokens / 1e6:g}M tokens "
        f"{float(g.differences(at).mean()):+.4f})"
        for d, g in named
    )
    labels = named[0][1].books[0].class_labels
    long = 1 - labels[0] / sum(labels)
    late = ", ".join(f"{g.class_weights[-1]:.2f}" for _, g in named)
    at_once = found[NO_DELAY].class_weights[-1]
    return (
        f"**What delay alone does.** Every document of {LONG} windows and more waits so many steps "
        f"({long:.0%} of all labels are of documents of 1/8 windows and more); held-out "
        f"loss less that without waiting: {said}. Waiting also makes steps less even: under their "
        f"mean a label of a document of a window or more weighs {at_once:.2f} at once, and {late} "
        f"late."
    )


def _chance(groups: Sequence[Group]) -> str:
    text = _together(groups, final)
    return f"**Chance.** {text}" if text else ""


def _together(groups: Sequence[Group], measure: Measure) -> str:
    """Returns which differences remain significant over all comparisons.

    The text is empty if the noise cannot be estimated.
    """
    factor = joint_factor(groups, measure)
    if not np.isfinite(factor):
        return ""
    others = [g for g in groups if not g.is_baseline]
    outside = [
        g.arm.title
        for g in others
        if abs(float(g.differences(measure).mean())) > factor * band(groups, g, measure)
    ]
    return (
        f"If nothing differed, one comparison in 20 would still be outside its ±, and these are "
        f"{len(others)}. With ± {factor:.2f} times as wide, which holds for all of them at once "
        f"(Bonferroni), outside is {', '.join(outside) or 'none'}."
    )


def _cuts(groups: Sequence[Group]) -> str:
    """Describes how many documents policies cut, which changes the loss besides their order."""
    shares: dict[str, list[str]] = {}
    for g in groups:
        if g.arm.name == g.arm.packing:
            shares.setdefault(f"{g.book(cut_share):.1%}", []).append(g.arm.title)
    said = "; ".join(f"{share} with {', '.join(titles)}" for share, titles in shares.items())
    return (
        f"**Cuts.** The part of a document after a cut is trained without the part before it. "
        f"Documents trained in more than one piece: {said}. A difference from original includes "
        f"this effect besides the order and the size of steps.{_beside_control(groups)}"
    )


def _beside_control(groups: Sequence[Group]) -> str:
    """Describes how policies differ from best-fit packing, which cuts as few documents."""
    others = [
        g
        for g in against(groups, CONTROL)
        if g.arm.group == "policy"
        and g.book(cut_share) < 1.2 * _by_name(groups)[CONTROL].book(cut_share)
    ]
    if not others:
        return ""
    said = "; ".join(_said(others, g) for g in others)
    return (
        f" Best-fit packing (Ding et al., ICML 2024) cuts only documents longer than a window, as "
        f"the policies that balance work do, and fills windows of equal size without regard to "
        f"work. Held-out loss less its loss: {said}."
    )


def _order(groups: Sequence[Group]) -> str:
    found = _by_name(groups)
    if "original" not in found:
        return ""
    base = float(np.mean([r.norm_std**2 for r in found["original"].results]))
    said = "; ".join(
        f"{g.arm.title} {float(np.mean([r.norm_std**2 for r in g.results])) / base:.2f}"
        for g in groups
        if g.arm.group != "delay" and not g.is_baseline
    )
    return f"**Gradients.** Variance of the gradient's norm over steps, over original's: {said}."


def _limits(groups: Sequence[Group]) -> str:
    return (
        f"**What is not shown.** This is a small model on little text: a delay of a step is a "
        f"larger part of this training than of one of 52,000 steps, and effects that need scale to "
        f"be seen are not here. Policies whose differences are within ± are not shown to be "
        f"equal: only a difference above ± would have been detected.{_rounded(groups)}"
    )


def _rounded(groups: Sequence[Group]) -> str:
    """Returns a note if runs had rounded RoPE tables, else an empty text."""
    results = [r for g in groups for r in g.results]
    rounded = sum(r.commit.removesuffix("-dirty") in ROUNDED_TABLES for r in results)
    if not rounded:
        return ""
    those = "All runs are" if rounded == len(results) else f"{rounded} of {len(results)} runs are"
    return (
        f" {those} of code before 84b9144, in which bfloat16 runs rotated by cosines and sines "
        f"rounded to bfloat16 (in every arm alike): a rerun ends elsewhere, within the noise "
        f"(experiments/LOG.md)."
    )
