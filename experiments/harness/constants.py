"""Defines the constants and configurations that the paper's figures are reproduced with.

There is one set of constants. They were fitted to Table 2's imbalances and the four averages of
Figure 12; none is tuned for a single figure, and none was measured. Several sets fit as well; this
one shows that the paper's numbers are consistent under the simulator. Lengths are a family of
`wlb.data.lengths`, scaled with the window. Kernels are profile `h100` (FlashAttention-3) with its
throughputs changed. Settings that the paper does not give (virtual stages, thresholds, S_max) are
the same everywhere.
"""

from dataclasses import dataclass, replace

import numpy as np

from kernels_profile.derive import scaled, with_bandwidth
from wlb.cost import KernelProfile, Provenance, ProvenanceKind, Scope, load_profile
from wlb.cost.surface import Surface
from wlb.data import LengthFamily
from wlb.simulate.published import ERRORS
from wlb.spec import RunSpec, load

FAMILY = LengthFamily(
    body_median=750 / 131072,
    body_sigma=1.478,
    tail_start=0.273,
    tail_exponent=1.0,
    tail_token_share=0.08,
    atom_token_share=0.19,
)

ATTENTION_FORWARD = 0.78
"""This factor scales the table's forward throughput (584 TFLOP/s at its plateau)."""
ATTENTION_BACKWARD = 1.05
"""This factor scales the table's backward throughput (425 TFLOP/s at its plateau)."""
GEMM_FORWARD_TFLOPS = 340.0
GEMM_BACKWARD_TFLOPS = 255.0
"""Both GEMM throughputs are for layers; the output head, a large matrix, keeps the profile's."""
MEMORY = 0.45
"""This factor scales the profile's element-wise bandwidth of 3 TB/s."""
LINK_BYTES_PER_S = 120e9
"""A rank's link between nodes has this bandwidth if transfers hidden behind computing are
counted."""

S_MAX = 1.1
QUEUES = {1: (0.2,), 2: (0.2, 0.63), 3: (0.2, 0.4, 0.63)}
OVERRIDES = (
    "kernels.attention=flash_attention_3",
    "cluster.tp_overlap=0.85",
    "cluster.overhead=0.1",
    "planner.baseline=false",
)
"""Every run at fitted prices has these settings."""


TABLE_1 = (
    "550m_64k",
    "550m_128k",
    "7b_64k",
    "7b_128k",
    "30b_64k",
    "30b_128k",
    "70b_64k",
    "70b_128k",
)
VOCABULARY = 32000
"""LLaMA2 has this vocabulary. Presets take theirs from a token store, which bare lengths lack."""


def configuration(name: str, *overrides: str) -> RunSpec:
    """Loads a preset of Table 1 with LLaMA2's vocabulary; overrides are those of `--set`."""
    return load(name, [f"model.vocab_size={VOCABULARY}", *overrides])


def title(name: str) -> str:
    """Returns a configuration's name as the paper writes it, such as 7B-128K."""
    return name.upper().replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a simulation is priced with."""

    title: str  # as tables call it
    profile: str  # a kernel profile's name; "" for `profile()`, which is fitted to the paper
    overrides: tuple[str, ...]  # settings of every run, as those of `--set`

    def load(self) -> KernelProfile:
        return load_profile(self.profile) if self.profile else profile()


FITTED, FLASH_2, FLASH_3 = "fitted", "flash_2", "flash_3"
PRICES = {
    FITTED: Prices(title="fitted to the paper", profile="", overrides=OVERRIDES),
    FLASH_2: Prices(
        title="H100 runs, FlashAttention-2",
        profile="h100_runs",
        overrides=("kernels.attention=torch_varlen", "planner.baseline=false"),
    ),
    FLASH_3: Prices(
        title="H100 runs, FlashAttention-3",
        profile="h100_runs",
        overrides=("kernels.attention=flash_attention_3", "planner.baseline=false"),
    ),
}
"""Prices of the evaluation: those that are fitted to the paper's numbers, and those of profile
`h100_runs`, which is measured on an H100 and agrees with training runs that others published. No
number of the paper was used for the latter. The paper does not name its attention kernel."""
NOT_FITTED = (FLASH_2, FLASH_3)


def runs_note() -> str:
    """Says what prices of `h100_runs` are worth, for the note of a table of simulated runs."""
    error = ERRORS["h100_runs", True]
    return (
        f"H100 runs: profile `h100_runs`, which no number of the paper is in. It predicted "
        f"tokens/s of {error.runs} published runs with TP, CP or PP within {error.largest:.0%}."
    )


def profile() -> KernelProfile:
    """Returns profile `h100` with the fitted constants."""
    base = load_profile("h100")
    what = (
        "fitted to the paper's printed numbers (experiments/harness/constants.py), no measurement"
    )
    assumed = Provenance(kind=ProvenanceKind.ASSUMED, source=what)
    return replace(
        base,
        name="h100_paper",
        provenance=replace(assumed, source=f"h100, changed: {what}"),
        attention=tuple(
            replace(
                table,
                forward=scaled(table.forward, ATTENTION_FORWARD),
                backward=scaled(table.backward, ATTENTION_BACKWARD),
                provenance=assumed,
            )
            for table in base.attention
        ),
        gemm=replace(
            base.gemm,
            forward=_flat(base.gemm.forward, GEMM_FORWARD_TFLOPS),
            backward=_flat(base.gemm.backward, GEMM_BACKWARD_TFLOPS),
            provenance=assumed,
        ),
        elementwise=tuple(with_bandwidth(cost, MEMORY, assumed) for cost in base.elementwise),
        collectives=tuple(
            cost
            if cost.scope == Scope.INTRA_NODE
            else replace(cost, bytes_per_s=LINK_BYTES_PER_S, provenance=assumed)
            for cost in base.collectives
        ),
    )


def _flat(surface: Surface, tflops: float) -> Surface:
    return replace(surface, values=np.full_like(surface.values, tflops))
