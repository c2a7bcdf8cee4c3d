"""The [model] section: shapes and parts of a decoder of the LLaMA and Qwen families."""

from dataclasses import dataclass, field

from wlb.plan import UserError
from wlb.spec.experts import ExpertsSpec
from wlb.spec.keys import check_declared, key


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama-3's frequency scaling; off while factor is 1."""

    factor: float = key(
        1.0, "context length relative to the length in pre-training; 1 = off", above=0, at_most=1e6
    )
    low_freq_factor: float = key(
        1.0,
        "wavelengths above original_context / this are scaled by the whole factor",
        at_least=0,
        at_most=1e9,
    )
    high_freq_factor: float = key(
        4.0, "wavelengths below original_context / this are not scaled", at_least=0, at_most=1e9
    )
    original_context: int = key(
        8192, "context length in pre-training", unit="tokens", at_least=1, at_most=2**40
    )

    def check(self) -> None:
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise UserError(
                f"model.rope_scaling.low_freq_factor = {self.low_freq_factor} must be above 0 and "
                f"below high_freq_factor = {self.high_freq_factor}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A LLaMA decoder: RMSNorm, RoPE, SwiGLU, grouped-query attention; keys add parts of others."""

    vocab_size: int = key(
        0, "vocabulary size; 0 = that of the token store", unit="tokens", at_least=0, at_most=2**27
    )
    hidden_size: int = key(512, "width of the residual stream", at_least=1, at_most=2**20)
    num_layers: int = key(8, "decoder layers", at_least=1, at_most=10_000)
    num_heads: int = key(8, "query heads", at_least=1, at_most=65_536)
    num_kv_heads: int = key(8, "key/value heads; must divide num_heads", at_least=1, at_most=65_536)
    head_dim: int = key(
        0, "size of an attention head; 0 = hidden_size / num_heads", at_least=0, at_most=65_536
    )
    ffn_hidden_size: int = key(1408, "hidden size of the SwiGLU MLP", at_least=1, at_most=2**24)
    qkv_bias: bool = key(False, "projections to Q, K and V have biases (Qwen2)")
    qk_norm: bool = key(False, "each head of Q and K goes through an RMSNorm before RoPE (Qwen3)")
    qk_norm_rows: bool = key(
        False, "rows of Q and K, all heads together, go through an RMSNorm before RoPE (OLMoE)"
    )
    tied_embeddings: bool = key(
        False, "the head is the embedding; with pipeline stages both ends add their gradients"
    )
    norm_eps: float = key(1e-5, "epsilon of RMSNorm", above=0, at_most=1)
    init_std: float = key(
        0.02, "standard deviation of the initial weights", at_least=0, at_most=1000
    )
    rope_theta: float = key(10000.0, "base of the rotary frequencies", above=0, at_most=1e15)
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    experts: ExpertsSpec = field(default_factory=ExpertsSpec)

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_size

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_size

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def active_ffn_size(self) -> int:
        """Hidden size of the MLPs that compute a token: of its experts, if there are any."""
        return self.experts.active_hidden_size if self.experts.num else self.ffn_hidden_size

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary size rounded up to a multiple of 256, independent of tp."""
        return -(-self.vocab_size // 256) * 256

    @property
    def num_layer_parameters(self) -> int:
        attention = self.hidden_size * (2 * self.q_dim + 2 * self.kv_dim)
        biases = self.qkv_bias * (self.q_dim + 2 * self.kv_dim)
        mlp = 3 * self.hidden_size * self.ffn_hidden_size
        if self.experts.num:
            mlp = self.experts.parameters_of(self.hidden_size)
        return attention + mlp + biases + self.num_layer_norm_parameters

    @property
    def num_layer_norm_parameters(self) -> int:
        """Of a layer's norms, which tensor parallelism does not divide."""
        of_heads = 2 * self.head_size if self.qk_norm else 0
        of_heads += (self.q_dim + self.kv_dim) * self.qk_norm_rows
        return 2 * self.hidden_size + of_heads

    @property
    def norms_keys(self) -> bool:
        """Whether Q and K are normalised, by head or by row."""
        return self.qk_norm or self.qk_norm_rows

    @property
    def num_parameters(self) -> int:
        ends = (2 - self.tied_embeddings) * self.padded_vocab_size * self.hidden_size
        ends += self.hidden_size
        return self.num_layers * self.num_layer_parameters + ends

    @property
    def num_active_parameters(self) -> int:
        """Parameters that compute a token: without those of experts that it does not choose."""
        experts = self.experts
        idle = (experts.num - experts.per_token) * 3 * self.hidden_size * experts.hidden_size
        return self.num_parameters - bool(experts.num) * self.num_layers * idle

    def check(self) -> None:
        check_declared(self, prefix="model.")
        self.rope_scaling.check()
        self.experts.check(self.hidden_size)
        if self.qk_norm and self.qk_norm_rows:
            raise UserError(
                "model.qk_norm = true and model.qk_norm_rows = true: Q and K have one norm each, "
                "of heads or of rows; set one of them to false"
            )
        if not self.head_dim and self.hidden_size % self.num_heads:
            raise UserError(
                f"model.hidden_size = {self.hidden_size} is not a multiple of model.num_heads = "
                f"{self.num_heads}; change one of them or set model.head_dim"
            )
        if self.head_size % 2:
            raise UserError(
                f"head size {self.head_size} is odd, but RoPE rotates pairs; set an even "
                f"model.head_dim"
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model.num_heads = {self.num_heads} is not a multiple of model.num_kv_heads = "
                f"{self.num_kv_heads}"
            )
