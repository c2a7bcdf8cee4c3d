"""Draws Figure 3: the distribution of document lengths, over documents and over tokens.

`python -m experiments.paper.fig03 [--lengths FILE ...]` compares three kinds of corpora: the fitted
distribution `wlb_paper`, whose constants were chosen to reproduce other numbers of the paper; the
Python standard library, which is tokenized the first time, in a minute; and files of lengths.

The left plot has the share of documents by length, the right one the share of all tokens that are
in documents up to a length. Documents are cut at the window of 128K, as for training.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.arguments import experiment_parser
from experiments.harness.drawing import COLOURS, LINES, new_figure, tokens_axis
from experiments.harness.pages import Against, How, Picture, Table, show, write_results
from experiments.harness.streams import WINDOW, source_of, title_of
from wlb.plan import IntArray

HALF = WINDOW // 2
BINS_AN_OCTAVE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The document lengths of a corpus."""

    title: str
    lengths: IntArray  # tokens of each document, cut at the window, in rising order
    num_cut: int  # number of documents that were longer than the window

    @property
    def token_share(self) -> np.ndarray:
        """Returns the cumulative share of tokens, in the order of `lengths`."""
        return np.cumsum(self.lengths) / self.lengths.sum()

    def tokens_below(self, length: int) -> float:
        """Returns the share of tokens in documents shorter than `length`."""
        return float(self.lengths[self.lengths < length].sum() / self.lengths.sum())

    def documents_below(self, length: int) -> float:
        return float((self.lengths < length).mean())


def corpus(name: str, *, num_tokens: int, seed: int) -> Lengths:
    whole = source_of(name, num_tokens=num_tokens, seed=seed).lengths
    windows, rest = np.divmod(whole, WINDOW)
    pieces = np.concatenate([np.full(int(windows.sum()), WINDOW), rest[rest > 0]])
    return Lengths(
        title=title_of(name), lengths=np.sort(pieces), num_cut=int((whole > WINDOW).sum())
    )


def draw(corpora: list[Lengths]) -> Any:
    figure, (left, right) = new_figure(ncols=2, height=3.9)
    edges = 2.0 ** np.arange(0, np.log2(WINDOW) + 1 / BINS_AN_OCTAVE, 1 / BINS_AN_OCTAVE)
    edges[-1] = WINDOW + 1
    for i, c in enumerate(corpora):
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i % len(LINES)]}
        counts, _ = np.histogram(c.lengths, edges)
        left.stairs(counts / c.lengths.size * 100, edges, linewidth=1.6, **style)
        share = np.searchsorted(c.lengths, grid := np.linspace(0, WINDOW, 513), side="right")
        tokens = np.append(0, c.token_share)[share] * 100
        right.plot(grid, tokens, linewidth=1.6, label=c.title, **style)
    left.set(yscale="log", xlim=(1, WINDOW * 1.15), xlabel="document length (tokens)")
    left.set_ylabel("share of documents a half octave (%)")
    tokens_axis(left)
    right.set(xlim=(0, WINDOW * 1.02), ylim=(0, 103), xlabel="document length (tokens)")
    right.set_ylabel("tokens in documents up to it (%)")
    tokens_axis(right, log=False)
    right.plot(HALF, 75, marker="v", color="black", linestyle="none", markersize=8)
    right.annotate(
        "paper: over 75 %\nbelow half the window",
        (HALF, 75),
        xytext=(8, -9),
        textcoords="offset points",
        va="top",
        fontsize=9,
    )
    figure.legend(loc="outside lower center", ncols=len(corpora), frameon=False)
    return figure


def tables(corpora: list[Lengths]) -> list[Table]:
    records = [
        {
            "corpus": c.title,
            "documents": c.lengths.size,
            "million tokens": c.lengths.sum() / 1e6,
            "mean": float(c.lengths.mean()),
            "median": float(np.median(c.lengths)),
            "p99": float(np.quantile(c.lengths, 0.99)),
            "longest": int(c.lengths.max()),
            "cut at the window": c.num_cut,
            "tokens below half the window": c.tokens_below(HALF),
            "documents below half the window": c.documents_below(HALF),
        }
        for c in corpora
    ]
    whole = dict.fromkeys(("documents", "longest", "cut at the window"), ",d")
    tokens = dict.fromkeys(("mean", "median", "p99"), ",.0f")
    shares = dict.fromkeys(list(records[0])[-2:], ".1%")
    summary = Table.of(
        "corpora", "Corpora", records, formats=whole | tokens | shares | {"million tokens": ",.1f"}
    )
    lengths = [2**i for i in range(6, 18)]
    curve = Table(
        name="cumulative",
        title="Share of tokens in documents shorter than a length",
        columns=("shorter than", *(c.title for c in corpora)),
        rows=[[n, *(c.tokens_below(n) for c in corpora)] for n in lengths],
        formats={"shorter than": ",d"} | {c.title: ".1%" for c in corpora},
        note="What is missing below 131,072 are documents of exactly the window.",
    )
    return [summary, curve]


def main() -> None:
    parser = experiment_parser(__doc__, seed=0, lengths=True)
    parser.add_argument(
        "--tokens",
        type=int,
        default=1_000_000_000,
        help="about how many tokens to draw of the family",
    )
    options = parser.parse_args()
    corpora = [
        corpus(name, num_tokens=options.tokens, seed=options.seed)
        for name in ("wlb_paper", "stdlib", *options.lengths)
    ]
    fitted = corpora[0]
    against = [
        Against(
            what="tokens in documents shorter than half the window, fitted family",
            paper="over 75 %",
            ours=f"{fitted.tokens_below(HALF):.1%}",
        ),
        Against(
            what="longest document", paper="the window", ours=f"{fitted.lengths.max():,} tokens"
        ),
    ]
    made = tables(corpora)
    show(*made, against=against, width=200)
    write_results(
        Path(__file__).parent,
        title="Figure 3: lengths of documents",
        how=How.COMPUTED,
        profile="document lengths are counted; no time is in it.",
        seed=options.seed,
        text=(
            f"Left: share of documents by length, half octaves. Right: share of all tokens in "
            f"documents up to a length. Window {WINDOW:,} tokens; longer documents are cut at it.\n"
            f"\nThe paper publishes no lengths. The family's constants were chosen so that Table 2 "
            f"and Figure 12 come out: one consistent set, not the only one. The other corpora are "
            f"real documents; fewer of their tokens are in long ones."
        ),
        against=against,
        tables=made,
        figures=[
            Picture(
                name="lengths",
                caption="Documents by length (left); share of tokens in documents up to a length "
                "(right)",
                figure=draw(corpora),
            )
        ],
    )


if __name__ == "__main__":
    main()
