"""Packed weights that are kept beside a model: never those of other weights, and freed when nobody needs them."""

import copy
import gc
import weakref
from itertools import pairwise

import peft
import pytest
import torch
from support.fused_texts import LONG
from transformers import LlamaConfig, LlamaForCausalLM

import tarnn
from tarnn.decoding import kept, live
from tarnn.decoding.fused import FusedStep
from tarnn.decoding.kept import forget, is_kept, kept_runtime
from tarnn.decoding.refusal import Refusal
from tarnn.huggingface.fused_forward import fused_forward
from tarnn.kernels.cpu import library

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # peft asks for a renamed property
]
IDS = torch.randint(97, (1, 9), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(dtype=torch.float32, **more):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=97, num_key_value_heads=2, initializer_range=0.2, **SIZES, **more)
    return LlamaForCausalLM(config).to(dtype).eval()


def down(model, layer=0):
    return model.model.layers[layer].mlp.down_proj


def by_optimizer(model, **options):
    optimizer = torch.optim.Adam([down(model).weight], lr=0.1, **options)
    down(model).weight.grad = torch.ones_like(down(model).weight)
    optimizer.step()


def one_row(model):
    """As who gives a new token a meaning."""
    model.model.embed_tokens.weight.data[int(IDS[0, 3])] += 1


def one_row_of_a_product(model):
    down(model, 1).weight.data[5] = 1.0


def merged_adapter(model):
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["down_proj"], init_lora_weights=False))
    assert adapted.merge_and_unload() is model


def swapped(model):
    a, b = down(model), down(model, 1)
    a.weight, b.weight = b.weight, a.weight


def widened_and_back(model):
    """Every number is at another place."""
    dtype = model.dtype
    model.double().to(dtype)
    down(model).weight.data.neg_()


WRITES = {
    "optimizer": by_optimizer,
    "fused optimizer": lambda model: by_optimizer(model, fused=True),
    "data": lambda model: down(model).weight.data.neg_(),
    "data of a vector": lambda model: model.model.norm.weight.data.add_(1),
    "one row of the embeddings": one_row,
    "one row of a product": one_row_of_a_product,
    "numpy": lambda model: down(model).weight.detach().numpy().__imul__(-1),
    "state dict": lambda model: model.load_state_dict({k: -x for k, x in model.state_dict().items()}),
    "adapter": merged_adapter,
    "another parameter": lambda model: setattr(down(model), "weight", torch.nn.Parameter(-down(model).weight)),
    "data that lie elsewhere": lambda model: setattr(down(model).weight, "data", -down(model).weight.data),
    "swapped": swapped,
    "other types": widened_and_back,
    "config": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
}
LAYERS_KEEP_IT = ("config",)  # modules that were made of another config are refused


@torch.no_grad()
def logits(runtime):
    return runtime.prefill(IDS, runtime.new_state(1, 9), every=True)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", WRITES)
def test_weights_that_were_written_are_packed_anew(what, dtype):
    if what == "numpy" and dtype == torch.bfloat16:
        pytest.skip("numpy has no bfloat16")
    model = llama(dtype)
    first = kept_runtime(model)
    before = logits(first)
    assert kept_runtime(model) is first
    WRITES[what](model)
    if what in LAYERS_KEEP_IT:
        with pytest.raises(Refusal, match="variance_epsilon"):
            kept_runtime(model)
        assert not is_kept(model)
        return
    again = kept_runtime(model)
    assert again is not first
    found = logits(again)
    assert not torch.equal(found, before)
    assert torch.equal(found, logits(FusedStep(model).runtime))
    assert kept_runtime(model) is again


def test_packing_compares_with_a_fresh_model_once_and_so_does_each_text(monkeypatch):
    looks, look = [], live.check_unchanged
    monkeypatch.setattr(live, "check_unchanged", lambda *pair: looks.append(pair) or look(*pair))
    model = llama()
    for count in (1, 2, 3):
        kept_runtime(model)
        assert len(looks) == count


