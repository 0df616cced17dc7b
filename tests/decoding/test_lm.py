"""`tarnn.load`: folders of transformers and our own, opened alike; transformers' own model is the oracle."""

import json
import shutil

import pytest
import torch
from support.open_folders import CONFIGS, make_folder
from support.served import save_served
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import tarnn
from tarnn.decoding.loop import TokenLoop
from tarnn.decoding.samplers import greedy
from tarnn.errors import UserError
from tarnn.kernels.cpu import library
from tarnn.ops import backends

PROMPT = "Call me Ishmael, é"


@pytest.fixture(scope="session")
def open_folder(tmp_path_factory):
    """open_folder(family, dtype): a tiny folder, made once."""
    logging.disable_progress_bar()
    made = {}

    def folder(family, dtype=torch.float32):
        if (family, dtype) not in made:
            made[family, dtype] = make_folder(tmp_path_factory.mktemp("folder") / "tiny", family, dtype)
        return made[family, dtype]

    return folder


@pytest.mark.parametrize("family", CONFIGS)
def test_a_folder_says_what_transformers_says(open_folder, family):
    """Float32: logits as near as transformers' whole pass is to its own steps, and the same greedy text."""
    lm, model = tarnn.load(open_folder(family)), oracle(open_folder(family))
    ids = lm.ids(PROMPT)
    with torch.no_grad():
        torch.testing.assert_close(lm.logits(ids[None]), model(ids[None]).logits, atol=2e-4, rtol=1e-4)
    writing = lm.generate(PROMPT, temperature=0, max_new_tokens=40)
    text = "".join(writing)
    wanted = model.generate(ids[None], do_sample=False, max_new_tokens=40)[0, len(ids) :].tolist()
    assert writing.ids == wanted
    assert text == AutoTokenizer.from_pretrained(open_folder(family)).decode(wanted, skip_special_tokens=True)
    assert len(set(wanted)) > (1 if model.config.tie_word_embeddings else 5)  # or the test says little


