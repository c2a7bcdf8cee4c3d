"""Tests the decoder: Hugging Face's names, textbook values, stages that chain, reproducible starts.

Shapes: T rows, C width, H query heads, G key/value heads, D head size.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.models import LLAMA2_7B
from wlb.kernels import Segments, attend
from wlb.model import (
    Llama,
    LocalAttend,
    Rows,
    build_reference,
    head_loss,
    initial_weight,
    inverse_frequencies,
    rope_tables,
)
from wlb.model.llama import EMBEDDING, HEAD
from wlb.plan import IGNORE
from wlb.spec import ModelSpec

SPEC = ModelSpec(
    vocab_size=250,
    hidden_size=24,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=40,
    init_std=0.2,
)


def rows_of(lengths: list[int], labels: Tensor | None = None, loss_scale: float = 1.0) -> Rows:
    """Returns rows of documents of `lengths` packed one after the other, on one rank."""
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    segments = Segments.from_offsets(offsets, offsets, device="cpu")
    positions = torch.cat([torch.arange(n) for n in lengths])
    cos, sin = rope_tables(positions, inverse_frequencies(SPEC))
    return Rows(
        cos=cos,
        sin=sin,
        attend=LocalAttend(lambda q, k, v: attend(q, k, v, segments, backend="reference")),
        labels=labels,
        loss_scale=loss_scale,
    )


def some_tokens(num: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 250, (num,), generator=torch.Generator().manual_seed(seed))


LAYER = [
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    "self_attn.k_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.weight",
    "self_attn.v_proj.weight",
]


def test_parameter_names_are_hugging_face_s() -> None:
    names = [name for name, _ in Llama(replace(SPEC, num_layers=1)).named_parameters()]
    assert sorted(names) == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        *(f"model.layers.0.{name}" for name in LAYER),
        "model.norm.weight",
    ]


def test_shapes() -> None:
    shapes = {n: list(p.shape) for n, p in Llama(SPEC).named_parameters()}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == [256, 24]
    layer = {n: shapes[f"model.layers.3.{n}"] for n in LAYER}
    assert layer == {
        "input_layernorm.weight": [24],
        "mlp.down_proj.weight": [24, 40],
        "mlp.gate_proj.weight": [40, 24],
        "mlp.up_proj.weight": [40, 24],
        "post_attention_layernorm.weight": [24],
        "self_attn.k_proj.weight": [16, 24],
        "self_attn.o_proj.weight": [24, 32],
        "self_attn.q_proj.weight": [32, 24],
        "self_attn.v_proj.weight": [16, 24],
    }


def test_parts_of_other_families_have_hugging_face_s_names() -> None:
    def names(**parts: bool) -> set[str]:
        spec = replace(SPEC, num_layers=1, **parts)
        return {name for name, _ in Llama(spec).named_parameters()}

    layer = "model.layers.0.self_attn."
    plain = names()
    assert names(qkv_bias=True) - plain == {f"{layer}{n}_proj.bias" for n in "qkv"}
    assert names(qk_norm=True) - plain == {f"{layer}{n}_norm.weight" for n in "qk"}
    assert plain - names(tied_embeddings=True) == {"lm_head.weight"}


def test_biases_start_at_zero_and_a_copy_of_the_embedding_equals_it() -> None:
    spec = replace(SPEC, tied_embeddings=True)
    size = torch.Size([256, 24])
    embedding, head = (initial_weight(name, size, spec, seed=3) for name in (EMBEDDING, HEAD))
    assert torch.equal(embedding, head)
    assert not torch.equal(embedding, initial_weight(HEAD, size, SPEC, seed=3))
    bias = initial_weight("model.layers.0.self_attn.q_proj.bias", torch.Size([8]), spec, seed=3)
    assert not bias.any()


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, vocab_size=257, num_layers=1, num_kv_heads=4),
        replace(SPEC, head_dim=0, num_kv_heads=1, ffn_hidden_size=7, vocab_size=256),
        replace(SPEC, qkv_bias=True, tied_embeddings=True),
        replace(SPEC, qk_norm=True),
    ],
)
def test_the_number_of_parameters_is_the_spec_s(spec: ModelSpec) -> None:
    assert sum(p.numel() for p in Llama(spec).parameters()) == spec.num_parameters


def test_llama2_7b_has_as_many_parameters_as_published() -> None:
    spec = LLAMA2_7B
    assert spec.num_parameters == 6_738_415_616
    with torch.device("meta"):
        assert sum(p.numel() for p in Llama(spec).parameters()) == 6_738_415_616


def textbook(weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Returns log-probabilities of one document, row by row and head by head, by complex
    rotations.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + SPEC.norm_eps).sqrt() * weights[name]

    def turned(x: Tensor, position: int) -> Tensor:
        exponents = torch.arange(4, dtype=torch.float64) / 4
        angle = position * torch.tensor(SPEC.rope_theta, dtype=torch.float64) ** -exponents
        z = torch.complex(x[:4], x[4:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag])

    xs = [weights["model.embed_tokens.weight"][t] for t in tokens]
    for layer in range(SPEC.num_layers):
        at = f"model.layers.{layer}."
        keys: list[list[Tensor]] = []
        values: list[list[Tensor]] = []
        for i, x in enumerate(xs):
            y = norm(x, at + "input_layernorm.weight")
            q, k, v = (
                (weights[f"{at}self_attn.{n}_proj.weight"] @ y).split(SPEC.head_dim) for n in "qkv"
            )
            keys.append([turned(head, i) for head in k])
            values.append(list(v))
            heads = []
            for h, query in enumerate(q):
                g = h // 2  # two query heads share a key head
                scores = [turned(query, i) @ key[g] / math.sqrt(8) for key in keys]
                share = torch.stack(scores).softmax(0)
                heads.append(sum(s * value[g] for s, value in zip(share, values, strict=True)))
            xs[i] = x + weights[at + "self_attn.o_proj.weight"] @ torch.cat(heads)
            y = norm(xs[i], at + "post_attention_layernorm.weight")
            gate, up = (weights[f"{at}mlp.{n}_proj.weight"] @ y for n in ("gate", "up"))
            xs[i] = xs[i] + weights[at + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
    out = torch.stack([norm(x, "model.norm.weight") for x in xs])
    return (out @ weights["lm_head.weight"][: SPEC.vocab_size].t()).log_softmax(-1)


def test_loss_of_packed_documents_is_the_textbook_s() -> None:
    model = build_reference(SPEC, seed=3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:  # norms that are all one would hide a norm that is left out
                p.copy_(torch.linspace(0.5, 1.5, p.numel()) + 0.01 * len(name))
    lengths = [5, 1, 3]
    tokens = some_tokens(9)
    labels = tokens.roll(-1)
    labels[[4, 5, 8]] = IGNORE
    loss = model(tokens, rows=rows_of(lengths, labels, loss_scale=0.25))
    weights = {n: p.detach().double() for n, p in model.named_parameters()}
    expected = 0.0
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        document = tokens[start:stop].tolist()
        scores = textbook(weights, document)
        expected -= sum(scores[i, t].item() for i, t in enumerate(document[1:]))
    assert loss.item() == pytest.approx(0.25 * expected, rel=1e-5)


def test_packed_documents_do_not_see_each_other_nor_what_follows() -> None:
    model = build_reference(SPEC)
    body, rows = model.model, rows_of([4, 3])
    tokens = some_tokens(7)
    with torch.no_grad():
        before = body(tokens, rows)
        changed = tokens.clone()
        changed[2] = (tokens[2] + 1) % 250
        after = body(changed, rows)
    same = (before == after).all(-1)
    assert same.tolist() == [True, True, False, False, True, True, True]


def test_stages_chain_to_the_whole_model() -> None:
    whole = build_reference(SPEC, seed=1)
    ranges = (range(1), range(1, 3), range(3, 4))
    stages = [Llama(SPEC, layers=r, is_first=r.start == 0, is_last=r.stop == 4) for r in ranges]
    own = [{n for n, _ in stage.named_parameters()} for stage in stages]
    assert [len(names) for names in own] == [1 + 9, 2 * 9, 9 + 2]
    assert set.union(*own) == {n for n, _ in whole.named_parameters()}
    for stage in stages:
        stage.load_state_dict({n: whole.state_dict()[n] for n in stage.state_dict()})
    tokens = some_tokens(7)
    labels = tokens.roll(-1)
    rows = rows_of([4, 3], labels)
    x = tokens
    for stage in stages:
        x = stage(x, rows=rows)
    expected = whole(tokens, rows=rows)
    assert x.item() > 1
    assert torch.equal(x, expected)
    x.backward()
    expected.backward()
    reference = {n: p.grad for n, p in whole.named_parameters()}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter.grad, reference[name]), name
            assert parameter.grad.abs().amax() > 0, name


def test_the_head_is_the_chunked_loss_of_the_last_rows() -> None:
    model = build_reference(SPEC)
    tokens = some_tokens(7)
    rows = rows_of([7], tokens.roll(-1), loss_scale=0.5)
    body = model.model(tokens, rows)
    expected = head_loss(body, model.lm_head.weight, rows.labels, vocab_size=250, chunk=7)
    assert torch.equal(model(tokens, rows=rows), 0.5 * expected)
    model.loss_chunk = 2
    torch.testing.assert_close(model(tokens, rows=rows), 0.5 * expected)


class Recorded:
    """Is attention that notes when it is told what, and gives the queries back."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.moved, self.attended = torch.zeros(0), torch.zeros(0)

    def begin(self, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        self.events.append("begin")
        return self.moved

    def attend(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, begun: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert begun is self.moved
        self.events.append("attend")
        return q_THD, self.attended

    def add(self, x_TC: Tensor, y_TC: Tensor, attended: Tensor) -> Tensor:
        assert attended is self.attended
        self.events.append("add")
        return x_TC + y_TC


def test_keys_and_values_leave_before_queries_are_computed() -> None:
    attention = Recorded()
    layer = build_reference(SPEC).model.layers["0"]
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = layer.self_attn.get_submodule(name)
        projection.register_forward_hook(lambda *_, name=name: attention.events.append(name))
    layer(torch.randn(7, 24), replace(rows_of([4, 3]), attend=attention))
    assert attention.events == ["k_proj", "v_proj", "begin", "q_proj", "attend", "add"]


NAME = "model.layers.2.self_attn.q_proj.weight"


def start(
    name: str = NAME, shape: tuple[int, ...] = (64, 96), spec: ModelSpec = SPEC, seed: int = 0
) -> Tensor:
    return initial_weight(name, torch.Size(shape), spec, seed=seed)


def test_initial_weights_are_a_function_of_name_and_seed() -> None:
    torch.manual_seed(1)
    first = start()
    torch.manual_seed(2)
    assert torch.equal(start(), first)
    others = [start(seed=1), start(NAME.replace("2", "3")), start(NAME.replace("q_", "k_"))]
    values = [first, *others]
    for i in range(4):
        assert not any(torch.equal(values[i], values[j]) for j in range(i))
    assert first.dtype == torch.float32
    assert first.std().item() == pytest.approx(0.2, rel=0.05)
    assert first.mean().item() == pytest.approx(0.0, abs=0.01)


def test_initial_weights_do_not_touch_the_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    start()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("end", ["self_attn.o_proj.weight", "mlp.down_proj.weight"])
def test_ends_of_residual_branches_start_smaller_in_deeper_models(end: str) -> None:
    name = f"model.layers.0.{end}"
    shallow, deep = (start(name, spec=replace(SPEC, num_layers=n)) for n in (2, 32))
    torch.testing.assert_close(deep * 4, shallow)
    assert shallow.std().item() == pytest.approx(0.2 / math.sqrt(2 * 2), rel=0.05)


def test_other_matrices_do_not_depend_on_the_depth() -> None:
    for name in (NAME, "lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
        shallow, deep = (start(name, spec=replace(SPEC, num_layers=n)) for n in (2, 32))
        assert torch.equal(shallow, deep)


def test_norms_start_at_one() -> None:
    assert torch.equal(start("model.norm.weight", (24,)), torch.ones(24))


def test_the_reference_holds_these_weights() -> None:
    model = build_reference(SPEC, seed=7)
    for name, parameter in model.named_parameters():
        expected = initial_weight(name, parameter.shape, SPEC, seed=7)
        assert torch.equal(parameter, expected), name
    assert next(build_reference(SPEC, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16
