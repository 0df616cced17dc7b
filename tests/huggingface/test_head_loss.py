"""Language models in training: their loss without all logits is transformers' own, and logits are there when they are read."""

import copy
from contextlib import nullcontext

import pytest
import torch
import transformers
from accelerate.utils import convert_outputs_to_fp32
from support.linear_families import FAMILIES, linear_model, nightly_but
from torch.nn import functional
from transformers import Trainer, TrainingArguments

import tarnn
from tarnn import models
from tarnn.huggingface.head_loss import Unread
from tarnn.kernels.cpu import cross_entropy as blocks

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
OURS = {
    "tarnn": (models.TarnnForCausalLM, models.TarnnConfig, {}),
    "tarnn, masked": (models.TarnnForMaskedLM, models.TarnnConfig, {"causal": False}),
    "tarnn, pairs": (models.TarnnForConditionalGeneration, models.TarnnSeq2SeqConfig, {}),
}
WITH_IMAGES = {"Qwen3.5": "Qwen3_5", "Qwen3.5-MoE": "Qwen3_5Moe", "Qwen4-exp": "Qwen4Exp", "GLM-5-next": "Glm5Next"}
# whose logits are bounded or cut; or there with images
OTHERS = {"RecurrentGemma", "xLSTM", "Inkling", "Inkling 2", "GLM-5-next"}
FEW = {"Qwen3.5", "OLMo-hybrid", "Mamba-2", "Falcon-H1"}  # of transformers' at each commit
PATCHED = {x: FAMILIES[x] for x in FAMILIES if x not in OTHERS}
KINDS = [*OURS, *(f"{name}, images" for name in WITH_IMAGES), *nightly_but(FEW, PATCHED)]
pytestmark = pytest.mark.filterwarnings("ignore")


def make(kind, **changes):
    """A model in training, and the context in which tarnn computes its loss. changes: of its config."""
    torch.manual_seed(0)
    name, _, images = kind.partition(", ")
    if kind in OURS:
        kind, config, more = OURS[kind]
        model = kind(config(**SIZES | more | changes))
    elif images:
        config, kind = (getattr(transformers, WITH_IMAGES[name] + x) for x in ("Config", "ForConditionalGeneration"))
        model = kind(config(text_config=FAMILIES[name]().to_dict() | changes, vision_config=VISION))
    else:
        model = linear_model(name, **changes)
    model.config.get_text_config().use_cache = False
    return model.train(), nullcontext if name == "tarnn" else tarnn.patch_transformers


@pytest.fixture(params=KINDS)
def trained(request, monkeypatch):
    """As `make`, with small blocks."""
    monkeypatch.setattr(blocks, "BLOCK", 1000)
    return make(request.param)


@pytest.fixture
def without_blocks(monkeypatch):
    """Return a context in which models compute all logits."""

    def plain():
        patch = pytest.MonkeyPatch()
        patch.setattr("tarnn.huggingface.head_loss.joins_head", lambda *_: False)
        return patch

    return plain


def step(model, **arguments):
    model.zero_grad()
    outputs = model(**arguments)
    outputs.loss.backward()
    return outputs, {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def both(trained, without_blocks, **arguments):
    model, patched = trained
    with patched():
        found = step(model, **arguments)
        patch = without_blocks()
        try:
            expected = step(model, **arguments)
        finally:
            patch.undo()
    return found, expected


def some_ids(model):
    return torch.randint(model.config.get_text_config().vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))


def is_unread(outputs):
    return isinstance(dict(outputs.items())["logits"], Unread)


@pytest.mark.parametrize(
    "arguments", [{}, {"num_items_in_batch": 5}, {"ignore_index": 3}, {"shift_labels": True}], ids=str
)
def test_loss_and_gradients_are_those_of_all_logits(trained, without_blocks, arguments):
    ids = some_ids(trained[0])
    labels = ids.clone()
    labels[0, :4] = arguments.get("ignore_index", -100)
    if "shift_labels" in arguments:
        arguments = {"shift_labels": functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()}
    (found, grads), (expected, exact) = both(trained, without_blocks, input_ids=ids, labels=labels, **arguments)
    assert is_unread(found)
    assert not is_unread(expected)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    assert grads.keys() == exact.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, exact[name], rtol=1e-4, atol=1e-5, msg=name)