def oracle(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", CONFIGS)
def test_two_hundred_prompts_go_on_as_those_of_transformers(open_folder, family):
    """Greedily, in rows together."""
    opened, model = tarnn.load(open_folder(family)).opened, oracle(open_folder(family))
    ids = torch.randint(0, 256, (200, 9), generator=torch.Generator().manual_seed(0))
    loop = TokenLoop(opened, opened.new_state(200, 25), step=opened.step)
    loop.read(ids)
    texts = torch.stack(list(loop.tokens(greedy(), 16)), 1)
    model.generation_config.eos_token_id = None
    assert torch.equal(texts, model.generate(ids, do_sample=False, max_new_tokens=16)[:, 9:])


@pytest.mark.parametrize("family", ["Llama", "Qwen3.5"])
def test_weights_of_16_bits_open_as_they_are(open_folder, family):
    folder = open_folder(family, torch.bfloat16)
    lm = tarnn.load(folder)
    assert lm.opened.weights == "bfloat16"
    ids = lm.ids(PROMPT)
    model = oracle(folder)
    with torch.no_grad():
        exact, got = model(ids[None]).logits, lm.logits(ids[None])
        theirs = model.bfloat16()(ids[None]).logits.float()
    if backends.products_by()["bfloat16"] == "float32":  # rows are not rounded
        torch.testing.assert_close(got, exact, atol=2e-4, rtol=1e-4)
    assert (got - exact).norm() <= (theirs - exact).norm()


@pytest.mark.parametrize("family", ["Qwen3.5", "Llama", "Mamba-2"])
def test_a_state_is_a_value(open_folder, family):
    """A text in pieces, from a state that many go on from, is the text in one piece, to the bit."""
    lm = tarnn.load(open_folder(family))
    state = lm.read("Call me ")
    before = [x.clone() for x in state.model.tensors().values()]
    once, again = (lm.read("Ishmael", state) for _ in range(2))
    whole = lm.read("Call me Ishmael")
    assert torch.equal(once.logits, whole.logits)
    assert torch.equal(again.logits, whole.logits)
    step = lm.state()
    for token in lm.ids("Call me Ishmael"):
        logits, step = lm.step(token[None], step)
    assert torch.equal(logits, whole.logits)
    for x, y in zip(state.model.tensors().values(), before, strict=True):
        assert torch.equal(x, y)
    first = "".join(lm.generate("Ishmael", state=state, seed=5, max_new_tokens=20))
    assert first == "".join(lm.generate("Call me Ishmael", seed=5, max_new_tokens=20))


def test_a_text_goes_on_where_it_stopped(open_folder):
    lm = tarnn.load(open_folder("Qwen3.5"))
    whole = lm.generate(PROMPT, temperature=0, max_new_tokens=24)
    text = "".join(whole)
    part = lm.generate(PROMPT, temperature=0, max_new_tokens=10)
    first = "".join(part)
    rest = lm.generate("", state=part.state, temperature=0, max_new_tokens=14)
    assert (first.rstrip("\ufffd") + "".join(rest)).startswith(text[: len(first)].rstrip("\ufffd"))
    assert part.ids + rest.ids == whole.ids


@pytest.mark.parametrize("family", ["Qwen3.5", "Llama"])
def test_a_state_in_a_file_is_the_state(open_folder, tmp_path, family):
    lm = tarnn.load(open_folder(family))
    state = lm.read("Call me é"[:-1])
    lm.save(state, tmp_path / "s")
    back = lm.open_state(tmp_path / "s")
    assert back.recent == state.recent
    assert torch.equal(back.position, state.position)
    assert torch.equal(lm.read("é", back).logits, lm.read("Call me é").logits)
    moved = tarnn.load(shutil.copytree(open_folder(family), tmp_path / "moved"))
    assert torch.equal(moved.open_state(tmp_path / "s").logits, state.logits)
    for other in (open_folder("Qwen3"), oracle(open_folder(family))):  # a live model's sums are in another order
        with pytest.raises(UserError, match="saved by another model"):
            tarnn.load(other).open_state(tmp_path / "s")


def test_ends_and_stops(open_folder):
    """A token of generation_config.json ends a text; so does a stop string, which is not shown."""
    lm = tarnn.load(open_folder("Llama"))
    assert lm.opened.end_ids == {257, 259}
    whole = "".join(lm.generate("ab", temperature=0, max_new_tokens=30))
    stop = whole[5:7]
    writing = lm.generate("ab", temperature=0, max_new_tokens=30, stop=[stop])
    assert "".join(writing) == whole[: whole.index(stop)]
    assert writing.finish == "a stop string was met"


def test_an_end_token_ends_it(open_folder):
    lm = tarnn.load(open_folder("Llama"))
    writing = lm.generate("ab", temperature=0, logit_bias={259: 1000.0})
    assert "".join(writing) == ""
    assert (writing.ids, writing.finish) == ([259], "the text is at its end")


def test_no_token_beyond_the_last_position(tmp_path):
    lm = tarnn.load(make_folder(tmp_path / "tiny", "Llama", max_position_embeddings=12))
    ids = torch.arange(40, 53)
    full = lm.read(ids[:12])
    beyond = [
        lambda: lm.read(ids),
        lambda: lm.read(ids[:1], full),
        lambda: lm.step(ids[:1], full),
        lambda: lm.logits(ids[None]),
        lambda: lm.generate(ids),
        lambda: [*lm.generate("", state=full)],
    ]
    for call in beyond:
        with pytest.raises(ValueError, match=r"sequences of up to 12 tokens \(max_position_embeddings\)"):
            call()


def test_a_tokenizer_that_begins_texts_does(tmp_path):
    lm = tarnn.load(make_folder(tmp_path / "tiny", "Llama", begins=True))
    assert lm.ids("ab").tolist() == AutoTokenizer.from_pretrained(tmp_path / "tiny")("ab")["input_ids"]
    assert lm.ids("ab", starts=False).tolist() == lm.ids("ab").tolist()[1:]


@pytest.mark.parametrize("kind", ["linear", "hybrid"])
def test_our_own_open_alike(tmp_path, kind):
    save_served(tmp_path, kind)
    lm, model = tarnn.load(tmp_path), tarnn.TarnnForCausalLM.from_pretrained(tmp_path).eval()
    ids = lm.ids("to be or not")
    with torch.no_grad():
        torch.testing.assert_close(lm.logits(ids[None]), model(ids[None]).logits, atol=2e-4, rtol=1e-4)
    writing = lm.generate("to be", temperature=0, max_new_tokens=20)
    "".join(writing)
    assert writing.ids == model.generate(lm.ids("to be")[None], do_sample=False, max_new_tokens=20)[0, 5:].tolist()


def test_without_kernels_it_runs_too(tmp_path):
    save_served(tmp_path, "hybrid")
    fused = tarnn.load(tmp_path)
    with library.disabled():
        plain = tarnn.load(tmp_path)
        assert (plain.opened.weights, plain.opened.about[0]) == (None, "plain step")
        ids = plain.ids("to be or not")
        torch.testing.assert_close(plain.logits(ids[None]), fused.logits(ids[None]), atol=2e-4, rtol=1e-4)
        texts = ["".join(x.generate("to be", temperature=0, max_new_tokens=20)) for x in (plain, fused)]
    assert texts[0] == texts[1]


def test_a_live_model_opens(open_folder):
    folder = open_folder("Qwen3")
    lm = tarnn.load(oracle(folder))
    ids = torch.arange(30, 50)
    assert torch.equal(lm.logits(ids[None]), tarnn.load(folder).logits(ids[None]))
    with pytest.raises(ValueError, match="loaded without a tokenizer"):
        lm.generate("ab")


def hooked(model):
    model.model.layers[0].register_forward_hook(lambda *arguments: None)


def with_another_head(model):
    model.lm_head = torch.nn.Sequential(model.lm_head)


def with_a_forward_of_its_own(model):
    model.model.norm.forward = lambda x: x


def with_flex_attention(model):
    model.config._attn_implementation = "flex_attention"


@pytest.mark.parametrize("family", ["Qwen3.5", "Llama"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, r"model.layers.0 \(.*\) has a hook"),
        (with_another_head, r"lm_head \(Sequential\) is not the Linear"),
        (with_a_forward_of_its_own, r"model.norm \(.*\) has a method of its own, forward"),
        (with_flex_attention, "computes flex_attention attention"),
        (torch.nn.Module.train, "in training mode"),
        (torch.nn.Module.double, "torch.float64"),
    ],
)
def test_a_live_model_that_was_changed_is_refused_by_place(open_folder, family, change, reason):
    model = oracle(open_folder(family))
    change(model)
    with pytest.raises(UserError, match=f"this .*ForCausalLM can't be run by tarnn: .*{reason}"):
        tarnn.load(model)