@pytest.mark.parametrize("shape", [(5, 3000), (7, 1300), (11, 2), (3, 1), (40,), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole", [True, False])
def test_a_sample_has_a_number_of_each_row_and_of_long_rows_one_a_kilobyte(shape, dtype, whole):
    integers = torch.int16 if dtype == torch.bfloat16 else torch.int32
    # each number's bits are its place
    x = torch.arange(torch.Size(shape).numel(), dtype=integers).view(shape).view(dtype)
    if not whole:
        x = x.mT.contiguous().mT if x.ndim > 1 else torch.stack([x, x], -1)[..., 0]
    places = kept.sample_of(x).tolist()
    if len(shape) < 2:
        assert places == [*range(x.numel())]
        return
    rows, row = shape
    assert {place // row for place in places} == {*range(rows)}
    assert all(b - a <= max(1, 1024 // dtype.itemsize) for a, b in pairwise(places))
    assert x.numel() - places[-1] <= max(row, 1024 // dtype.itemsize)


def test_each_format_replaces_the_last_and_the_default_is_the_type_of_the_weights():
    for dtype, expected in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float32")):
        model = llama(dtype)
        first = kept_runtime(model)
        assert first.weights == expected
        assert kept_runtime(model, expected) is first
        assert kept_runtime(model, "int8").weights == "int8"
        assert kept_runtime(model) is not first


def test_a_model_that_was_changed_is_refused_and_then_packed_again():
    model = llama()
    kept_runtime(model)
    handle = down(model).register_forward_hook(lambda *_: None)
    with pytest.raises(Refusal, match="has a hook"):
        kept_runtime(model)
    assert not is_kept(model)
    handle.remove()
    kept_runtime(model)
    model.train()
    with pytest.raises(Refusal, match="training mode"):
        kept_runtime(model)


def test_what_was_packed_goes_with_the_model():
    model = llama()
    packed, weight = weakref.ref(kept_runtime(model)), weakref.ref(down(model).weight)
    fork = copy.deepcopy(model)
    assert not is_kept(fork)
    del model
    gc.collect()
    assert packed() is None
    assert weight() is None
    assert not is_kept(fork)


def test_what_was_packed_goes_before_other_weights_are(monkeypatch):
    model = llama()
    packed, pack = weakref.ref(kept_runtime(model)), kept.packed_now
    alive = []

    def noting(*arguments):
        alive.append(packed() is not None)
        return pack(*arguments)

    monkeypatch.setattr(kept, "packed_now", noting)
    down(model).weight.data.neg_()
    kept_runtime(model)
    kept_runtime(model, "int4")
    assert alive == [False, False]


def test_weights_that_left_the_model_are_not_held():
    """Of the model's own memory only the table of embeddings is, and that is not copied."""
    model = llama(tie_word_embeddings=False)
    runtime = kept_runtime(model)
    table = model.model.embed_tokens.weight.data_ptr()
    assert [x.data_ptr() for x in (*runtime.program.weights(), *runtime.packed.tables)] == [table, table]


@pytest.mark.filterwarnings("ignore")
def test_a_forward_in_training_frees_what_was_packed():
    with tarnn.patch_transformers():
        model = tarnn.TarnnForCausalLM(tarnn.TarnnConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1)).eval()
        model.generate(IDS, **LONG)
        assert is_kept(model)
        model(IDS)
        assert is_kept(model)
        model.train()(IDS)
        assert not is_kept(model)
        model.eval().generate(IDS, **LONG)
        forget(model)
        assert not is_kept(model)


def test_a_model_is_packed_once_for_many_texts(monkeypatch):
    model = tarnn.TarnnForCausalLM(tarnn.TarnnConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1)).eval()
    packs, pack = [], kept.packed_now
    monkeypatch.setattr(kept, "packed_now", lambda *arguments: packs.append(arguments[1]) or pack(*arguments))
    texts = [model.generate(IDS, **LONG) for _ in range(3)]
    with fused_forward(model):
        texts.append(model.generate(IDS, **LONG))
    assert packs == [None]
    assert all(torch.equal(texts[0], x) for x in texts)
    for _ in range(2):
        with fused_forward(model, "int8"):
            model.generate(IDS, **LONG)
    assert packs == [None, "int8"]
