"""Linear models of transformers compute the same with tarnn's ops, and what is right where transformers' own are not."""

import pytest
import torch
from support.linear_families import (
    PADDED,
    REFERENCE_IS_WRONG,
    TOKENS,
    WITHOUT,
    in_turns,
    left_padded,
    linear_model,
    nightly_but,
    right_padded,
    whole,
)

import tarnn
from tarnn.ops.registration import Op

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers has to say of random configs and of its fallbacks

WAYS = {
    "whole": whole,
    "steps": lambda model: in_turns(model, (66, 1, 1, 1, 1)),
    "continued": lambda model: in_turns(model, (30, 25, 15)),
    "left": left_padded,
    "right": right_padded,
}


# one for each adapter at each commit; the others have the same hooks
EVERY_COMMIT = ("Qwen3-Next", "Kimi Linear", "MiniMax", "Mamba", "Mamba-2", "LFM2", "RecurrentGemma", "xLSTM")


@pytest.fixture(scope="module", params=nightly_but(EVERY_COMMIT))
def family(request):
    """A model, what transformers computes by itself in each way, and what is right: each row whole."""
    model = linear_model(request.param)
    with torch.no_grad():
        alone = whole(model, TOKENS[1:, PADDED:])
        right = dict.fromkeys(WAYS, whole(model)) | {"left": alone, "right": alone}
        theirs = {way: compute(model) for way, compute in WAYS.items() if (request.param, way) not in WITHOUT}
    return request.param, model, theirs, right


def distance(a, b):
    return (a - b).abs().amax().item()


def loss(outputs):
    """A weighted sum: squares of normalised outputs would have next to no gradient."""
    return (outputs * torch.linspace(-1, 1, outputs.numel()).view(outputs.shape).sin()).sum()


def rounding(name, theirs, right):
    """By how much transformers' own ways differ from each other where all of them mean the same."""
    ways = [way for way in ("steps", "continued", "left") if way in theirs and (name, way) not in REFERENCE_IS_WRONG]
    least = 8 * torch.finfo(torch.float32).eps * right["whole"].abs().amax().item()
    return max(least, *(distance(theirs[way], right[way]) for way in ways))


@torch.no_grad()
def test_the_same_outputs_in_every_way(family):
    name, model, theirs, right = family
    allowed = 2 * rounding(name, theirs, right)
    with tarnn.patch_transformers():
        ours = {way: compute(model) for way, compute in WAYS.items() if way in theirs}
    for way, output in ours.items():
        wrong = (name, way) in REFERENCE_IS_WRONG
        assert distance(output, right[way] if wrong else theirs[way]) <= allowed, way
        if wrong:
            assert distance(theirs[way], right[way]) > 50 * allowed, (
                f"{way} is right in transformers now: update the table"
            )


def test_the_same_gradients(family):
    model = family[1]
    x = TOKENS[:, :40]

    def gradients():
        model.zero_grad()
        loss(whole(model, x)).backward()
        return {path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None}

    theirs = gradients()
    with tarnn.patch_transformers():
        ours = gradients()
    assert set(ours) == set(theirs)
    for path, expected in theirs.items():
        assert distance(ours[path], expected) <= 1e-4 * expected.abs().amax().item() + 1e-8, path


@torch.no_grad()
def test_the_ops_are_called(family, monkeypatch):
    """Otherwise all of this would compare transformers with itself."""
    _, model, theirs, _ = family
    called, run = [], Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda op, *args, **options: called.append(op) or run(op, *args, **options))
    with tarnn.patch_transformers(model):
        whole(model)
    assert called
    called.clear()
    assert torch.equal(whole(model), theirs["whole"])
    assert not called


def packed_rows(model, **options):
    """The two rows as one, as the flattening collator makes it."""
    t = TOKENS.shape[1]
    positions = torch.cat([torch.arange(t - PADDED), torch.arange(t)])[None]
    ids = torch.cat([TOKENS[:1, PADDED:], TOKENS[1:]], dim=1)
    return model(input_ids=ids, position_ids=positions, **options)[0]


def test_packed_rows_are_the_rows_one_by_one(family):
    name, model, theirs, right = family
    if (name, "packed") in WITHOUT:
        with tarnn.patch_transformers(model), pytest.raises(ValueError, match="across packed sequences"):
            packed_rows(model)
        return
    with tarnn.patch_transformers(model):
        model.zero_grad()
        rows = [whole(model, TOKENS[:1, PADDED:]), whole(model, TOKENS[1:])]
        alone = torch.cat(rows, dim=1)
        loss(alone).backward()
        expected = {path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        packed = packed_rows(model)
        loss(packed).backward()
    assert distance(packed, alone) <= 2 * rounding(name, theirs, right)
    for path, gradient in expected.items():
        assert (
            distance(dict(model.named_parameters())[path].grad, gradient) <= 1e-4 * gradient.abs().amax().item() + 1e-6
        ), path
