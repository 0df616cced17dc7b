"""Layers of experts as checkpoints have them: of all experts in one tensor each, or with tensors for each expert."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tarnn.families.config import REQUIRED, Config
from tarnn.families.parts import GATED, dense
from tarnn.families.weights import Weights
from tarnn.program.experts import Expert, experts, route
from tarnn.program.recording import Register


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


def grouped(
    config: Config,
    count: str,
    numbers: tuple[int, int] = (REQUIRED, REQUIRED),
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
) -> Experts:
    """Read experts of a router of sigmoids that keeps the best groups of them (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    count: the key of their number. numbers (all, of a token), groups (all, kept), scale: the family's defaults. Raises UserError
    where the groups do not divide the experts, or the kept ones have fewer than a token takes.
    """
    n, of_groups = config.size(count, numbers[0]), named(config, "n_group", "num_expert_group")
    chosen = config.size(named(config, "num_experts_per_tok", "num_experts_per_token"), numbers[1], most=n)
    num_groups = config.size(of_groups, groups[0])
    each = n // num_groups
    if n % num_groups or (num_groups > 1 and each < 2):
        config.refuse(of_groups, num_groups, f"1, or a divisor of the {n} experts with two or more in a group,")
    kept = config.size("topk_group", groups[1], most=num_groups)
    if kept * each < chosen:
        config.refuse("topk_group", kept, f"enough groups of {each} experts for the {chosen} of a token")
    routing = {"scores": "sigmoid", "groups": num_groups, "groups_kept": kept, "eps": 1e-20}
    normalize = config.flag(named(config, "norm_topk_prob", "moe_renormalize"), True)
    routing |= {"normalize": normalize, "scale": config.number("routed_scaling_factor", scale)}
    return Experts(n, chosen, config.size("moe_intermediate_size"), routing)


def named(config: Config, *names: str) -> str:
    """Return the first of these names that the config has; the others are refused where they say something else."""
    has = [name for name in names if config.get(name) is not None]
    for name in has[1:]:
        config.choice(name, config.get(has[0]))
    return has[0] if has else names[0]


def sparse(
    x: Register,
    w: Weights,
    sizes: Experts,
    *,
    router: str = "gate",
    bias: str | None = None,
    inputs: Register | None = None,
    under: str = "experts.",
    **layout: Any,
) -> Register:
    """Compute the chosen experts of each token. bias: the name of what is added to scores to choose by them.

    inputs: what experts read; None: x, as the router does. under: how the names of their tensors begin. layout: names and
    function, as `experts_of` and `recording.experts` take them.
    """
    logits = dense(x, w, router, sizes.count, exact=True)
    offset = None if bias is None else w.get(bias, (sizes.count,)).float()
    chosen, weights = route(logits, sizes.chosen, bias=offset, **sizes.routing)
    function = layout.pop("function", "silu")
    inputs = x if inputs is None else inputs
    of_layer = experts_of(w.under(under), sizes, inputs.size, **layout)
    return experts(inputs, chosen, weights, of_layer, function=function)


def experts_of(
    w: Weights, sizes: Experts, hidden: int, names: Sequence[str] = GATED, whole: tuple[str, str] | None = None
) -> list[Expert]:
    """Return the experts: views of the tensors of all, or of each its own. names: of gate, up and down; two: without a gate.

    whole: names of the tensors of all, the first of gates and ups; None: as in live models.
    """
    n, m = sizes.count, sizes.inner
    gated, wide = len(names) == 3, (n, len(names) - 1, m, hidden)
    first, last = whole or ("gate_up_proj" if gated else "up_proj", "down_proj")
    if first in w or whole:
        up = w.get(first, (n, wide[1] * m, hidden)).view(wide)
        down = w.get(last, (n, hidden, m))
        return [Expert(up[i, 0] if gated else None, up[i, -1], down[i]) for i in range(n)]
    of_each = [
        [w.get(f"{i}.{name}.weight", (m, hidden)) for name in names[:-1]]
        + [w.get(f"{i}.{names[-1]}.weight", (hidden, m))]
        for i in range(n)
    ]
    return [Expert(x[0] if gated else None, x[-2], x[-1]) for x in of_each]
