"""The [model.experts] section: a mixture of experts in place of the MLP of all or some layers."""

from dataclasses import dataclass
from enum import StrEnum

from wlb.plan import UserError
from wlb.spec.keys import key

ROW_VALUES = 8
"""Grouped products take rows whose bytes are a multiple of 16: of bfloat16, 8 values."""


class Scoring(StrEnum):
    """How a router's logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class ExpertBalance(StrEnum):
    """What keeps the tokens of experts equal in number."""

    NONE = "none"
    BIAS = "bias"
    AUX_LOSS = "aux_loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Experts of decoder layers; none while num is 0, which leaves the other keys unused."""

    num: int = key(
        0, "experts of a layer, instead of its MLP; 0 = dense MLPs", at_least=0, at_most=4096
    )
    every: int = key(
        1,
        "each n-th layer has experts, the others an MLP of model.ffn_hidden_size (Qwen3-MoE's "
        "decoder_sparse_step); 1 = all layers",
        at_least=1,
        at_most=10_000,
    )
    dense_layers: tuple[int, ...] = key(
        (),
        "further layers that have an MLP, counted from 0 (Qwen3-MoE's mlp_only_layers; [0, 1, 2] = "
        "DeepSeek-V3's first_k_dense_replace of 3)",
        at_least=0,
        at_most=9_999,
    )
    per_token: int = key(
        2, "experts that compute a token, those of its highest scores", at_least=1, at_most=4096
    )
    hidden_size: int = key(
        1408, "hidden size of an expert, which is a SwiGLU MLP", at_least=1, at_most=2**24
    )
    shared: int = key(
        0,
        "experts that compute every token besides those it chooses; one MLP of so many times "
        "hidden_size",
        at_least=0,
        at_most=4096,
    )
    shared_gate: bool = key(
        False,
        "what the shared experts give is multiplied by the sigmoid of a number that the router's "
        "input gives for each token (Qwen2-MoE, Qwen3-Next)",
    )
    scoring: Scoring = key(Scoring.SOFTMAX, "scores of experts from the router's logits, float32")
    normalised: bool = key(
        True,
        "the scores of a token's experts are divided by their sum; must be false with one expert a "
        "token, whose score would be 1 whatever the router computes",
    )
    balance: ExpertBalance = key(
        ExpertBalance.NONE,
        "what keeps experts equally loaded: bias = each expert has a bias that only the choice "
        "sees, moved after each step by the sign of its missing load; aux_loss = an auxiliary "
        "loss; both by the tokens of all ranks",
    )
    aux_coefficient: float = key(
        1e-3,
        "factor of the auxiliary loss (balance = aux_loss): experts x sum of an expert's share of "
        "the step before and its mean score over the step's tokens, a layer",
        at_least=0,
        at_most=1000,
    )
    z_loss: float = key(
        0.0,
        "factor of the router's z-loss: mean over the step's tokens of its logits' squared "
        "logsumexp, a layer, which keeps them small; 0 = none (OLMoE: 0.001)",
        at_least=0,
        at_most=1000,
    )

    def are_in(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has the experts of a model that has some."""
        return (layer + 1) % self.every == 0 and layer not in self.dense_layers

    @property
    def never_learns(self) -> bool:
        """Whether the router gets no gradient: the only score of a token over its sum is 1."""
        return self.num > 1 and self.per_token == 1 and self.normalised

    @property
    def active_hidden_size(self) -> int:
        """Hidden size of all experts that compute a token."""
        return (self.per_token + self.shared) * self.hidden_size

    @property
    def shared_hidden_size(self) -> int:
        return self.shared * self.hidden_size

    def parameters_of(self, width: int) -> int:
        """Parameters of a layer's router, experts and shared experts, for rows `width` wide."""
        experts = (self.num + self.shared) * 3 * width * self.hidden_size
        return self.num * width + experts + width * self.shared_gate

    def check(self, width: int) -> None:
        if not self.num:
            return
        if self.shared_gate and not self.shared:
            raise UserError(
                "model.experts.shared_gate = true with model.experts.shared = 0: there are no "
                "shared experts to gate; set it to false"
            )
        if self.per_token > self.num:
            raise UserError(
                f"model.experts.per_token = {self.per_token} is more than model.experts.num = "
                f"{self.num}; lower it"
            )
        sizes = {"model.experts.hidden_size": self.hidden_size, "model.hidden_size": width}
        for name, size in sizes.items():
            if size % ROW_VALUES:
                raise UserError(
                    f"{name} = {size} is not a multiple of {ROW_VALUES}, which grouped products of "
                    f"model.experts need; use {size + -size % ROW_VALUES}"
                )
