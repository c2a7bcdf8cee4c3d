"""Section [model.experts]: a mixture of experts instead of the MLP in all or some layers."""

from dataclasses import dataclass
from enum import StrEnum

from wlb.plan import UserError
from wlb.spec.keys import key

ROW_VALUES = 8
"""Hidden sizes must be multiples of this number.

torch's grouped matrix products need rows of a multiple of 16 bytes, which are 8 bfloat16 values."""


class Scoring(StrEnum):
    """Function that turns a router's logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class ExpertBalance(StrEnum):
    """Method that keeps experts equally loaded."""

    NONE = "none"
    BIAS = "bias"  # add a bias to each expert's score when experts are chosen
    AUX_LOSS = "aux_loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Section [model.experts]. If `num` is 0, layers have no experts, and other keys are unused."""

    num: int = key(
        0,
        "number of experts in each layer that has experts; 0 = all layers have dense MLPs",
        at_least=0,
        at_most=4096,
    )
    every: int = key(
        1,
        "every n-th layer has experts, and the others have an MLP of model.ffn_hidden_size "
        "(Qwen3-MoE's decoder_sparse_step); 1 = all layers have experts",
        at_least=1,
        at_most=10_000,
    )
    dense_layers: tuple[int, ...] = key(
        (),
        "layers, counted from 0, that have an MLP although `every` would give them experts "
        "(Qwen3-MoE's mlp_only_layers; for DeepSeek-V3's first_k_dense_replace = 3, set [0, 1, 2])",
        at_least=0,
        at_most=9_999,
    )
    per_token: int = key(
        2,
        "number of experts that process each token; these are the experts with the highest scores",
        at_least=1,
        at_most=4096,
    )
    hidden_size: int = key(
        1408, "intermediate (FFN) size of each expert, a SwiGLU MLP", at_least=1, at_most=2**24
    )
    shared: int = key(
        0,
        "number of shared experts, which process every token in addition to its chosen experts; "
        "they are computed as one MLP, whose intermediate size is this number times hidden_size",
        at_least=0,
        at_most=4096,
    )
    shared_gate: bool = key(
        False,
        "multiply the output of the shared experts by the sigmoid of a learned gate, one number "
        "per token (Qwen2-MoE, Qwen3-Next)",
    )
    scoring: Scoring = key(
        Scoring.SOFTMAX, "function that turns the router's logits into scores, in float32"
    )
    normalised: bool = key(
        True,
        "divide the scores of a token's chosen experts by their sum; must be false if per_token = "
        "1, because the score of the only expert would always be 1",
    )
    balance: ExpertBalance = key(
        ExpertBalance.NONE,
        "how experts are kept equally loaded: none = not at all; bias = each expert has a bias, "
        "which is added to its scores only to choose experts; after each step, the bias rises by a "
        "fixed amount if the expert got fewer tokens than the mean, and falls if it got more; "
        "aux_loss = an auxiliary loss; both methods count the tokens of all ranks",
    )
    aux_coefficient: float = key(
        1e-3,
        "coefficient of each layer's load-balancing loss (balance = aux_loss), often 1e-3 to 1e-2; "
        "the loss is num_experts * sum over experts e of f_e * p_e, where f_e is the fraction of "
        "the previous step's tokens routed to e, and p_e the mean router score of e in this step",
        at_least=0,
        at_most=1000,
    )
    z_loss: float = key(
        0.0,
        "coefficient of the router z-loss in each layer, which keeps the router's logits small; "
        "z-loss = the mean of logsumexp(logits)^2 over the tokens of the step; 0 = no z-loss "
        "(OLMoE: 0.001)",
        at_least=0,
        at_most=1000,
    )

    def are_in(self, layer: int) -> bool:
        """Return whether layer `layer`, counted from 0, would have experts if `num` is above 0."""
        return (layer + 1) % self.every == 0 and layer not in self.dense_layers

    @property
    def never_learns(self) -> bool:
        """Whether the router gets no gradient, because the score of a token's expert is always 1.

        This is so if each token has a single expert and scores are normalised.
        """
        return self.num > 1 and self.per_token == 1 and self.normalised

    @property
    def active_hidden_size(self) -> int:
        """Summed intermediate size of all experts that process a token, including shared ones."""
        return (self.per_token + self.shared) * self.hidden_size

    @property
    def shared_hidden_size(self) -> int:
        """Intermediate size of all shared experts together."""
        return self.shared * self.hidden_size

    def parameters_of(self, width: int) -> int:
        """Return the number of parameters of a layer's router, experts and shared experts.

        Args:
            width: Hidden size of the model.
        """
        experts = (self.num + self.shared) * 3 * width * self.hidden_size
        return self.num * width + experts + width * self.shared_gate

    def check(self, width: int) -> None:
        """Raise UserError for settings of this section that cannot work.

        Args:
            width: Hidden size of the model.
        """
        if not self.num:
            return
        if self.shared_gate and not self.shared:
            raise UserError(
                "model.experts.shared_gate = true needs shared experts, but model.experts.shared = "
                "0; set model.experts.shared_gate = false, or raise model.experts.shared"
            )
        if self.per_token > self.num:
            raise UserError(
                f"model.experts.per_token = {self.per_token} is more than model.experts.num = "
                f"{self.num}; lower model.experts.per_token"
            )
        sizes = {"model.experts.hidden_size": self.hidden_size, "model.hidden_size": width}
        for name, size in sizes.items():
            if size % ROW_VALUES:
                raise UserError(
                    f"{name} = {size} is not a multiple of {ROW_VALUES}, which torch's grouped "
                    f"matrix products of experts need; set {name} = {size + -size % ROW_VALUES}"
                )
