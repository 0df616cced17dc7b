"""Experts chosen by sigmoids, in groups (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2), and some that all tokens share.

A token's experts are those with the largest σ(W x) + bias in its best groups; their weights are the sigmoids alone.
"""

from dataclasses import dataclass

from tarnn.families.config import Config
from tarnn.families.parts import swiglu
from tarnn.families.weights import Weights
from tarnn.program.experts import Expert, experts, route
from tarnn.program.recording import Register, product

NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # of an expert's matrices in folders


@dataclass(frozen=True)
class GroupedExperts:
    """`count` experts of `inner` channels, of which each token has `chosen`, from `groups_kept` of `groups` groups.

    normalize, scale: whether weights add up to 1, and what they are multiplied with then. shared: experts of all tokens.
    """

    count: int
    chosen: int
    inner: int
    groups: int
    groups_kept: int
    normalize: bool
    scale: float
    shared: int

    @classmethod
    def of(cls, config: Config, count: int, groups: tuple[int, int], scale: float) -> "GroupedExperts":
        """Read them. count, groups (all, kept), scale: the family's defaults. Folders have one of two names for some keys."""
        read = {
            "count": config.size(named(config, "num_experts", "num_local_experts"), count),
            "chosen": config.size(named(config, "num_experts_per_token", "num_experts_per_tok"), 8),
            "groups": config.size(named(config, "num_expert_group", "n_group"), groups[0]),
            "shared": config.size(named(config, "num_shared_experts", "n_shared_experts"), 1),
            "groups_kept": config.size("topk_group", groups[1]),
        }
        each, rest = divmod(read["count"], read["groups"])
        if rest or (each < 2 and read["groups"] > 1):
            config.refuse("num_experts", read["count"], f"two or more in each of {read['groups']} groups")
        if read["groups_kept"] > read["groups"]:
            config.refuse("topk_group", read["groups_kept"], f"at most the number of groups ({read['groups']})")
        if read["chosen"] > read["groups_kept"] * each:
            config.refuse("num_experts_per_token", read["chosen"], f"at most {read['groups_kept'] * each}")
        return cls(
            **read,
            inner=config.size("moe_intermediate_size"),
            normalize=config.flag(named(config, "moe_renormalize", "norm_topk_prob"), True),
            scale=config.number("routed_scaling_factor", scale),
        )

    def mix(self, x: Register, w: Weights) -> Register:
        """Compute the sum of a token's experts and of the shared ones."""
        router = w.under("gate.")
        bias = "expert_bias" if "expert_bias" in router else "e_score_correction_bias"
        logits = product(x, router.get("weight", (self.count, x.size)), exact=True)
        chosen, weights = route(
            logits,
            self.chosen,
            scores="sigmoid",
            bias=router.get(bias, (self.count,)),
            groups=self.groups,
            groups_kept=self.groups_kept,
            normalize=self.normalize,
            eps=1e-20,
            scale=self.scale,
        )
        y = experts(x, chosen, weights, self.all_experts(w.under("experts."), x.size))
        return y + swiglu(x, w.under("shared_experts."), self.shared * self.inner)

    def all_experts(self, w: Weights, hidden: int) -> list[Expert]:
        """Take the weights of all experts: in two tensors as live models have them, or in three of each as folders do."""
        m = self.inner
        if "gate_up_proj" in w:
            both = w.get("gate_up_proj", (self.count, 2 * m, hidden))
            down = w.get("down_proj", (self.count, hidden, m))
            return [Expert(both[e, :m], both[e, m:], down[e]) for e in range(self.count)]
        gate, up, out = next((x for x in NAMES if f"0.{x[0]}.weight" in w), NAMES[0])
        return [
            Expert(
                w.get(f"{e}.{gate}.weight", (m, hidden)),
                w.get(f"{e}.{up}.weight", (m, hidden)),
                w.get(f"{e}.{out}.weight", (hidden, m)),
            )
            for e in range(self.count)
        ]


def named(config: Config, *names: str) -> str:
    """Return the first of these names that the config has; the others are refused where they say something else."""
    has = [name for name in names if config.get(name) is not None]
    for name in has[1:]:
        config.choice(name, config.get(has[0]))
    return has[0] if has else names[0]
