"""Section [model.linear]: a gated delta net instead of attention in most layers."""

from dataclasses import dataclass

from wlb.plan import UserError
from wlb.spec.keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """Section [model.linear]: linear-attention layers as in Qwen3-Next and Qwen3.5.

    If `num_value_heads` is 0, the model has no linear layers, and the other keys are unused.
    """

    num_value_heads: int = key(
        0,
        "number of value heads of a linear layer, which has a gated delta net instead of "
        "attention; every model.full_every-th layer has attention, and all others are linear; 0 = "
        "no linear layers (Qwen3-Next: 32)",
        at_least=0,
        at_most=65_536,
    )
    num_key_heads: int = key(
        16,
        "number of key heads of a linear layer; must divide num_value_heads",
        at_least=1,
        at_most=65_536,
    )
    key_head_dim: int = key(
        128, "number of channels of a key or query head", at_least=1, at_most=4096
    )
    value_head_dim: int = key(128, "number of channels of a value head", at_least=1, at_most=4096)
    conv_kernel_dim: int = key(
        4,
        "number of tokens that the short convolution reads, including the current token",
        unit="tokens",
        at_least=2,
        at_most=64,
    )

    @property
    def key_dim(self) -> int:
        """Width of keys, and of queries: the channels of all heads together."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of values: the channels of all heads together."""
        return self.num_value_heads * self.value_head_dim

    @property
    def latest(self) -> int:
        """Number of tokens before a span that the convolution reads for the span's first token."""
        return self.conv_kernel_dim - 1

    def parameters_of(self, width: int) -> int:
        """Return the number of parameters of a gated delta net.

        Args:
            width: Hidden size of the model.
        """
        projections = width * (2 * self.key_dim + 3 * self.value_dim + 2 * self.num_value_heads)
        convolution = (2 * self.key_dim + self.value_dim) * self.conv_kernel_dim
        return projections + convolution + 2 * self.num_value_heads + self.value_head_dim

    @property
    def summary_values(self) -> int:
        """Number of values in the summary of a span in one layer.

        For each value head the summary has two matrices. One multiplies the state before the span.
        The other is the state at the end of the span if the state before it is zero.
        """
        return self.num_value_heads * self.key_head_dim * (self.key_head_dim + self.value_head_dim)

    def check(self) -> None:
        """Raise UserError if the numbers of heads do not fit together."""
        if self.num_value_heads % self.num_key_heads:
            raise UserError(
                f"model.linear.num_value_heads = {self.num_value_heads} is not a multiple of "
                f"model.linear.num_key_heads = {self.num_key_heads}; change one of them"
            )
