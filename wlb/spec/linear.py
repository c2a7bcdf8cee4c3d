"""Section [model.linear]: a gated delta net instead of attention in most layers."""

from dataclasses import dataclass

from wlb.plan import UserError
from wlb.spec.keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """Section [model.linear]: linear-attention layers as in Qwen3-Next and Qwen3.5.

    With num_value_heads = 0 there are none, and the other keys are unused.
    """

    num_value_heads: int = key(
        0,
        "value heads of the gated delta net that all layers except every model.full_every-th one "
        "have instead of attention; 0 = all layers have attention",
        at_least=0,
        at_most=65_536,
    )
    num_key_heads: int = key(
        16, "key heads of a linear layer; must divide num_value_heads", at_least=1, at_most=65_536
    )
    key_head_dim: int = key(128, "size of a key and query head", at_least=1, at_most=4096)
    value_head_dim: int = key(128, "size of a value head", at_least=1, at_most=4096)
    conv_kernel_dim: int = key(
        4,
        "tokens that the short convolution reads, with the current one",
        unit="tokens",
        at_least=2,
        at_most=64,
    )

    @property
    def key_dim(self) -> int:
        """Columns of keys, or of queries: all heads together."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Columns of values: all heads together."""
        return self.num_value_heads * self.value_head_dim

    @property
    def latest(self) -> int:
        """Number of tokens before a span that the convolution of its first token reads."""
        return self.conv_kernel_dim - 1

    def parameters_of(self, width: int) -> int:
        """Return the parameters of a gated delta net. `width` is the model's hidden size."""
        projections = width * (2 * self.key_dim + 3 * self.value_dim + 2 * self.num_value_heads)
        convolution = (2 * self.key_dim + self.value_dim) * self.conv_kernel_dim
        return projections + convolution + 2 * self.num_value_heads + self.value_head_dim

    @property
    def summary_values(self) -> int:
        """Numbers in the summary of a span in one layer.

        For each value head the summary has two matrices: the one by which the span multiplies the
        state before it, and the state at the span's end if the state before it is zero.
        """
        return self.num_value_heads * self.key_head_dim * (self.key_head_dim + self.value_head_dim)

    def check(self) -> None:
        """Raise UserError if the numbers of heads do not fit together."""
        if self.num_value_heads % self.num_key_heads:
            raise UserError(
                f"model.linear.num_value_heads = {self.num_value_heads} is not a multiple of "
                f"model.linear.num_key_heads = {self.num_key_heads}"
            )
