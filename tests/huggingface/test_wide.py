"""Softmax attention in float32 in a 16-bit model: at most twice the error of its own products; packed sequences one at a time."""

import pytest
import torch
import transformers as hf

from tarnn.huggingface import wide
from tarnn.huggingface.patching.packed import packed_step


@pytest.mark.parametrize("positions", [None, [0, 1, 2, 3, 0, 1, 2]], ids=["a row", "packed"])
def test_a_widened_model_errs_no_more_than_by_16_bit_products(monkeypatch, positions):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(**sizes, **heads, initializer_range=0.3, attn_implementation="sdpa")
    model = hf.LlamaForCausalLM(config).bfloat16().requires_grad_(False).eval()
    exact = hf.LlamaForCausalLM(config).eval()
    exact.load_state_dict(model.state_dict())
    given = {"input_ids": torch.randint(50, (1, 7)), "use_cache": False}
    if positions is not None:
        given["position_ids"] = torch.tensor([positions])
    expected, plain = exact(**given).logits, model(**given).logits
    bounds = torch.tensor([0, 7] if positions is None else [0, 4, 7])
    attend, products = wide.sdpa_attention_forward, []
    for place in (wide.__name__, "tarnn.kernels.cpu.wide_products"):
        monkeypatch.setattr(f"{place}.are_slow", lambda weight: weight.dtype == torch.bfloat16)
    spy = lambda module, q, *x, **k: products.append((q.dtype, q.shape[2])) or attend(module, q, *x, **k)  # noqa: E731
    monkeypatch.setattr(wide, "sdpa_attention_forward", spy)
    wide.widen(model, model)
    with packed_step(bounds):
        found = model(**given).logits
    assert products == [(torch.float32, n) for n in bounds.diff().tolist()] * 2
    assert found.dtype == torch.bfloat16
    error = [(x.float() - expected).abs().max().item() for x in (found, plain)]
    assert error[0] <= 2 * error[1]
    wide.widen(exact, exact)
    with packed_step(bounds):
        assert torch.allclose(exact(**given).logits, expected, atol=1e-5)