def test_logits_are_computed_when_they_are_read(trained, without_blocks):
    ids = some_ids(trained[0])
    (found, _), (expected, _) = both(trained, without_blocks, input_ids=ids, labels=ids)
    assert list(found.keys()) == list(expected.keys())
    assert found[0] is found.loss
    assert found["loss"] is found.loss
    assert is_unread(found)
    in_float32 = convert_outputs_to_fp32(lambda: found)()  # as accelerate makes them anew
    assert is_unread(in_float32)
    for outputs in (found, in_float32):
        torch.testing.assert_close(outputs.logits, expected.logits)
        assert outputs["logits"] is outputs.logits
        assert outputs[1] is outputs.logits
        assert not is_unread(outputs)


def test_as_a_tuple_they_are_there(trained):
    model, patched = trained
    ids = some_ids(model)
    with patched():
        expected = model(input_ids=ids, labels=ids)
        loss, logits = model(input_ids=ids, labels=ids, return_dict=False)[:2]
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(logits, expected.logits)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_never_holds_all_logits(kind, without_blocks, monkeypatch):
    """In a step no tensor is as large as all logits; the same model has one where it does not compute by blocks."""
    model, patched = make(kind, vocab_size=2000)
    monkeypatch.setattr(blocks, "BLOCK", 20_000)
    ids = torch.randint(2000, (2, 40))
    with patched():
        largest = largest_tensor(lambda: step(model, input_ids=ids, labels=ids))
        patch = without_blocks()
        try:
            before = largest_tensor(lambda: step(model, input_ids=ids, labels=ids))
        finally:
            patch.undo()
    assert largest < ids.numel() * 2000 * 4 <= before


def largest_tensor(f):
    """The most bytes that one allocation takes while f runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        f()
    return max(x.nbytes() for x in profile.profiler.kineto_results.events() if x.name() == "[memory]")


def test_others_have_all_logits(trained):
    """Evaluation, some of the logits, a loss or a head of one's own, hooks: transformers' way."""
    model, patched = trained
    ids = some_ids(model)

    def logits(**arguments):
        return dict(model(input_ids=ids, labels=ids, **arguments).items())["logits"]

    with patched():
        assert isinstance(logits(), Unread)
        with torch.no_grad():
            assert isinstance(logits(), torch.Tensor)
        hook = model.lm_head.register_forward_hook(lambda *_: None)
        assert isinstance(logits(), torch.Tensor)
        hook.remove()
        assert isinstance(logits(), Unread)
        model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
        assert isinstance(logits(), torch.Tensor)
        del model._loss_function
        model.eval()
        assert isinstance(logits(), torch.Tensor)
        model.train()
        head = copy.deepcopy(model.lm_head)
        model.lm_head = torch.nn.Linear(head.in_features, head.out_features)
        assert isinstance(logits(), torch.Tensor)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3.5-MoE", {"output_router_logits": True}),
        ("Qwen3.5-MoE, images", {"output_router_logits": True}),
        ("Bamba", {"z_loss_coefficient": 0.1}),
    ],
)
def test_losses_with_other_terms_are_those_of_transformers(kind, changes):
    model, patched = make(kind, **changes)
    ids = some_ids(model)
    with patched():
        found = model(input_ids=ids, labels=ids)
    assert not is_unread(found)
    torch.testing.assert_close(found.loss, model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("trained", ["tarnn", "Qwen3.5", "OLMo-hybrid", "LFM2", "Mamba-2"], indirect=True)
def test_the_trainer_smooths_labels(trained, without_blocks, tmp_path):
    """It takes the labels for itself then, and the logits."""
    model, patched = trained
    rows = [{"input_ids": x, "labels": x} for x in some_ids(model)]
    options = {"max_steps": 1, "report_to": "none", "use_cpu": True, "label_smoothing_factor": 0.5}
    with patched():
        trainer = Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=rows)
        batch = next(iter(trainer.get_train_dataloader()))
        found = trainer.compute_loss(model, dict(batch))
        patch = without_blocks()
        try:
            expected = trainer.compute_loss(model, dict(batch))
        finally:
            patch.undo()
        unsmoothed = model(**batch).loss
    torch.testing.assert_close(found, expected)
    assert abs(found - unsmoothed) > 1e-3
