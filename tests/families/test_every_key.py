"""Each key of each family's config, changed by itself: it is refused, or the logits are those of transformers with that change.

So no key is left that changes numbers there and not here. Configs are the variants in which most numbers matter.
"""

import copy
from fnmatch import fnmatchcase

import pytest
import torch
import transformers as hf
from huggingface_hub.errors import StrictDataclassFieldValidationError
from support.damaged_configs import places_in
from support.family_models import VARIANTS, defined, fields_of, model_of
from support.published_configs import PUBLISHED

from tarnn.errors import UserError
from tarnn.families.by_name import family_of
from tarnn.families.config import Config
from tarnn.families.harmless import HARMLESS
from tarnn.families.weights import Weights

OF_IMAGES = ("qwen3_5", "qwen3_5_moe")  # whose text models have rows of their own
CONFIGS = {fields_of(name)["model_type"]: name for name in (*PUBLISHED, *VARIANTS)}
CONFIGS |= {"falcon_h1": "Falcon-H1 with all options", "zamba2": "Zamba2 with all options"}
IDS = torch.tensor([[7, 3, 44, 9, 90, 12]])
COMPUTED = "_decay"  # ends of the names of buffers that transformers computes from the config
CLOSE = 1e-4  # of the largest logit


def changed(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.05 if abs(value) < 1e30 else 1.0
    if isinstance(value, str):
        return value + "x"
    if not value:
        return [0]
    other = [changed(x) for x in value] if isinstance(value[0], float) else value[::-1]
    return other if other != value else [*value, value[-1]]


def changes(fields):
    """Pairs of a path and the config in which that value is another; keys that are harmless in all families are left."""
    for *outer, key in places_in(fields):
        made = inner = copy.deepcopy(fields)
        for x in outer:
            inner = inner[x]
        harmless = key == "model_type" or any(fnmatchcase(key, pattern) for pattern in HARMLESS)
        if not harmless and inner[key] is not None and not isinstance(inner[key], dict):
            inner[key] = changed(inner[key])
            yield ".".join((*outer, key)), made


@torch.no_grad()
def logits_of_transformers(fields, tensors):
    """Those of a model with these tensors."""
    config = hf.AutoConfig.for_model(**copy.deepcopy(fields))
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    left = model.load_state_dict({x: y for x, y in tensors.items() if not x.endswith(COMPUTED)}, strict=False)
    assert not left.unexpected_keys
    assert all(x.endswith(COMPUTED) for x in left.missing_keys)
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("family", [x for x in CONFIGS if x not in OF_IMAGES])
def test_no_key_is_ignored(family):
    fields, tensors = fields_of(CONFIGS[family]), model_of(CONFIGS[family]).state_dict()
    opened = 0
    for path, other in changes(fields):
        config = Config(copy.deepcopy(other))
        try:
            program = family_of(config)(config, Weights.of(tensors))
        except UserError:
            continue
        try:
            theirs = logits_of_transformers(other, tensors)
        except StrictDataclassFieldValidationError:  # a word that is no option there
            continue
        opened += 1
        error = (defined(program, IDS) - theirs).abs().max()
        assert error <= CLOSE * theirs.abs().max(), f"{family}: {path}"
    assert opened > 1
