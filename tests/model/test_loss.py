"""Tests head and cross-entropy in chunks against torch's cross-entropy on all logits at once."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from wlb.model import VocabularyShard, capped, head_loss
from wlb.plan import IGNORE

ROWS, WIDTH, VOCAB, PADDED = 11, 6, 13, 16


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows, the padded head and labels; some rows are not trained."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(PADDED, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[[2, 3, 10]] = IGNORE
    return x.requires_grad_(), weight.requires_grad_(), labels


def plain(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Takes all logits of the real vocabulary, in the inputs' dtype; softmax in at least
    float32.
    """
    logits = x @ weight[:VOCAB].t()
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def chunked(x: Tensor, weight: Tensor, labels: Tensor, chunk: int = ROWS) -> Tensor:
    return head_loss(x, weight, labels, vocab_size=VOCAB, chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 3, ROWS, 1000])
def test_value_and_gradients_are_those_of_cross_entropy(chunk: int) -> None:
    x, weight, labels = inputs()
    expected = plain(x, weight, labels)
    wanted = torch.autograd.grad(3 * expected, (x, weight))
    loss = chunked(x, weight, labels, chunk)
    got = torch.autograd.grad(3 * loss, (x, weight))
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(got, wanted)
    assert got[1][:VOCAB].abs().amin() > 0  # of real entries; padding has none
    assert torch.equal(got[1][VOCAB:], torch.zeros(PADDED - VOCAB, WIDTH))
    assert torch.equal(got[0][[2, 3, 10]], torch.zeros(3, WIDTH))


@pytest.mark.parametrize("chunk", [3, 1000])
def test_capped_logits(chunk: int) -> None:
    x, weight, labels = inputs()
    logits = 0.7 * torch.tanh((x @ weight[:VOCAB].t()) / 0.7)
    torch.testing.assert_close(logits, capped(x @ weight[:VOCAB].t(), 0.7))
    expected = functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    wanted = torch.autograd.grad(3 * expected, (x, weight))
    loss = head_loss(x, weight, labels, vocab_size=VOCAB, chunk=chunk, softcap=0.7)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * loss, (x, weight)), wanted)


def test_uniform_logits_cost_the_log_of_the_real_vocabulary() -> None:
    labels = torch.tensor([0, 5, IGNORE])
    loss = chunked(torch.zeros(3, WIDTH), torch.ones(PADDED, WIDTH), labels)
    torch.testing.assert_close(loss, 2 * torch.tensor(float(VOCAB)).log())


def test_padding_of_the_vocabulary_changes_nothing() -> None:
    x, weight, labels = inputs()
    with torch.no_grad():
        weight[VOCAB:] = 1e4  # would win every softmax
    loss = chunked(x, weight, labels)
    bare = weight[:VOCAB].detach().requires_grad_()
    unpadded = chunked(x, bare, labels)
    torch.testing.assert_close(loss, unpadded, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(loss, (x, weight))[1][:VOCAB], torch.autograd.grad(unpadded, bare)[0]
    )


def test_large_logits_do_not_overflow() -> None:
    x, weight, labels = inputs()
    loss = chunked(1000 * x, weight, labels)
    torch.testing.assert_close(loss, plain(1000 * x, weight, labels))
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, weight)))


@pytest.mark.parametrize("chunk", [3, ROWS])
def test_bfloat16_errs_no_more_than_twice_as_much_as_plain_bfloat16(chunk: int) -> None:
    x, weight, labels = inputs(torch.bfloat16)
    exact_inputs = (x.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    exact = plain(*exact_inputs, labels)
    exact_grads = torch.autograd.grad(exact, exact_inputs)
    errors: list[list[float]] = []
    for loss in (chunked(x, weight, labels, chunk), plain(x, weight, labels)):
        grads = torch.autograd.grad(loss, (x, weight))
        assert {g.dtype for g in grads} == {torch.bfloat16}
        pairs = [(loss.detach(), exact.detach()), *zip(grads, exact_grads, strict=True)]
        errors.append([float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs])
    ours, theirs = errors
    assert max(theirs) < 0.1  # the yardstick itself is sound
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine <= 2 * reference + 1e-6


def test_many_small_chunks_add_up_in_float32() -> None:
    """In bfloat16 the head's gradient would stop growing after 256 equal parts."""
    x, weight, _ = inputs(torch.bfloat16)
    many = x[:1].detach().repeat(2000, 1)
    loss = chunked(many, weight, torch.zeros(2000, dtype=torch.long), 1)
    (dweight,) = torch.autograd.grad(loss, weight)
    one = chunked(many[:1], weight, torch.zeros(1, dtype=torch.long), 1)
    (part,) = torch.autograd.grad(one, weight)
    torch.testing.assert_close(dweight.float(), 2000 * part.float(), rtol=0.01, atol=0)
    torch.testing.assert_close(loss, 2000 * one, rtol=1e-4, atol=0)


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    x, weight, labels = inputs()
    options = {"vocab_size": VOCAB, "chunk": 4}
    scattered: list[Tensor] = []

    def scatter(dx_TC: Tensor) -> Tensor:
        scattered.append(dx_TC)
        return dx_TC

    counting = VocabularyShard(scatter=scatter)
    loss = head_loss(x, weight, labels, **options, vocabulary=counting)
    assert len(scattered) == 1
    with torch.no_grad():
        silent = head_loss(x, weight, labels, **options, vocabulary=counting)
    detached = head_loss(x.detach(), weight.detach(), labels, **options, vocabulary=counting)
    assert len(scattered) == 1
    assert not silent.requires_grad
    assert not detached.requires_grad
    assert torch.equal(silent, loss)
    assert torch.equal(detached, loss)


def test_only_one_of_the_inputs_may_need_a_gradient() -> None:
    x, weight, labels = inputs()
    wanted = torch.autograd.grad(plain(x, weight, labels), (x, weight))
    (dx,) = torch.autograd.grad(chunked(x, weight.detach(), labels), x)
    (dweight,) = torch.autograd.grad(chunked(x.detach(), weight, labels), weight)
    torch.testing.assert_close((dx, dweight), wanted)


def test_nothing_to_train_is_zero_with_zero_gradients() -> None:
    x, weight, _ = inputs()
    loss = chunked(x, weight, torch.full((ROWS,), IGNORE))
    assert loss.item() == 0.0
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    assert torch.equal(dx, torch.zeros_like(x))
    assert torch.equal(dweight, torch.zeros_like(weight))


def test_no_rows_at_all() -> None:
    _, weight, labels = inputs()
    x = torch.empty(0, WIDTH, requires_grad=True)
    loss = chunked(x, weight, labels[:0])
    assert loss.item() == 0.0
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    assert dx.shape == (0, WIDTH)
    assert torch.equal(dweight, torch.zeros_like(weight))
