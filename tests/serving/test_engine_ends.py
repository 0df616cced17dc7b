"""How answers end: at stop strings, end tokens, the last position, an error; and the state that is kept there."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.served import NO_ENDS, alone, answer, prompt

from tarnn.serving.engine import Engine
from tarnn.serving.request import Request, Sampling


def test_a_stop_string_ends_an_answer_and_is_not_shown(engine, served):
    one = engine()
    [(text, tokens, _, _)] = answer(one.submit(Request(prompt(20), 40, Sampling(seed=11), end_ids=NO_ENDS)))
    stop = text[7:9]
    request = Request(prompt(20), 40, Sampling(seed=11), end_ids=NO_ENDS, stop=("nowhere", stop), keep=True)
    [(cut, fewer, finish, snapshot)] = answer(one.submit(request))
    assert (cut, finish) == (text[: text.index(stop)], "stop")
    assert fewer == tokens[: len(fewer)]
    assert len(fewer) < len(tokens)
    _, logits, _ = alone(served(), Request(prompt(20), len(fewer), Sampling(seed=11), end_ids=NO_ENDS))
    assert torch.equal(snapshot.logits, logits)  # the stop's own tokens were read


def test_the_beginning_of_a_stop_string_is_shown_at_the_end(engine):
    one = engine()
    [(text, _, _, _)] = answer(one.submit(Request(prompt(20), 12, Sampling(seed=11), end_ids=NO_ENDS)))
    stop = text[-2:] + "and more"
    request = Request(prompt(20), 12, Sampling(seed=11), end_ids=NO_ENDS, stop=(stop,))
    assert answer(one.submit(request))[0][:3:2] == (text, "length")


def test_an_end_token_is_read_and_not_shown(engine, served):
    one = engine()
    free = Request(prompt(20), 30, Sampling(seed=4), end_ids=NO_ENDS)
    [(_, tokens, _, _)] = answer(one.submit(free))
    request = Request(prompt(20), 30, Sampling(seed=4), end_ids=frozenset({tokens[9], 256}), keep=True)
    [(text, fewer, finish, snapshot)] = answer(one.submit(request))
    expected, logits, _ = alone(served(), request)
    assert (fewer, finish) == (expected, "stop")
    assert torch.equal(snapshot.logits, logits)
    assert text == served().decoder()(fewer[:-1])


def test_an_end_token_beside_stop_strings(engine):
    one = engine()
    [(_, tokens, _, _)] = answer(one.submit(Request(prompt(20), 30, Sampling(seed=4), end_ids=NO_ENDS)))
    request = Request(prompt(20), 30, Sampling(seed=4), end_ids=frozenset({tokens[9]}), stop=("nowhere",))
    [(_, fewer, finish, _)] = answer(one.submit(request))
    assert (fewer, finish) == (tokens[: tokens.index(tokens[9]) + 1], "stop")


@pytest.mark.parametrize("keep", [True, False])
def test_the_last_position(engine, keep):
    one = engine("short")
    stream = one.submit(Request(prompt(40), 100, Sampling(seed=1), end_ids=NO_ENDS, keep=keep))
    [(_, tokens, finish, snapshot)] = answer(stream)
    assert (len(tokens), finish) == (8, "length")
    assert (snapshot is not None) == keep
    [(_, tokens, finish, _)] = answer(one.submit(Request(prompt(48), 100, end_ids=NO_ENDS)))
    assert (tokens, finish) == ([], "length")
    with pytest.raises(ValueError, match="reads 48 tokens at most; the prompt has 49"):
        one.submit(Request(prompt(49)))


def test_half_a_character_is_completed_by_what_goes_on(engine):
    one = engine()
    euro = np.frombuffer("€".encode(), np.uint8).astype(int)
    force = [Sampling(temperature=0, logit_bias={int(byte): 1e4}) for byte in euro]
    events = answer(one.submit(Request(prompt(3), 1, force[0], keep=True)))
    texts = [events[0][0]]
    for way in force[1:]:
        events = answer(one.submit(Request(max_tokens=1, sampling=way, begin=events[0][3], keep=True)))
        texts.append(events[0][0])
    assert texts == ["", "", "€"]


def test_logprobs(engine, served):
    one = engine()
    request = Request(prompt(20), 5, Sampling(seed=2, temperature=0.5), end_ids=NO_ENDS, logprobs=3)
    told = [x for event in one.submit(request) for x in event.logprobs]
    tokens, _, _ = alone(served(), request)
    assert [x.token for x in told] == tokens
    _, logits, _ = alone(served(), Request(prompt(20), 0))
    expected = logits[0].double().log_softmax(-1)
    assert told[0].logprob == pytest.approx(float(expected[tokens[0]]), abs=1e-5)
    top = expected.topk(3)
    assert [token for token, _ in told[0].likeliest] == top.indices.tolist()


def test_logits_that_are_nan_end_their_row_alone(engine, served):
    one = engine()
    spoilt = answer(one.submit(Request(prompt(9), 0, keep=True)))[0][3]
    spoilt.logits.fill_(torch.nan)
    good = [Request(prompt(9, seed=i), 30, Sampling(seed=i), end_ids=NO_ENDS) for i in range(3)]
    streams = [one.submit(x) for x in good]
    events = list(one.submit(Request(max_tokens=5, begin=spoilt)))
    assert [(x.finish, x.tokens) for x in events] == [("error", ())]
    assert "diverged" in events[0].error
    assert [answer(x)[0][1] for x in streams] == [alone(served(), x)[0] for x in good]
    assert one.stats.errors == 1


class Breaks:
    """A step that fails once when it is told to."""

    def __init__(self, step):
        self.step, self.fails = step, False

    def __getattr__(self, name):
        return getattr(self.step, name)

    def over(self, *arguments):
        step = self.step.over(*arguments)

        def run(ids):
            if self.fails:
                self.fails = False
                raise RuntimeError("out of paper")
            step(ids)

        return run


def test_a_model_that_fails_ends_what_was_going_on(served):
    model = replace(served(), step=Breaks(served().step))
    with Engine(model) as one:
        request = Request(prompt(9), 10**6, Sampling(temperature=0), end_ids=NO_ENDS)
        stream = one.submit(request)
        next(stream)
        model.step.fails = True
        assert [x.error for x in stream][-1] == "the model failed: RuntimeError: out of paper"
        assert (one.stats.errors, one.ready) == (1, True)
        short = Request(prompt(9), 5, Sampling(temperature=0), end_ids=NO_ENDS)
        assert answer(one.submit(short))[0][1] == alone(served(), short)[0]


REFUSED = [
    (Request(), "the prompt is empty"),
    (Request(np.array([1.5])), "whole numbers"),
    (Request(np.array([[1]])), "token ids"),
    (Request(np.array([257])), "from 0 to 256; got 257"),
    (Request(np.array([-1])), "from 0 to 256; got -1"),
    (Request(prompt(3), -1), "max_tokens must be 0 or more"),
    (Request(prompt(3), n=0), "n must be at least 1"),
    (Request(prompt(3), logprobs=300), "logprobs must be from 0 to 257"),
    (Request(prompt(3), stop=("",)), "at least one character"),
    (Request(prompt(3), sampling=Sampling(seed=2**64)), "64 bits"),
    (Request(prompt(3), sampling=Sampling(temperature=-1)), "temperature"),
    (Request(prompt(3), sampling=Sampling(logit_bias={999: 1.0})), "999"),
]


@pytest.mark.parametrize(("request_", "sentence"), REFUSED)
def test_what_can_not_be_is_refused(served, request_, sentence):
    with pytest.raises(ValueError, match=sentence):
        Engine(served()).submit(request_)


@pytest.mark.parametrize(
    ("kind", "sentence"), [("wide", r"logits are \(1, 257\)"), ("log-weighted", "expected LinearState with S")]
)
def test_a_state_of_another_model_is_refused(engine, served, kind, sentence):
    begin = answer(engine(kind).submit(Request(np.array([255]), 0, keep=True)))[0][3]
    with pytest.raises(ValueError, match=sentence):
        Engine(served()).submit(Request(max_tokens=1, begin=begin))