@pytest.mark.parametrize("token", [-1, 264])
def test_what_is_no_token(open_folder, token):
    with pytest.raises(ValueError, match=f"a token must be from 0 to 263; got {token}"):
        tarnn.load(open_folder("Llama")).read([5, token, 7])


def test_what_is_no_row_of_tokens_or_no_number_of_them(open_folder):
    lm = tarnn.load(open_folder("Llama"))
    assert torch.equal(lm.logits([[5, 6, 7]]), lm.logits(torch.tensor([[5, 6, 7]])))
    with pytest.raises(ValueError, match=r"takes token ids \(b, t\), whole numbers; got \(3,\) of torch.int64"):
        lm.logits(torch.tensor([5, 6, 7]))
    with pytest.raises(ValueError, match="max_new_tokens must be 0 or more; got -1"):
        lm.generate("ab", max_new_tokens=-1)


def test_what_is_no_model_or_no_format(open_folder):
    with pytest.raises(UserError, match=r"this Linear can't be run by tarnn: .* known families"):
        tarnn.load(torch.nn.Linear(3, 5))
    with pytest.raises(ValueError, match="weights must be one of float32, bfloat16, int8, int4; got 'int2'"):
        tarnn.load(open_folder("Llama"), "int2")


@pytest.mark.parametrize("ends", ["</s>", [1, "2"], 264, -1])
def test_ends_that_are_no_tokens(tmp_path, ends):
    folder = make_folder(tmp_path / "tiny", "Llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(UserError, match="eos_token_id must be a token below 264, or a list of them; got"):
        tarnn.load(folder)


def test_what_does_not_open(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        tarnn.load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    with pytest.raises(
        UserError, match=r"models of type 'gpt_neox' are not handled; expected one of .*, lfm2, .*, rwkv7"
    ):
        tarnn.load(tmp_path)
    make_folder(tmp_path / "window", "Mistral", sliding_window=16)
    with pytest.raises(UserError, match=r"sliding_window must be null, .*; got 16"):
        tarnn.load(tmp_path / "window")
