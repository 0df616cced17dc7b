"""What training asks of a model: gradients that reach everything, checkpointing, LoRA, low precision."""

import peft
import pytest
import torch


def gradients(model, x):
    model.zero_grad()
    loss = model(x, labels=x).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_every_parameter_learns(model, ids):
    _, grads = gradients(model.train(), ids(2, 6))
    for name, grad in grads.items():
        unseen_by_softmax = name.endswith("k_proj.bias")
        assert grad.abs().sum() > 0 or unseen_by_softmax, name


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(model, ids, reentrant):
    x = ids(2, 6)
    model.train()
    loss, grads = gradients(model, x)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    loss2, grads2 = gradients(model, x)
    assert len(calls) == 2  # computed again in the backward pass
    assert torch.equal(loss, loss2)
    for name in grads:
        torch.testing.assert_close(grads[name], grads2[name], rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # peft asks for it
@pytest.mark.parametrize("kind", ["linear", "hybrid"])
def test_lora(make_model, ids, tmp_path, kind):
    model, x = make_model(kind), ids(2, 6)
    before = model(x).logits.detach()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, config)
    torch.testing.assert_close(tuned(x).logits, before)
    trained = [name for name, p in tuned.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in trained)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # B starts at zero, so A learns from the second step on
        optimizer.zero_grad()
        tuned(input_ids=x, labels=x, attention_mask=torch.ones_like(x)).loss.backward()
        optimizer.step()
    after = tuned(x).logits
    assert not torch.allclose(after, before)
    tuned.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make_model(kind), tmp_path)
    torch.testing.assert_close(loaded(x).logits, after)
    y = tuned.generate(input_ids=x, do_sample=False, max_new_tokens=3, eos_token_id=None, pad_token_id=0)
    torch.testing.assert_close(tuned.merge_and_unload()(x).logits, after)
    assert y.shape == (2, 9)


def test_bf16_autocast_trains(model, ids):
    model, x = model.float().train(), ids(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, labels=x).loss
    loss.backward()
    exact = model(x, labels=x).loss
    assert loss.item() == pytest.approx(exact.item(), rel=0.1)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
