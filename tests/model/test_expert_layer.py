"""Tests a mixture of experts against a loop over tokens in float64, and what it keeps of tokens."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from tests.kernels.test_grouped import blackwell
from wlb.kernels import grouped
from wlb.model import ExpertRows, Llama, build_reference, initial_weight
from wlb.model import expert_layer as experts_module
from wlb.model.expert_layer import MixtureMlp
from wlb.spec import ExpertBalance, ExpertsSpec, ModelSpec, Scoring

PLAIN = ExpertsSpec(num=8, per_token=2, hidden_size=16)
KINDS = {
    "softmax": PLAIN,
    "plain-sums": replace(PLAIN, per_token=3, normalised=False),
    "sigmoid-shared": replace(PLAIN, scoring=Scoring.SIGMOID, shared=2),
    "one-of-one": replace(PLAIN, num=1, per_token=1),
}
WIDTH = 32


def model_of(experts: ExpertsSpec) -> ModelSpec:
    return ModelSpec(
        vocab_size=250,
        hidden_size=WIDTH,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        init_std=0.3,
        experts=experts,
    )


def mixture(experts: ExpertsSpec = PLAIN) -> MixtureMlp:
    made = build_reference(model_of(experts), seed=5).model.layers["0"].mlp
    assert isinstance(made, MixtureMlp)
    return made


def some_rows(num: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, WIDTH, generator=generator).requires_grad_()


def one_by_one(
    experts: ExpertsSpec, weights: dict[str, Tensor], x_TC: Tensor, biases_E: Tensor | None = None
) -> Tensor:
    """Returns what each token's experts make of it, one token and one expert at a time."""

    def mlp(x_C: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        gate, up, down = matrices
        return down @ (silu(gate @ x_C) * (up @ x_C))

    def named(start: str) -> list[Tensor]:
        return [weights[f"{start}.{name}_proj.weight"] for name in ("gate", "up", "down")]

    out: list[Tensor] = []
    for x_C in x_TC:
        logits_E = weights["gate.weight"] @ x_C
        is_softmax = experts.scoring == Scoring.SOFTMAX
        scores_E = logits_E.softmax(-1) if is_softmax else logits_E.sigmoid()
        seen_E = scores_E if biases_E is None else scores_E + biases_E
        chosen = seen_E.argsort(descending=True)[: experts.per_token].tolist()
        total = scores_E[chosen].sum() if experts.normalised else 1.0
        made_C = torch.zeros_like(x_C)
        for expert in chosen:
            matrices = [matrix[expert] for matrix in named("experts")]
            made_C = made_C + scores_E[expert] / total * mlp(x_C, matrices)
        out.append(made_C + mlp(x_C, named("shared_experts")) if experts.shared else made_C)
    return torch.stack(out)


def add_gradients(parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        assert parameter.grad is None
        parameter.grad = grad


def in_float64(mlp: MixtureMlp) -> dict[str, Tensor]:
    return {n: p.detach().double().requires_grad_() for n, p in mlp.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_a_loop_in_float64(kind: str) -> None:
    mlp, x_TC = mixture(KINDS[kind]), some_rows(37)
    weights, exact_TC = in_float64(mlp), x_TC.detach().double().requires_grad_()
    expected = one_by_one(KINDS[kind], weights, exact_TC)
    out = mlp(x_TC)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    gradient = some_rows(37, seed=1).detach()
    out.backward(gradient)
    expected.backward(gradient.double())
    pairs = {"x": (x_TC.grad, exact_TC.grad)}
    pairs |= {name: (p.grad, weights[name].grad) for name, p in mlp.named_parameters()}
    for name, (got, wanted) in pairs.items():
        assert got is not None
        assert wanted is not None
        # The score of the only expert is 1 whatever the router says.
        scale = wanted.abs().max().clamp(min=1e-6)
        assert ((got - wanted).abs().max() / scale) < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_deferred_gradients_are_the_same(kind: str) -> None:
    found: list[dict[str, Tensor]] = []
    for is_deferred in (False, True):
        mlp, waiting = mixture(KINDS[kind]), []
        if is_deferred:
            mlp.experts.defer = lambda p, compute, w=waiting: w.append((p, compute))
        mlp(some_rows(19)).square().sum().backward()
        assert len(waiting) == 2 * is_deferred
        for parameters, compute in waiting:
            add_gradients(parameters, compute())
        found.append({n: p.grad for n, p in mlp.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("is_deferred", [False, True])
def test_experts_without_rows_learn_nothing_from_memory(
    is_deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that leaves their weights' gradients as memory was."""
    monkeypatch.setattr(grouped, "grouped_mm", blackwell)
    monkeypatch.setattr(experts_module, "grouped_mm", blackwell)
    monkeypatch.setattr(grouped, "may_leave_groups_unwritten", lambda device: True)
    mlp, rows = mixture(), ExpertRows(num=2)
    if is_deferred:
        mlp.experts.defer = lambda parameters, compute: add_gradients(parameters, compute())
    mlp(some_rows(2), rows).square().sum().backward()
    has_none_E = rows.counts[mlp] == 0
    assert has_none_E.sum() >= 4
    for parameter in mlp.experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert torch.equal(parameter.grad.flatten(1).abs().amax(1) == 0, has_none_E)


@settings(deadline=None, max_examples=30)
@given(num=st.integers(0, 40), padding=st.integers(0, 5), seed=st.integers(0, 9))
def test_every_token_is_computed_once_and_padding_never(num: int, padding: int, seed: int) -> None:
    mlp, x_TC = mixture(), some_rows(num + padding, seed)
    rows = ExpertRows(num=num)
    out_TC = mlp(x_TC, rows)
    assert int(rows.counts[mlp].sum()) == num * PLAIN.per_token
    assert out_TC.shape == x_TC.shape
    assert not out_TC[num:].any()
    alone_TC = mlp(x_TC[:num])
    torch.testing.assert_close(out_TC[:num], alone_TC, atol=1e-6, rtol=1e-5)
    out_TC.sum().backward()
    assert x_TC.grad is not None
    assert not x_TC.grad[num:].any()


@settings(deadline=None, max_examples=30)
@given(order=st.permutations(range(12)))
def test_a_token_s_output_does_not_depend_on_its_place(order: list[int]) -> None:
    mlp, x_TC = mixture(), some_rows(12)
    torch.testing.assert_close(mlp(x_TC[order]), mlp(x_TC)[order], atol=1e-6, rtol=1e-5)


def test_the_same_rows_give_the_same_bits() -> None:
    mlp, first = mixture(KINDS["sigmoid-shared"]), some_rows(50)
    found: list[tuple[Tensor, ...]] = []
    for _ in range(2):
        mlp.zero_grad()
        x_TC = first.detach().clone().requires_grad_()
        out_TC = mlp(x_TC)
        out_TC.square().sum().backward()
        assert x_TC.grad is not None
        grads = [p.grad.clone() for p in mlp.parameters() if p.grad is not None]
        found.append((out_TC.detach(), x_TC.grad, *grads))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_biases_choose_and_do_not_weigh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "BIAS_RATE", 0.25)
    experts = replace(PLAIN, balance=ExpertBalance.BIAS)
    mlp, x_TC = mixture(experts), some_rows(23)
    mlp.load = torch.tensor([0, 10, 4, 4, 4, 4, 4, 2])  # the mean is 4
    mlp.rebalance()
    assert mlp.balance.tolist() == [0.25, -0.25, 0, 0, 0, 0, 0, 0.25]
    mlp.rebalance()
    assert mlp.balance.tolist() == [0.5, -0.5, 0, 0, 0, 0, 0, 0.5]
    expected = one_by_one(experts, in_float64(mlp), x_TC.detach().double(), mlp.balance.double())
    torch.testing.assert_close(mlp(x_TC).double(), expected, atol=1e-5, rtol=0)
    unbiased = one_by_one(PLAIN, in_float64(mlp), x_TC.detach().double())
    assert (expected - unbiased).abs().max() > 1e-2


@pytest.mark.parametrize("scoring", list(Scoring))
def test_the_auxiliary_loss_is_differentiated(scoring: Scoring) -> None:
    """By the shares of the step before, as a loss beside that which the model returns."""
    experts = replace(PLAIN, balance=ExpertBalance.AUX_LOSS, aux_coefficient=0.5, scoring=scoring)
    mlp, x_TC = mixture(experts), some_rows(11)
    rows = ExpertRows(num=9, row_weight=0.125)
    grads: list[Tensor] = []
    for share in (torch.zeros(8), torch.tensor([6.0, 2, 0, 0, 0, 0, 0, 0])):
        mlp.load = share
        mlp.rebalance()
        mlp.zero_grad()
        mlp(x_TC, rows).sum().backward()
        assert mlp.gate.weight.grad is not None
        grads.append(mlp.gate.weight.grad.clone())
    weight = mlp.gate.weight.detach().double().requires_grad_()
    logits = x_TC.detach()[:9].double() @ weight.t()
    scores = logits.softmax(-1)
    if scoring == Scoring.SIGMOID:
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    shares = torch.tensor([0.75, 0.25, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    (0.5 * 0.125 * 8 * (scores * shares).sum()).backward()
    assert weight.grad is not None
    torch.testing.assert_close((grads[1] - grads[0]).double(), weight.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("balance", [ExpertBalance.NONE, ExpertBalance.AUX_LOSS])
def test_the_z_loss_is_differentiated(balance: ExpertBalance) -> None:
    """As the mean of squared logsumexps, of rows before padding; also beside the auxiliary loss."""
    plain = replace(PLAIN, balance=balance, aux_coefficient=0.5)
    x_TC, rows = some_rows(11), ExpertRows(num=9, row_weight=0.125)
    grads: list[Tensor] = []
    for experts in (plain, replace(plain, z_loss=0.25)):
        mlp = mixture(experts)
        mlp.load = torch.arange(8)
        mlp.rebalance()
        mlp(x_TC, rows).sum().backward()
        assert mlp.gate.weight.grad is not None
        grads.append(mlp.gate.weight.grad)
    weight = mixture().gate.weight.detach().double().requires_grad_()
    logits = x_TC.detach()[:9].double() @ weight.t()
    (0.25 * 0.125 * logits.logsumexp(-1).square().sum()).backward()
    assert weight.grad is not None
    torch.testing.assert_close((grads[1] - grads[0]).double(), weight.grad, atol=1e-5, rtol=1e-4)
    assert weight.grad.abs().max() > 0.1


def test_a_step_without_rows_has_no_loss() -> None:
    mlp = mixture(replace(PLAIN, z_loss=0.25))
    mlp(some_rows(3), ExpertRows(num=0)).sum().backward()
    assert mlp.gate.weight.grad is not None
    assert not mlp.gate.weight.grad.any()


def test_names_and_numbers_of_parameters() -> None:
    for kind, experts in KINDS.items():
        spec = model_of(experts)
        model = Llama(spec)
        assert sum(p.numel() for p in model.parameters()) == spec.num_parameters, kind
    some = replace(model_of(replace(PLAIN, every=2, dense_layers=(1, 2))), num_layers=4)
    model = Llama(some)
    assert sum(p.numel() for p in model.parameters()) == some.num_parameters
    assert [layer.has_experts for layer in model.model.layers.values()] == [False] * 3 + [True]
    names = {name for name, _ in mixture(KINDS["sigmoid-shared"]).named_parameters()}
    assert names == {
        "gate.weight",
        *(f"experts.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")),
    }


def test_an_expert_starts_the_same_wherever_it_is() -> None:
    spec, name = model_of(PLAIN), "model.layers.0.mlp.experts.up_proj.weight"
    whole = initial_weight(name, torch.Size([8, 16, WIDTH]), spec, seed=3)
    part = initial_weight(name, torch.Size([2, 16, WIDTH]), spec, seed=3, first_expert=5)
    assert torch.equal(whole[5:7], part)
    assert not torch.equal(whole[0], whole[1])
    assert whole.std().item() == pytest.approx(0.3, rel=0.05)


def test_active_parameters_are_those_that_compute_a_token() -> None:
    spec = model_of(replace(PLAIN, shared=1))
    # 6 of 8 experts are idle for a token.
    assert spec.num_parameters - spec.num_active_parameters == 6 * 3 * WIDTH * 16
    assert spec.active_ffn_size == 3 * 16
