"""transformers' generate() by the fused step: the same texts, caches that go on, and what it leaves to `forward`."""

import asyncio
import contextlib
import re
import threading

import pytest
import torch
from support.fused_texts import LONG, generated
from support.linear_families import linear_model
from transformers import DynamicCache

from tarnn import patch_transformers
from tarnn.decoding import kept
from tarnn.decoding.fused import FusedStep
from tarnn.decoding.program_step import ProgramStep
from tarnn.huggingface import fused_forward as file
from tarnn.huggingface.fused_forward import fused_forward
from tarnn.huggingface.why_not_fused import why_not_fused
from tarnn.kernels.cpu import library
from tarnn.program import runtime

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
WAYS = {
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "eos_token_id": 7},
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 1.5},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "room for all": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.fixture
def model(kind, make_model):
    """Of each kind, in float32."""
    return make_model(kind).float()


@pytest.fixture
def steps(monkeypatch):
    """The fused steps that were made, and the tokens that they were given."""
    made, call = [], ProgramStep.__call__
    before = ProgramStep.__init__

    def init(self, *args):
        made.append([])
        before(self, *args)
        self.of_test = made[-1]

    def counted(self, ids, *args, **options):
        self.of_test.append(len(ids))
        return call(self, ids, *args, **options)

    monkeypatch.setattr(ProgramStep, "__init__", init)
    monkeypatch.setattr(ProgramStep, "__call__", counted)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_the_same_text_in_every_way(make_model, ids, way):
    model, x = make_model("hybrid").float(), ids(1 if way == "prompt lookup" else 2, 5)
    assert torch.equal(generated(model, x, "float32", **WAYS[way]), generated(model, x, None, **WAYS[way]))


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_caches_are_those_of_forward(model, ids, padded):
    """Tokens by the fused step and by forward in turns, on one cache; others by forward alone, on another."""
    x, mask = ids(2, 30), torch.ones(2, 30, dtype=torch.long)
    if padded:
        mask[0, :4] = 0
    one, other = (DynamicCache(config=model.config) for _ in range(2))
    for cache in (one, other):
        model(x[:, :6], attention_mask=mask[:, :6], cache=cache)
    for i in range(6, 30):
        options = {"attention_mask": mask[:, : i + 1]} if padded or i % 2 else {}
        with fused_forward(model, None if i % 5 == 4 else "float32"):
            found = model(x[:, i : i + 1], cache=one, **options)
        expected = model(x[:, i : i + 1], cache=other, **options)
        assert found.logits.shape == expected.logits.shape
        assert torch.allclose(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
        assert found.cache is one
        assert one.get_seq_length() == other.get_seq_length() == i + 1
    for a, b in zip(one.layers, other.layers, strict=True):
        a, b = a.state.tensors(), b.state.tensors()
        assert a.keys() == b.keys() or (padded, "mask") == (False, *(a.keys() ^ b.keys()))
        for name in a.keys() & b.keys():
            assert torch.allclose(a[name].float(), b[name].float(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_is_the_step_to_the_bit_and_forward_goes_on(kind, make_model, ids, steps, dtype):
    model, x = make_model(kind).to(dtype), ids(2, 20)
    step, cache = FusedStep(model), DynamicCache(config=model.config)
    state = model.new_state(2, capacity=24)
    assert why_not_fused(model) is None
    with fused_forward(model):
        for i, n in ((0, 8), (8, 1), (9, 1), (10, 5)):
            found = model(x[:, i : i + n], cache=cache).logits
            logits, state = step.prefill(x[:, i : i + n], state, every=True)
            assert torch.equal(found, logits)
    wide = make_model(kind)
    wide.load_state_dict(model.state_dict())
    expected = wide.float()(x).logits[:, 15:]
    alone, after = model(x).logits[:, 15:], model(x[:, 15:], cache=cache).logits
    errors = [(y.float() - expected).abs().max() for y in (after, alone)]
    assert 0 < errors[0] <= 2 * errors[1]


def test_each_text_has_a_step_from_its_first_token_on(make_model, ids, steps):
    model = make_model("hybrid").float()
    model.generate(ids(2, 5), **LONG)
    model.generate(ids(1, 70), **LONG | {"max_new_tokens": 3})
    assert [len(x) for x in steps] == [19, 2]


def test_a_model_that_is_large_or_not_served_takes_its_own_step(make_model, ids, steps, monkeypatch):
    model, x = make_model("default").float(), ids(1, 5)
    expected = generated(model, x, None)
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert torch.equal(model.generate(x, **LONG), expected)
    reason = "model.layers.0 (TarnnBlock) has a hook"
    assert why_not_fused(model) == reason
    with (
        fused_forward(model),
        pytest.warns(UserWarning, match=rf"without the fused step, by forward: {re.escape(reason)}"),
    ):
        assert torch.equal(model.generate(x, **LONG), expected)
    handle.remove()
    assert why_not_fused(model) is None
    assert not any(steps)
    steps.clear()
    monkeypatch.setattr(file, "available_bytes", lambda: 1000)
    assert torch.equal(model.generate(x, **LONG), expected)
    assert not steps
    assert re.match(r"its packed weights take .* GB, .*: request it by", why_not_fused(model))
    with fused_forward(model):
        assert why_not_fused(model) is None
    assert torch.equal(generated(model, x, "float32"), expected)  # by request
    assert len(steps) == 1
    assert why_not_fused(model) is None  # it is packed already
    assert "generate of Linear knows no fused step" in why_not_fused(torch.nn.Linear(2, 2))
    with patch_transformers(other := linear_model("Bamba")):
        assert why_not_fused(other).endswith("patch_transformers() Qwen3-Next, Qwen3.5, OLMo-hybrid, LFM2, Mamba-2")


def test_old_kernels_are_warned_of_by_default(make_model, ids, monkeypatch):
    model, x = make_model("default").float(), ids(1, 5)
    expected = generated(model, x, None)
    monkeypatch.setattr(runtime, "VERSION", 10**6)
    with pytest.warns(UserWarning, match=r"by forward: the compiled kernels read programs of .*: compile them again"):
        assert torch.equal(model.generate(x, **LONG), expected)


@pytest.mark.parametrize(
    "options",
    [{"output_hidden_states": True}, {"labels": torch.tensor([[5], [6]])}, {"logits_to_keep": torch.tensor([0])}],
    ids=["hidden states", "labels", "places"],
)
def test_what_asks_for_more_gets_it(make_model, ids, steps, options):
    model, x = make_model("softmax").float(), ids(2, 6)
    outs = []
    for weights in (None, "float32"):
        with torch.no_grad(), fused_forward(model, weights):
            cache = model(x[:, :5], use_cache=True).cache
            outs.append(model(x[:, 5:], cache=cache, **options))
    assert outs[0].keys() == outs[1].keys()
    assert torch.equal(outs[0].logits, outs[1].logits)
    assert not any(steps)


def test_gradients_autocast_embeddings_and_padding_are_for_forward(make_model, ids, steps):
    model, x = make_model("default").float(), ids(2, 6)
    with fused_forward(model):
        cache = model(x[:, :3], use_cache=True).cache
        assert model(x[:, 3:4], cache=cache).logits.requires_grad
        with torch.no_grad():
            with torch.autocast("cpu"):
                assert model(x[:, 4:5], cache=cache).logits.dtype == torch.bfloat16
            model(inputs_embeds=model.model.embed_tokens(x[:, 5:]), cache=cache)
            mask = torch.ones(2, 7, dtype=torch.long)
            mask[1, 6] = 0
            model(x[:, :1], attention_mask=mask, cache=cache)
            assert not any(steps)
            model(x[:, :1], cache=cache)
    assert steps == [[2]]


def test_a_wrong_token_or_position_is_refused_in_a_sentence(make_model, ids):
    model = make_model("default", position="learned", max_position_embeddings=8).float()
    with torch.no_grad(), fused_forward(model):
        cache = model(ids(1, 6), use_cache=True).cache
        model(ids(1, 1), cache=cache)
        with pytest.raises(ValueError, match="a token must be from 0 to 36; got 99"):
            model(torch.tensor([[99]]), cache=cache)
        model(ids(1, 1), cache=cache)
        with pytest.raises(ValueError, match="up to 8 tokens"):
            model(ids(1, 1), cache=cache)
    with pytest.raises(ValueError, match="int8, int4, stored, or None; got 'int2'"), fused_forward(model, "int2"):
        pass


@torch.no_grad()
def test_a_prompt_is_in_its_format_from_the_first_token(make_model, ids):
    """To the last bit what the step reads; padding too, and in two pieces."""
    model, x, mask = make_model("hybrid").float(), ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    with fused_forward(model, "int8"):
        out = model(x[:, :7], attention_mask=mask[:, :7], use_cache=True, cache=DynamicCache(config=model.config))
        cache = out.cache
        last = model(x[:, 7:], attention_mask=mask, cache=cache, logits_to_keep=1).logits
        whole = torch.cat([mask, mask[:1].mT[:2]], dim=1)
        token = model(x[:, :1], attention_mask=whole, cache=cache).logits
    step = FusedStep(model, "int8")
    logits, state = step.prefill(x, model.new_state(2, capacity=20), mask, every=True)
    assert torch.equal(out.logits[mask[:, :7] == 1], logits[:, :7][mask[:, :7] == 1])
    assert torch.equal(last, logits[:, -1:])
    assert torch.equal(token[:, 0], step(x[:, 0], state)[0])


def test_two_models_and_two_threads_at_once(make_model, ids):
    """Each thread's generate has a step of its own, and an assistant's is not its model's."""
    model, other = (make_model("hybrid").float(), make_model("default", hidden_size=16, num_hidden_layers=1).float())
    prompts = [ids(2, 5) for _ in range(4)]
    expected, found = [generated(model, x, None) for x in prompts], {}

    def run(i):
        found[i] = model.generate(prompts[i], **LONG)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected[i]) for i in range(4))
    helped = generated(model, prompts[0][:1], "float32", assistant_model=other)
    assert torch.equal(helped, generated(model, prompts[0][:1], None))


@torch.no_grad()
def test_a_cache_that_keeps_its_past_can_forget(make_model, ids, steps):
    model, x = make_model("default").float(), ids(1, 6)
    cache = model(x[:, :5], use_cache=True).cache
    before = cache.layers[0].state.S.clone()
    for layer in cache.layers:
        layer.activate_past_recording()
    with fused_forward(model):
        model(x[:, 5:], cache=cache)
    cache.crop(-1)
    assert cache.get_seq_length() == 5
    assert torch.equal(cache.layers[0].state.S, before)
    assert not steps


def test_each_text_begins_with_the_weights_of_then(make_model, ids, steps):
    """After writes, too, of which torch keeps no count: by generate, and token by token."""
    model, x = make_model("hybrid").float(), ids(2, 5)
    old = generated(model, x, None)
    with fused_forward(model):
        before = model.generate(x, **LONG)
        with torch.no_grad():
            model(x[:, 4:], cache=model(x[:, :4], use_cache=True).cache)
        for weight in model.parameters():
            weight.data.mul_(-3)
        after = model.generate(x, **LONG)
        with torch.no_grad():
            found = model(x[:, 4:], cache=model(x[:, :4], use_cache=True).cache).logits
    assert len(steps) == 4
    assert torch.equal(before, old)
    assert torch.equal(after, generated(model, x, None))
    assert not torch.equal(after, before)
    assert torch.allclose(found[:, 0], model(x).logits[:, -1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_two_caches_in_turn_pack_once_each(make_model, ids, steps):
    model, x = make_model("hybrid").float(), ids(1, 9)
    caches = [model(x[:, :5], use_cache=True).cache for _ in range(2)]
    with fused_forward(model):
        for i in range(5, 9):
            for cache in caches:
                model(x[:, i : i + 1], cache=cache)
    assert steps == [[1], [1] * 7]


def test_another_task_of_the_same_thread_has_its_own(make_model, ids, steps):
    """What one asyncio task enters is not another's, though they take turns in one thread."""
    model, x = make_model("default").float(), ids(1, 6)

    async def entered(weights, mine, theirs):
        with torch.no_grad(), contextlib.nullcontext() if weights == "" else fused_forward(model, weights):
            mine.set()
            await theirs.wait()
            cache = model(x[:, :5], use_cache=True).cache
            return model(x[:, 5:], cache=cache).logits

    async def both(*formats):
        one, other = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(entered(formats[0], one, other), entered(formats[1], other, one))

    asyncio.run(both("int4", ""))
    assert steps == [[1]]
    found = asyncio.run(both("float32", "int4"))
    expected = [asyncio.run(both(*[weights] * 2))[0] for weights in ("float32", "int4")]
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(*expected)


@pytest.mark.compile
def test_a_compiled_model_is_one_graph(make_model, ids):
    model, x = make_model("default").float(), ids(2, 5)
    expected = model(x).logits
    with fused_forward(model), torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="eager")(x, use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-5)


@torch.no_grad()
def test_states_that_were_there_before_stay_as_they_were(model, ids):
    """A state is a value: put back, it is where it was. (Keys and values are appended in place, as by `forward`.)"""
    x = ids(2, 9)
    cache = model(x[:, :5], use_cache=True).cache
    before = [layer.state for layer in cache.layers]
    runs = []
    for _ in range(2):
        for layer, state in zip(cache.layers, before, strict=True):
            layer.state, layer.num_tokens = state, 5
        with fused_forward(model):
            runs.append([model(x[:, i : i + 1], cache=cache).logits for i in range(5, 9)])
    assert all(map(torch.equal, *runs))


def test_gradients_through_an_earlier_state(make_model, ids):
    found = []
    for weights in (None, "float32"):
        model, x = make_model("default").float(), ids(1, 7) * 0 + torch.arange(7) + 3
        cache = model(x[:, :4], use_cache=True).cache
        with torch.no_grad(), fused_forward(model, weights):
            model(x[:, 4:5], cache=cache)
        model(x[:, 5:], cache=cache).logits.sum().backward()
        found.append(model.model.layers[0].attention.k_proj.weight.grad)
    assert torch.allclose(*found, rtol=1e-4, atol=1e-5)


def test_where_memory_is_short_the_model_takes_its_own_step(make_model, ids, monkeypatch):
    model, x = make_model("default").float(), ids(1, 5)
    expected = generated(model, x, None)

    def fails(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(kept, "Runtime", fails)
    assert torch.equal(model.generate(x, **LONG), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"is_causal": False}, "got is_causal=False"),
        ({"foo": None}, "no argument 'foo'"),
        ({"input_ids": torch.zeros(3, 1, dtype=torch.long)}, None),
        ({"position_ids": torch.tensor([[1, 2]] * 2)}, None),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask must be"),
    ],
)
def test_what_forward_refuses_is_refused(make_model, ids, options, error):
    model, raised = make_model("default", position="learned", max_position_embeddings=64).float(), []
    for weights in (None, "float32"):
        cache = model(ids(2, 5), use_cache=True).cache
        with fused_forward(model, weights):
            model(ids(2, 1), cache=cache)
            with pytest.raises((ValueError, TypeError, RuntimeError), match=error) as found:
                model(**{"input_ids": ids(2, 1), "cache": cache} | options)
        raised.append(found.type)
    assert raised[0] is raised[1]
