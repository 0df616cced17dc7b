"""Configs in which one value after another is damaged."""

import copy

from tarnn.errors import UserError
from tarnn.families.by_name import family_of
from tarnn.families.config import Config
from tarnn.families.weights import Weights

DAMAGED = (0, -1, 3, 10**9, 2**62, 0.5, None, True, "x", [], ["x"], [[]], {"a": 1}, float("inf"), float("nan"))


def places_in(fields, *outer):
    """The paths of all values, those of inner objects too."""
    for key, value in fields.items():
        yield (*outer, key)
        if isinstance(value, dict):
            yield from places_in(value, *outer, key)


def check_refusals(fields, tensors):
    """Replace every value of a config by each of `DAMAGED`: it opens, or a UserError says in one sentence why not."""
    messages, places = [], list(places_in(fields))
    for *outer, key in places:
        for value in DAMAGED:
            changed = inner = copy.deepcopy(fields)
            for x in outer:
                inner = inner[x]
            inner[key] = value
            try:
                config = Config(changed)
                family_of(config)(config, Weights.of(tensors))
            except UserError as error:
                messages.append(str(error))
    assert len(messages) > len(places)
    assert max(map(len, messages)) < 1200  # ten names of weights
