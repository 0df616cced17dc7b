"""Drafts change the speed of a text, never the text."""

import pytest
import torch
from scipy.stats import chisquare
from support.open_folders import make_folder

import tarnn
from tarnn.cli.main import main
from tarnn.decoding.drafts import MOST, DraftLoop, PromptLookup, token_loop
from tarnn.decoding.draws import Sampling, row_sampler
from tarnn.decoding.samplers import greedy
from tarnn.errors import UserError
from tarnn.program.plain import PlainRuntime

PROMPT = "one two three, one two three, one two"
FAMILIES = ["Qwen3.5", "Llama", "Mamba-2", "LFM2"]


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """lm(family): a tiny model, opened once."""
    made = {}

    def opened(family):
        if family not in made:
            made[family] = tarnn.load(make_folder(tmp_path_factory.mktemp("folder") / "tiny", family))
        return made[family]

    return opened


class Known:
    """Expect what a text is known to have, with some wrong tokens among it."""

    def __init__(self, ids, wrong_every):
        self.ids, self.at, self.wrong_every = list(ids), 0, wrong_every

    def read(self, ids):
        self.at += len(ids)

    def propose(self, most):
        part = self.ids[self.at : self.at + most]
        return [(x + 1) % 256 if (self.at + i) % self.wrong_every == 0 else x for i, x in enumerate(part)]


def test_lookup_expects_what_came_before():
    lookup = PromptLookup()
    assert lookup.propose(3) == []
    lookup.read([5, 6])
    assert lookup.propose(3) == []
    lookup.read([7, 5, 6])
    assert lookup.propose(2) == [7, 5]
    assert lookup.propose(7) == [7, 5, 6, 7, 5, 6, 7]  # what is expected to follow it, again
    lookup.read([8, 5, 6])
    assert lookup.propose(1) == [8]  # the last time, not the first
    lookup.read([9, 6, 7, 5, 6])
    assert lookup.propose(1) == [8]  # four that agree come before two or three
    lookup.read([1])
    assert lookup.propose(4) == []


@pytest.mark.parametrize("draft", [1, 3, MOST])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_text_greedily_and_by_seed(lm, family, draft):
    for options in ({"temperature": 0.0}, {"seed": 5, "temperature": 0.3}, {"seed": 6, "repetition_penalty": 1.3}):
        plain = lm(family).generate(PROMPT, max_new_tokens=40, **options)
        drafted = lm(family).generate(PROMPT, max_new_tokens=40, draft=draft, **options)
        assert "".join(plain) == "".join(drafted)
        assert plain.ids == drafted.ids
        assert torch.equal(plain.state.logits, drafted.state.logits)
        for x, y in zip(plain.state.model.tensors().values(), drafted.state.model.tensors().values(), strict=True):
            assert x.shape == y.shape or x.ndim == 4  # caches have room behind their keys
        more = [
            lm(family).generate("!", state=x.state, max_new_tokens=9, temperature=0.0).ids for x in (plain, drafted)
        ]
        assert more[0] == more[1]


