"""Measures the layers of every rank of a step on one GPU, in turn, and what balance gains by them.

`python -m experiments.gpu_hour.layers --out layers.json` plans the same documents with Plain-4D,
the paper's system and ours. It runs a decoder layer, forward and backward, for each micro-batch and
each context-parallel rank, as wide as one tensor-parallel rank has it. Then it simulates the steps
twice: with predicted times, and with measured times in the place of what is predicted of attention,
matrix products and element-wise operations. Collectives and the pipeline are simulated in both.
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
"""Terms of a layer's price that the measured times replace, besides attention's kernels."""


class SharedOps(Ops):
    """Layers with weights of one tensor-parallel rank, whose rows are a share of the CP rank's.

    Copies of the share stand for the all-gather of rows before a column-parallel layer; a part of
    the rows stands for the reduce-scatter behind a row-parallel one.
    """

    def __init__(self, tp: int, *, fused: bool) -> None:
        self.tp, self.fused = tp, fused

    def fan_out(self, x_TC: Tensor, *linears: torch.nn.Linear) -> Iterator[Tensor]:
        gathered_TC = x_TC.repeat(self.tp, 1)
        return (linear(gathered_TC) for linear in linears)

    def fan_in(self, x_TC: Tensor, linear: torch.nn.Linear) -> Tensor:
        return linear(x_TC)[: x_TC.shape[0] // self.tp]


class RankLayer:
    """A decoder layer of one CP rank and micro-batch, with random rows and keys."""

    def __init__(
        self, layer: DecoderLayer, model: ModelSpec, plan: ShardingPlan, rank: int, rows: int
    ) -> None:
        """rows: of each CP rank, with padding."""
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
            # Random keys stand for those that other ranks send; a copy brings each span's keys
            # together, as the executor does.
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
    """Times a layer of every rank: [steps, dp, micro-batches, cp, 2], forward and backward, in ns.

    The times of a rank without tokens are 0. Times are medians over `rounds`, after one round that
    is not counted.
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
    """Puts measured layers into the prices of steps: attention's times become the whole layer's,
    and what was measured leaves the linear terms.
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
    """The predicted time of what `layer_ns` measures, in the same shape."""
    out: list[IntArray] = []
    for kind, attention in (
        (PassKind.FORWARD, prices.attention_forward_ns),
        (PassKind.BACKWARD, prices.attention_backward_ns),
    ):
        per_token = sum(prices.linear[0][kind].per_token[name] for name in MEASURED_TERMS)
        out.append(attention + (prices.tokens * per_token)[..., None])
    return np.stack(out, axis=-1)


def run_system(case: Case, *, device: torch.device, rounds: int) -> dict[str, Any]:
    """Plans a system's steps, measures their layers, and simulates the steps both ways."""
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
            # What is measured so far is kept if the next one ends the process.
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
