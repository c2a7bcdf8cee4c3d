"""The [model.linear] section: gated delta net in place of attention in most layers."""

from dataclasses import dataclass

from wlb.plan import UserError
from wlb.spec.keys import key


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """Linear layers, as Qwen3-Next and Qwen3.5 have them; none while num_value_heads is 0, which
    leaves the other keys unused.
    """

    num_value_heads: int = key(
        0,
        "value heads of a gated delta net, which all layers have but each model.full_every-th one; "
        "0 = all layers have attention",
        at_least=0,
        at_most=65_536,
    )
    num_key_heads: int = key(
        16, "its key heads; must divide num_value_heads", at_least=1, at_most=65_536
    )
    key_head_dim: int = key(128, "size of a head of its keys and queries", at_least=1, at_most=4096)
    value_head_dim: int = key(128, "size of a head of its values", at_least=1, at_most=4096)
    conv_kernel_dim: int = key(
        4,
        "tokens that its short convolution reads, the latest one included",
        unit="tokens",
        at_least=2,
        at_most=64,
    )

    @property
    def key_dim(self) -> int:
        """Columns of all heads of keys, or of queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Columns of all heads of values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def latest(self) -> int:
        """Tokens before a span of a document that the convolution reads."""
        return self.conv_kernel_dim - 1

    def parameters_of(self, width: int) -> int:
        """Parameters of a layer's gated delta net, for rows `width` wide."""
        projections = width * (2 * self.key_dim + 3 * self.value_dim + 2 * self.num_value_heads)
        convolution = (2 * self.key_dim + self.value_dim) * self.conv_kernel_dim
        return projections + convolution + 2 * self.num_value_heads + self.value_head_dim

    @property
    def summary_values(self) -> int:
        """Values of a span's summary in a layer: of each value head, what becomes of a state, and
        the state that the span ends with from zero.
        """
        return self.num_value_heads * self.key_head_dim * (self.key_head_dim + self.value_head_dim)

    def check(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise UserError(
                f"model.linear.num_value_heads = {self.num_value_heads} is not a multiple of "
                f"model.linear.num_key_heads = {self.num_key_heads}"
            )
