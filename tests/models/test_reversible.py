"""Reversible layers: another function with two streams, whose gradients need no stored activations."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import gelu, layer_norm

from tarnn.decoding.fused import FusedStep
from tarnn.huggingface import backbone
from tarnn.kernels.cpu import library
from tarnn.models import TarnnConfig, TarnnForCausalLM, TarnnForTokenClassification, TarnnSeq2SeqConfig

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
KINDS = {
    "linear": {},
    "softmax": {"attention": "softmax", "position": "rotary", "norm": "layer", "mlp": "gelu", "bias": True},
    "mixed": {"attention": ["linear", "none", "softmax"], "feature_map": "favor", "position": "learned",
              "max_position_embeddings": 40, "num_key_value_heads": 1},
}  # fmt: skip


def build(kind=TarnnForCausalLM, **options):
    torch.manual_seed(0)
    return kind(TarnnConfig(**SIZES | {"reversible": True} | options)).double().train()


@pytest.fixture
def stored(monkeypatch):
    """stored(f): f() where autograd stores the activations of all blocks."""

    def run(f):
        with monkeypatch.context() as patch:
            patch.setattr(backbone, "can_run", lambda blocks: False)
            return f()

    return run


def ids(*shape):
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(1))


def gradients(model, *, seed=3, **inputs):
    """Loss, gradients of all weights and of the embeddings, and the next number that is drawn."""
    torch.manual_seed(seed)
    x = model.model.embed_tokens(inputs.pop("input_ids")).detach().requires_grad_()
    loss = model(inputs_embeds=x, **inputs).loss
    weights = [w for w in model.parameters() if w.requires_grad]
    found = torch.autograd.grad(loss, [x, *weights], allow_unused=True, materialize_grads=True)
    return [loss, *found, torch.rand(3)]


def check_same(one, other, rtol=1e-9, atol=1e-11):
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)


def test_a_block_is_its_formula():
    block = build(norm="layer", mlp="gelu", attention="softmax", position="none").model.layers[1].eval()
    first, second = torch.randn(2, 3, 5, 16, dtype=torch.float64)

    def norm(x, module):
        return layer_norm(x, (16,), module.weight, module.bias, 1e-6)

    first_behind = first + block.attention(norm(second, block.attention_norm))
    inner = gelu(norm(first_behind, block.mlp_norm) @ block.mlp.up_proj.weight.T)
    second_behind = second + inner @ block.mlp.down_proj.weight.T
    expected = torch.cat([first_behind, second_behind], -1)
    torch.testing.assert_close(block(torch.cat([first, second], -1)), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_stored_activations(kind, dropout, stored):
    """Dropout draws the same numbers again, and what is drawn later is as if nothing had been."""
    model = build(**KINDS[kind], dropout=dropout)
    batch = {"input_ids": ids(2, 9), "labels": ids(2, 9)}
    with torch.no_grad():
        for w in model.parameters():  # gains and biases other than 1 and 0
            w.add_(0.1 * torch.randn_like(w))
    check_same(gradients(model, **batch), stored(lambda: gradients(model, **batch)))


def test_gradients_of_an_encoder_with_padding_and_of_packed_documents(stored):
    model = build(TarnnForTokenClassification, causal=False, num_labels=4, dropout=0.2)
    batch = {
        "input_ids": ids(2, 8),
        "labels": ids(2, 8) % 4,
        "attention_mask": torch.arange(8) < torch.tensor([[8], [5]]),
    }
    check_same(gradients(model, **batch), stored(lambda: gradients(model, **batch)))
    packed = {"input_ids": ids(2, 8), "labels": ids(2, 8) % 4, "cu_seqlens": torch.tensor([0, 3, 8, 16])}
    check_same(gradients(model, **packed), stored(lambda: gradients(model, **packed)))


def test_frozen_weights_and_shared_ones(stored):
    model = build(dropout=0.1)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    model.model.layers[1].requires_grad_(False)
    model.model.layers[0].attention.q_proj.weight.requires_grad_(False)
    batch = {"input_ids": ids(1, 6), "labels": ids(1, 6)}
    check_same(gradients(model, **batch), stored(lambda: gradients(model, **batch)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype, stored):
    """Streams are float32 at least, so that twelve layers are undone without loss."""
    model = build(num_hidden_layers=12, dropout=0.1).to(dtype)
    batch = {"input_ids": ids(2, 9), "labels": ids(2, 9)}
    expected = stored(lambda: gradients(model, **batch))
    norm = torch.cat([x.flatten() for x in expected[1:-1]]).double().norm()
    found = gradients(model, **batch)
    difference = torch.cat([(x - y).flatten() for x, y in zip(found[1:-1], expected[1:-1])]).double().norm()
    assert difference < norm * (1e-5 if dtype == torch.float32 else 3e-2)


def saved_bytes(model, batch):
    """What autograd keeps of a forward pass, without the weights."""
    weights = {w.untyped_storage().data_ptr() for w in model.parameters()}
    storages = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        loss = model(**batch).loss
    total = sum(x.nbytes() for x in storages.values())
    loss.backward()
    return total


def test_memory_is_flat_in_depth(stored):
    batch = {"input_ids": ids(2, 64), "labels": ids(2, 64)}
    shallow, deep = (build(num_hidden_layers=n, dropout=0.1) for n in (2, 8))
    assert saved_bytes(shallow, batch) == saved_bytes(deep, batch)
    assert stored(lambda: saved_bytes(deep, batch)) > 3 * stored(lambda: saved_bytes(shallow, batch))
    assert stored(lambda: saved_bytes(shallow, batch)) > 3 * saved_bytes(shallow, batch)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_steps_and_caches_are_the_whole(kind):
    model, x = build(**KINDS[kind]).eval(), ids(2, 12)
    whole = model(x).logits
    logits, state = model.prefill(x[:, :7], model.new_state(2, capacity=12))
    for i in range(7, 12):
        torch.testing.assert_close(logits.double(), whole[:, i - 1], rtol=1e-5, atol=1e-5)
        logits, state = model.step(x[:, i], state, inplace=i % 2 == 0)
    with torch.enable_grad():
        torch.testing.assert_close(model(x, use_cache=False).logits, whole)
    words = model.generate(x, max_new_tokens=6, do_sample=False)
    assert torch.equal(words, model.generate(x, max_new_tokens=6, do_sample=False, use_cache=False))


@pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_step_has_its_logits(kind):
    model, x = build(**KINDS[kind]).float().eval(), ids(2, 12)
    step, state, expected = FusedStep(model), model.new_state(2, capacity=12), model(x).logits
    logits, state = step.prefill(x[:, :9], state, every=True)
    torch.testing.assert_close(logits, expected[:, :9], rtol=1e-4, atol=1e-4)
    for i in range(9, 12):
        logits, state = step(x[:, i], state)
        torch.testing.assert_close(logits, expected[:, i], rtol=1e-4, atol=1e-4)


def test_weights_that_change_before_backward_are_noticed():
    model = build()
    loss = model(ids(1, 5), labels=ids(1, 5)).loss
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        loss.backward()


def test_second_derivatives_are_refused():
    model = build()
    loss = model(ids(1, 5), labels=ids(1, 5)).loss
    weight = model.model.layers[0].mlp.up_proj.weight
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_position": "post"}, 'need norm_position = "pre" and no conv_kernel; got .post. and None'),
        ({"reversible": 1}, "reversible must be true or false; got 1"),
        ({"conv_kernel": 3}, "no conv_kernel; got 'pre' and 3"),
        ({"mlp": "none"}, 'reversible layers need a feed-forward; got mlp = "none"'),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        TarnnConfig(**SIZES | {"reversible": True} | options)
    with pytest.raises(ValueError, match="blocks with cross-attention are not reversible"):
        TarnnSeq2SeqConfig(**SIZES, reversible=True)
