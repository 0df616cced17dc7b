"""Language models in training: their loss without all logits is transformers' own, and logits are there when they are read."""

import copy
from contextlib import nullcontext

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from support.linear_families import FAMILIES
from torch.nn import functional
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

import tarnn
from tarnn.huggingface.head_loss import Unread
from tarnn.kernels.cpu import cross_entropy as blocks

KINDS = ["tarnn", "Qwen3.5", "Qwen3-Next", "OLMo-hybrid", "LFM2"]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=KINDS)
def trained(request, make_model, monkeypatch):
    """A model in training, and the context in which tarnn computes its loss; blocks are small."""
    monkeypatch.setattr(blocks, "BLOCK", 1000)
    if request.param == "tarnn":
        return make_model("linear").float().train(), nullcontext
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[request.param]()).float().train(), tarnn.patch_transformers


@pytest.fixture
def without_blocks(monkeypatch):
    """Return a context in which models compute all logits."""

    def plain():
        patch = pytest.MonkeyPatch()
        patch.setattr("tarnn.huggingface.causal_lm.joins_head", lambda *_: False)
        patch.setattr("tarnn.huggingface.head_loss.joins_head", lambda *_: False)
        return patch

    return plain


def step(model, **arguments):
    model.zero_grad()
    outputs = model(use_cache=False, **arguments)
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
    return torch.randint(model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))


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
        loss, logits = model(input_ids=ids, labels=ids, use_cache=False, return_dict=False)[:2]
    torch.testing.assert_close(loss, ForCausalLMLoss(logits, ids, model.config.vocab_size))


def test_others_have_all_logits(trained):
    """Evaluation, some of the logits, a loss or a head of one's own, hooks: transformers' way."""
    model, patched = trained
    ids = some_ids(model)

    def logits(**arguments):
        return dict(model(input_ids=ids, labels=ids, use_cache=False, **arguments).items())["logits"]

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