@pytest.mark.parametrize("wrong_every", [2, 3, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_right_drafts_save_passes_and_wrong_ones_cost_no_token(lm, family, wrong_every):
    opened, ids = lm(family).opened, lm(family).ids(PROMPT)[None]
    plain = token_loop(opened, opened.new_state(1, 90))
    plain.read(ids)
    text = [int(x) for x in plain.tokens(greedy(), 40)]
    loop = token_loop(opened, opened.new_state(1, 90), draft=5)
    loop.drafter = Known([*ids[0].tolist(), *text], wrong_every)
    loop.read(ids)
    got = []
    for i, token in enumerate(loop.tokens(greedy(), 40)):
        got.append(int(token))
        if i % 7 == 0:  # the state may be looked at between any two tokens
            assert int(loop.state.position[0]) == ids.shape[1] + i + 1
    assert got == text
    assert torch.equal(loop.logits, plain.logits)
    assert loop.accepted + loop.passes == 40
    assert loop.passes < (40 if wrong_every > 1 else 41)
    if wrong_every == 1000:
        assert loop.passes <= 15


def test_drafted_samples_are_the_models_own(lm):
    """χ² of the first token, which is drafted, and of the second one behind a right draft."""
    opened, ids, n = lm("Llama").opened, lm("Llama").ids(PROMPT)[None], 500
    first = token_loop(opened, opened.new_state(1, 64))
    first.read(ids)
    logits, state = first.logits, first.state
    chosen = logits[0].topk(3).indices
    expected = opened.step(chosen[1:2], state)[0][0].topk(3).indices  # behind the second likeliest
    found = torch.zeros(2, 3)
    for seed in range(n):
        loop = DraftLoop(opened, state, logits, draft=2)
        loop.drafter = Known([0, int(expected[0])], 1000)
        draw = row_sampler(Sampling(top_k=3), opened.config.vocab_size, seed=seed)
        one, two = (int(x) for x in loop.tokens(draw, 2))
        found[0] += chosen == one
        if one == chosen[1]:
            assert loop.accepted == (two == expected[0])
            found[1] += expected == two
    behind = opened.step(chosen[1:2], state)[0][0]
    assert found[0].sum() == n
    assert 50 < found[1].sum() < n
    for counts, of, at in ((found[0], logits[0], chosen), (found[1], behind, expected)):
        assert chisquare(counts.double(), counts.sum() * of[at].double().softmax(-1)).pvalue > 1e-3


def test_end_tokens_and_stops_among_drafts(lm):
    opened = lm("Llama").opened
    end = min(opened.end_ids)
    ids = lm("Llama").ids(PROMPT)[None]
    loop = token_loop(opened, opened.new_state(1, 90), draft=4)
    loop.read(ids)
    forced = iter([65, 66, end, 67])

    def draw(logits):
        return torch.tensor([next(forced)])

    loop.drafter = Known([*ids[0].tolist(), 65, 66, end, 67, 68], 1000)
    assert [int(x) for x in loop.tokens(draw, 10, end_ids=opened.end_ids)] == [65, 66, end]
    assert int(loop.state.position[0]) == ids.shape[1] + 3
    text = "".join(lm("Qwen3.5").generate(PROMPT, temperature=0, max_new_tokens=30))
    stop = text[5:8]
    writing = lm("Qwen3.5").generate(PROMPT, temperature=0, max_new_tokens=30, stop=[stop], draft=4)
    assert "".join(writing) == text[: text.index(stop)]


def test_refusals(lm, tmp_path, capsys):
    with pytest.raises(ValueError, match=f"from 1 to {MOST}, or 0 for none; got 12"):
        lm("Llama").generate("ab", draft=12)
    opened = lm("Llama").opened
    with pytest.raises(ValueError, match="one row"):
        token_loop(opened, opened.new_state(2, 9), draft=2).read(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="one row"):
        token_loop(opened, opened.new_state(1, 9), draft=2).fork(2)
    from tarnn.decoding.drafts import runtime_of

    with pytest.raises(UserError, match="runs in PyTorch"):
        runtime_of(print)
    assert isinstance(runtime_of(PlainRuntime(opened.step.program)), PlainRuntime)


def test_the_command_writes_the_same_text(tmp_path, capsys):
    folder = make_folder(tmp_path / "tiny", "Qwen3.5")
    texts = []
    for options in ([], ["--draft", "4"]):
        main(["generate", str(folder), "--prompt", PROMPT, "--max-new-tokens", "20", "--seed", "3", *options])
        out, err = capsys.readouterr()
        texts.append(out)
    assert texts[0] == texts[1]
    assert "drafts were right" in err
    for wrong, why in (
        (["--draft", "12"], "--draft must be from 0 (off) to 11; got 12"),
        (["--draft", "2", "--num-samples", "2"], "--draft 2 does not go with --num-samples 2"),
    ):
        assert main(["generate", str(folder), "--prompt", "ab", *wrong]) != 0
        assert why in capsys.readouterr().err
