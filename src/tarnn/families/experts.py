"""Layers of experts as checkpoints have them: of all experts in one tensor each, or with tensors for each expert."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tarnn.families.config import Config
from tarnn.families.parts import dense
from tarnn.families.weights import Weights
from tarnn.program.experts import Expert, experts, route
from tarnn.program.recording import Register

GATED = ("gate_proj", "up_proj", "down_proj")
LFM = ("w1", "w3", "w2")  # as Mixtral has them, too


@dataclass(frozen=True)
class Experts:
    """How many experts there are, how many a token has, their inner width, how a router chooses. routing: options of `route`."""

    count: int
    chosen: int
    inner: int
    routing: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, *, inner: str, count: str = "num_experts", **routing: Any) -> "Experts":
        """Read them; inner, count: the names of these keys. Raises UserError where a token has more experts than there are."""
        n = config.size(count)
        return cls(n, config.size("num_experts_per_tok", most=n), config.size(inner), routing)


def grouped(config: Config, **names: str) -> Experts:
    """Read experts of a router of sigmoids that keeps the best groups of them (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Raises UserError where the groups do not divide the experts, or the kept ones have fewer than a token takes.
    """
    found = Experts.of(config, **names)
    groups = config.size("n_group", 1)
    each = found.count // groups
    if found.count % groups or (groups > 1 and each < 2):
        config.refuse("n_group", groups, f"1, or a divisor of the {found.count} experts with two or more in a group,")
    kept = config.size("topk_group", 1, most=groups)
    if kept * each < found.chosen:
        config.refuse("topk_group", kept, f"enough groups of {each} experts for the {found.chosen} of a token")
    routing = {"scores": "sigmoid", "groups": groups, "groups_kept": kept, "eps": 1e-20}
    routing |= {"normalize": config.flag("norm_topk_prob", True), "scale": config.number("routed_scaling_factor", 1.0)}
    return Experts(found.count, found.chosen, found.inner, routing)


def sparse(
    x: Register,
    w: Weights,
    sizes: Experts,
    *,
    router: str = "gate",
    bias: str | None = None,
    inputs: Register | None = None,
    **layout: Any,
) -> Register:
    """Compute the chosen experts of each token. bias: the name of what is added to scores to choose by them.

    inputs: what experts read; None: x, as the router does. layout: names and function, as `experts_of` and
    `recording.experts` take them.
    """
    logits = dense(x, w, router, sizes.count, exact=True)
    offset = None if bias is None else w.get(bias, (sizes.count,)).float()
    chosen, weights = route(logits, sizes.chosen, bias=offset, **sizes.routing)
    function = layout.pop("function", "silu")
    inputs = x if inputs is None else inputs
    of_layer = experts_of(w.under("experts."), sizes, inputs.size, **layout)
    return experts(inputs, chosen, weights, of_layer, function=function)


def experts_of(w: Weights, sizes: Experts, hidden: int, names: Sequence[str] = GATED) -> list[Expert]:
    """Return the experts: views of the tensors of all, or of each its own. names: of gate, up and down; two: without a gate."""
    n, m = sizes.count, sizes.inner
    gated, wide = len(names) == 3, (n, len(names) - 1, m, hidden)
    whole = "gate_up_proj" if gated else "up_proj"
    if whole in w:
        up = w.get(whole, (n, wide[1] * m, hidden)).view(wide)
        down = w.get("down_proj", (n, hidden, m))
        return [Expert(up[i, 0] if gated else None, up[i, -1], down[i]) for i in range(n)]
    of_each = [
        [w.get(f"{i}.{name}.weight", (m, hidden)) for name in names[:-1]]
        + [w.get(f"{i}.{names[-1]}.weight", (hidden, m))]
        for i in range(n)
    ]
    return [Expert(x[0] if gated else None, x[-2], x[-1]) for x in of_each]
