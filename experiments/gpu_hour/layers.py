"""Measures on one GPU what balance gains, by running the layers of all ranks one after the other.

`python -m experiments.gpu_hour.layers --out layers.json` plans the same documents with Plain-4D,
the paper's system and ours. For each micro-batch and context-parallel rank it runs one decoder
layer, forward and backward, with the weights of one tensor-parallel rank.

Then it simulates the steps twice: once with predicted times only, and once with the measured times
of attention, matrix products and element-wise operations. Collectives and the pipeline are
simulated both times.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.gpu_hour.measured import COMPARED
from experiments.harness.arguments import at_least, experiment_parser
from experiments.harness.constants import profile
from experiments.harness.evaluation import Case, batches_of, compared, outcomes, spec_of
from experiments.harness.files import write_json
from experiments.paper.fig15.rank_times import passes_ns
from wlb.cost import workload_of
from wlb.cost.flops import rank_model
from wlb.kernels import Segments, attend, select_backend
from wlb.model import Rows, inverse_frequencies, rope_tables
from wlb.model.llama import DecoderLayer, LocalAttend, Ops
from wlb.plan import IntArray, ShardingPlan
from wlb.simulate import PassKind, ShardedStep, Simulator, StepPrices, planner_of, sharded_steps
from wlb.spec import AttentionBackend, ModelSpec, Recompute, RunSpec

MEASURED_TERMS = ("gemm", "elementwise")
"""Terms of a layer's predicted time that measured times replace, besides attention kernels."""


