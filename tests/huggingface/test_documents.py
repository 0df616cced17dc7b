"""Documents packed into rows don't know of each other, in whichever way the packing is said."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
COLLATORS = {
    "positions": {},
    "both": {"return_flash_attn_kwargs": True},
    "bounds": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "numbers": {"return_seq_idx": True, "return_position_ids": False},
    "from 2": {"position_ids_start": 2},
}
LENGTHS = (4, 1, 6)


def alone(model, documents):
    """Logits and the mean loss per predicted token of documents that are read one by one."""
    outputs = [model(x, labels=x) for x in documents]
    counts = [x.shape[1] - 1 for x in documents]
    losses = [out.loss * n for out, n in zip(outputs, counts, strict=True) if n]
    return torch.cat([out.logits for out in outputs], dim=1), sum(losses) / sum(counts)


@pytest.mark.parametrize("collator", COLLATORS)
def test_flattened_batches(make_model, ids, collator):
    """transformers' collator of documents, but for the labels at seams, which the model itself leaves out."""
    for kind in ("plain", "hybrid") if collator == "from 2" else ("linear", "paper", "hybrid", "random features"):
        model, documents = make_model(kind).train(), [ids(1, n) for n in LENGTHS]
        batch = DataCollatorWithFlattening(**COLLATORS[collator])(
            [{"input_ids": x[0].tolist()} for x in documents], return_tensors="pt"
        )
        for labels in (batch["labels"], batch["input_ids"]):
            out = model(**batch | {"labels": labels})
            logits, loss = alone(model, documents)
            torch.testing.assert_close(out.logits, logits, **CLOSE)
            torch.testing.assert_close(out.loss, loss)


def test_packed_is_alone(model, ids):
    """Every kind of layer: logits, loss and gradients."""
    model, documents = model.train(), [ids(1, n) for n in LENGTHS]
    results = []
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    x = torch.cat(documents, dim=1)
    for run in (lambda: model(x, labels=x, position_ids=positions)[:2], lambda: alone(model, documents)[::-1]):
        model.zero_grad()
        loss, logits = run()
        (loss + logits.square().mean()).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((logits.detach(), {name: g.clone() for name, g in grads.items()}))
    torch.testing.assert_close(*(logits for logits, _ in results), **CLOSE)
    torch.testing.assert_close(*(grads for _, grads in results), rtol=1e-5, atol=1e-7)  # the loss is float32


def test_rows_with_several_documents_each(model, ids):
    """b > 1: hidden states and logits come back as rows."""
    x, positions = ids(2, 6), torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])
    out = model(x, position_ids=positions, labels=x, output_hidden_states=True)
    logits, loss = alone(model, [x[:1, :3], x[:1, 3:], x[1:, :2], x[1:, 2:]])
    torch.testing.assert_close(out.logits, logits.view(2, 6, -1), **CLOSE)
    torch.testing.assert_close(out.loss, loss)
    assert {h.shape[:2] for h in out.hidden_states} == {(2, 6)}


def test_labels_that_are_shifted_already(make_model, ids):
    model, documents = make_model(), [ids(1, n) for n in LENGTHS]
    x, cuts = torch.cat(documents, dim=1), torch.tensor([0, 4, 5, 11])
    shifted = torch.cat([x[:, 1:], torch.full((1, 1), -100)], dim=1)
    loss = model(x, labels=x, shift_labels=shifted, cu_seq_lens_q=cuts, cu_seq_lens_k=cuts).loss
    torch.testing.assert_close(loss, alone(model, documents)[1])


@torch.no_grad()
def test_what_is_no_packing(make_model, ids):
    """Padding stands still at 0 or 1 and has a mask; with tokens in the cache positions may be any."""
    model, x = make_model("hybrid"), ids(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    padded = model(x, attention_mask=mask, position_ids=positions, use_cache=True)
    torch.testing.assert_close(padded.logits[:1, 2:], model(x[:1, 2:]).logits, **CLOSE)
    assert padded.cache is not None
    cache = model(x[:, :2]).cache
    out = model(x[:, 2:], cache=cache, position_ids=torch.tensor([[2, 3, 5, 6]]))
    assert out.cache.get_seq_length() == 6
    assert model(x, position_ids=torch.arange(6)[None]).cache is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_ids": torch.tensor([[0, 1, 0, 1]]), "use_cache": True}, "goes without a cache"),
        ({"cu_seq_lens_q": torch.tensor([0, 4]), "attention_mask": torch.ones(1, 4)}, "without attention_mask"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4]), "cu_seq_lens_k": torch.tensor([0, 4])}, "must equal"),
    ],
)
def test_bad_packing(make_model, ids, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_model()(ids(1, 4), **arguments)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("kind", ["linear", "hybrid"])
def test_packing_compiles(make_model, ids, kind):
    """One graph for whole and for packed rows: documents are found within it."""
    torch._dynamo.reset()
    model, x = make_model(kind).train(), ids(2, 6)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    whole = torch.arange(6)[None].expand(2, 6).contiguous()
    packed = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])
    for positions in (whole, packed):
        out, expected = (f(x, labels=x, position_ids=positions) for f in (compiled, model))
        torch.testing.assert_close(out.logits, expected.logits, **CLOSE)
        torch.testing.assert_close(out.loss, expected.loss)
        out.loss.backward()
