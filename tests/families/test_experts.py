"""Groups of experts as a config has them: read, and refused in a sentence where they do not fit."""

import pytest

from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.experts import grouped

GROUPS = {"num_experts": 12, "num_experts_per_tok": 5, "moe_intermediate_size": 8, "n_group": 4, "topk_group": 2}
REFUSED = {
    "groups that do not divide": ({"n_group": 5}, "n_group must be 1, or a divisor of the 12 experts .* got 5"),
    "groups of one": ({"n_group": 12, "topk_group": 6}, "n_group must be 1, or a divisor"),
    "more groups than there are": ({"topk_group": 5}, "topk_group must be a whole number from 1 to 4 here; got 5"),
    "too few groups": (
        {"topk_group": 1},
        "topk_group must be enough groups of 3 experts for the 5 of a token here; got 1",
    ),
    "more than there are": (
        {"num_experts_per_tok": 13},
        "num_experts_per_tok must be a whole number from 1 to 12 here; got 13",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_groups_are_refused(case):
    changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        grouped(Config(GROUPS | changes), "num_experts")


def test_groups():
    found = grouped(Config(GROUPS | {"routed_scaling_factor": 2.5, "norm_topk_prob": False}), "num_experts")
    assert (found.count, found.chosen, found.inner) == (12, 5, 8)
    assert found.routing == {
        "scores": "sigmoid", "groups": 4, "groups_kept": 2, "eps": 1e-20, "normalize": False, "scale": 2.5,
    }  # fmt: skip