class SharedOps(Ops):
    """Linear layers of one tensor-parallel rank with sequence parallelism, without its peers.

    The rank has 1 / tp of the rows of its CP rank. The all-gather before a column-parallel layer is
    replaced by `tp` copies of these rows, and the reduce-scatter after a row-parallel layer by
    taking the first 1 / tp of the rows. So the matrix products have their real shapes.
    """

    def __init__(self, tp: int, *, fused: bool) -> None:
        self.tp, self.fused = tp, fused

    def fan_out(self, x_TC: Tensor, *linears: torch.nn.Linear) -> Iterator[Tensor]:
        gathered_TC = x_TC.repeat(self.tp, 1)
        return (linear(gathered_TC) for linear in linears)

    def fan_in(self, x_TC: Tensor, linear: torch.nn.Linear) -> Tensor:
        return linear(x_TC)[: x_TC.shape[0] // self.tp]


class RankLayer:
    """A decoder layer as one CP rank runs it on one micro-batch, on random activations.

    `forward` and `backward` are the passes that are timed.
    """

    def __init__(
        self, layer: DecoderLayer, model: ModelSpec, plan: ShardingPlan, rank: int, rows: int
    ) -> None:
        """Prepares the inputs of the layer.

        Args:
            layer: Layer with the weights of one TP rank, shared by all ranks that are timed.
            model: Shape of the model on one TP rank.
            plan: The micro-batch's tokens on each CP rank.
            rank: CP rank.
            rows: Rows of every CP rank, including padding.
        """
        weight = layer.input_layernorm.weight
        options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        assert isinstance(layer.ops, SharedOps)
        self.layer = layer
        spans = plan.for_rank(rank)
        call = spans.for_kernel(plan.gathered_rows(rows))
        num, before, after = spans.num_tokens, rank * rows, (plan.cp - rank - 1) * rows
        segments = Segments.from_offsets(
            spans.cu_seqlens_q, spans.cu_seqlens_k, device=weight.device
        )
        is_cuda = weight.device.type == "cuda"
        backend = select_backend(
            AttentionBackend.TORCH_VARLEN if is_cuda else AttentionBackend.AUTO,
            device=weight.device,
            dtype=weight.dtype,
            head_size=model.head_size,
        )
        index = torch.from_numpy(call.key_index).to(weight.device)
        others = [
            torch.randn(2, n, model.num_kv_heads, model.head_size, **options)
            for n in (before, after)
        ]

        def gathered_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
            # Random rows replace the keys and values of other ranks. Indexing copies the keys of
            # each span next to each other, as the executor does, so the copy is timed too.
            keys, values = (
                torch.cat([others[0][i], own, others[1][i]])[index]
                for i, own in enumerate((k_TGD, v_TGD))
            )
            out_THD = attend(q_THD[:num], keys, values, segments, backend=backend)
            padding = (0, 0, 0, 0, 0, q_THD.shape[0] - num)
            return torch.nn.functional.pad(out_THD, padding)

        positions = torch.zeros(rows, dtype=torch.long)
        positions[:num] = torch.from_numpy(spans.positions)
        frequencies = inverse_frequencies(model, weight.device)
        cos, sin = rope_tables(positions.to(weight.device), frequencies)
        self.rows = Rows(cos=cos, sin=sin, attend=LocalAttend(gathered_attention))
        shape = (rows // layer.ops.tp, model.hidden_size)
        self.x_TC = torch.randn(shape, **options, requires_grad=True)
        self.gradient = torch.randn(shape, **options)

    def forward(self) -> Tensor:
        return self.layer(self.x_TC, self.rows)

    def backward(self, out: Tensor) -> None:
        out.backward(self.gradient)
        self.x_TC.grad = None


def layer_ns(
    spec: RunSpec, steps: Sequence[ShardedStep], *, device: torch.device, rounds: int
) -> np.ndarray:
    """Times one layer for every micro-batch and CP rank.

    Args:
        spec: The run.
        steps: Its planned steps.
        device: Where to run the layers. A CPU is timed by its thread's CPU time.
        rounds: Timings of each layer, after one that is discarded. The median counts.

    Returns:
        Nanoseconds of forward and backward, shape [steps, dp, micro-batches, cp, 2]. They are 0 for
        a rank without tokens.
    """
    is_cuda = device.type == "cuda"
    tp, cp = spec.parallel.tp, spec.parallel.cp
    model = rank_model(spec.model, tp)
    layer = DecoderLayer(model, SharedOps(tp, fused=is_cuda))
    layer = layer.to(device, torch.bfloat16 if is_cuda else torch.float32)
    clock = None if is_cuda else time.thread_time_ns
    shape = (len(steps), spec.parallel.dp, spec.micro_batches_per_pipeline, cp, 2)
    out = np.zeros(shape)
    for i, step in enumerate(steps):
        for j, pipeline in enumerate(step.pipelines):
            batches = zip(pipeline.shardings, pipeline.local_tokens, strict=True)
            for k, (plan, rows) in enumerate(batches):
                for rank in range(cp):
                    if plan.for_rank(rank).num_tokens:
                        call = RankLayer(layer, model, plan, rank, rows)
                        found = [passes_ns(call, clock) for _ in range(1 + rounds)]
                        out[i, j, k, rank] = np.median(found[1:], axis=0)
    return out


def with_measured(prices: StepPrices, layers_ns: np.ndarray) -> StepPrices:
    """Returns prices in which measured layers replace the predicted ones.

    The time of attention becomes the measured time of the whole layer. The linear terms that are
    part of that measurement are removed, so that nothing is counted twice.
    """
    linear = tuple(
        {
            kind: replace(
                terms,
                per_token={n: ns for n, ns in terms.per_token.items() if n not in MEASURED_TERMS},
            )
            for kind, terms in of_kind.items()
        }
        for of_kind in prices.linear
    )
    forward, backward = (np.rint(layers_ns[..., i]).astype(np.int64) for i in range(2))
    return replace(
        prices, attention_forward_ns=forward, attention_backward_ns=backward, linear=linear
    )


def predicted_ns(prices: StepPrices) -> np.ndarray:
    """Returns the predicted times of the layers that `layer_ns` measures, in the same shape."""
    out: list[IntArray] = []
    for kind, attention in (
        (PassKind.FORWARD, prices.attention_forward_ns),
        (PassKind.BACKWARD, prices.attention_backward_ns),
    ):
        per_token = sum(prices.linear[0][kind].per_token[name] for name in MEASURED_TERMS)
        out.append(attention + (prices.tokens * per_token)[..., None])
    return np.stack(out, axis=-1)


def run_system(case: Case, *, device: torch.device, rounds: int) -> dict[str, Any]:
    """Plans a system's steps, measures their layers, and simulates with and without the result."""
    spec = spec_of(case)
    if spec.splits_backward or spec.training.recompute != Recompute.NONE:
        raise ValueError(f"{case.config}: measured layers are of one forward and one backward pass")
    cost = workload_of(spec, profile())
    batches = batches_of(spec, family=case.family, steps=case.steps, seed=case.seed)
    steps = list(sharded_steps(planner_of(spec, cost, batches), dp=spec.parallel.dp))
    simulator = Simulator(spec=spec, cost=cost)
    prices = simulator.price(steps)
    measured = layer_ns(spec, steps, device=device, rounds=rounds)
    expected = predicted_ns(prices)
    return {
        "tokens": int(sum(step.plan.packing.num_tokens for step in steps)),
        "steps": len(steps),
        "predicted_s": float(simulator.run(prices).step_time_s.sum()),
        "measured_s": float(simulator.run(with_measured(prices, measured)).step_time_s.sum()),
        "layers_predicted_ns": np.rint(expected).astype(np.int64).tolist(),
        "layers_measured_ns": np.rint(measured).astype(np.int64).tolist(),
    }


def arguments() -> argparse.Namespace:
    parser = experiment_parser(__doc__, steps=16, seed=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--configs", nargs="+", default=["7b_128k"], help="of Table 1")
    parser.add_argument("--rounds", type=at_least(1), default=2, help="timings of each layer")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    return options


def main() -> int:
    options = arguments()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "configs": {}}
    for config in options.configs:
        rows = found["configs"].setdefault(config, {})
        for system in COMPARED:
            shared = {"steps": options.steps, "seed": options.seed}
            (fastest,) = outcomes([compared(system, config, *options.set, **shared)])
            rows[system] = run_system(fastest.case, device=device, rounds=options.rounds)
            # Write after every system, so that a later crash does not lose earlier measurements.
            write_json(options.out, found)
            plain, made = rows[COMPARED[0]], rows[system]
            print(
                f"{config} {system}: over Plain-4D predicted "
                f"{plain['predicted_s'] / made['predicted_s']:.3f}, with measured layers "
                f"{plain['measured_s'] / made['measured_s']:.3f}; layers predicted over measured "
                f"{np.sum(made['layers_predicted_ns']) / np.sum(made['layers_measured_ns']):.3f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
