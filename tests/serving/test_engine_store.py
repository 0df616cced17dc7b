"""The engine with a store of states: what is found is not read again, and no bit of an answer shows it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.served import NO_ENDS, alone, answer, prompt

from tarnn.serving.engine import Engine
from tarnn.serving.request import Request, Sampling
from tarnn.serving.store import StateStore

GREEDY = Sampling(temperature=0)


@pytest.fixture
def stored(engine, served):
    """An engine with a store."""
    return engine(store=StateStore(served()))


def asked(tokens, most=6, **options):
    return Request(np.asarray(tokens, np.int32), most, GREEDY, end_ids=NO_ENDS, **options)


def answered(one, request):
    """(tokens, how many were found): as the token loop alone makes them."""
    stream = one.submit(request)
    [(_, tokens, finish, _)] = answer(stream)
    assert finish == "length"
    assert tokens == alone(one.model, request)[0]
    return tokens, stream.usage.cached_tokens


def test_a_prompt_is_read_once(stored):
    request = asked(prompt(50))
    assert answered(stored, request)[1] == 0
    assert answered(stored, request)[1] == 50
    assert answered(stored, asked([*prompt(50), 1, 2]))[1] == 50
    assert answered(stored, asked([*prompt(49), 1]))[1] == 0
    assert (stored.stats.tokens_read, stored.stats.tokens_cached) == (50 + 2 + 50, 100)


def test_a_conversation_goes_on_from_its_answer(stored):
    tokens, _ = answered(stored, asked(prompt(30), 9))
    assert answered(stored, asked([*prompt(30), *tokens, 7, 7]))[1] == 39


def test_states_on_the_way(stored):
    answered(stored, asked(prompt(2100), boundaries=(700, 5000)))
    for length, found in [(699, 0), (1023, 700), (1024, 1024), (2000, 1024), (2099, 2048)]:
        assert answered(stored, asked([*prompt(length), 5]))[1] == found


def test_states_on_the_way_of_an_answer(stored):
    tokens, _ = answered(stored, asked(prompt(1000), 60))
    assert answered(stored, asked([*prompt(1000), *tokens[:40], 3]))[1] == 1024


def test_forks_of_a_kept_state_find_what_the_first_one_read(stored):
    begin = answer(stored.submit(asked(prompt(20), 3, keep=True)))[0][3]
    request = asked(prompt(30, seed=5), begin=begin)
    assert answered(stored, request)[1] == 23
    assert answered(stored, request)[1] == 53


def test_tenants_share_nothing(stored):
    request = asked(prompt(50), tenant="one")
    assert answered(stored, request)[1] == 0
    assert answered(stored, replace(request, tenant="another"))[1] == 0
    assert answered(stored, request)[1] == 50


def test_a_state_that_a_client_sent_is_never_found_by_its_tokens(stored):
    mine = answer(stored.submit(asked(prompt(20), 0, keep=True, tenant="liar")))[0][3]
    false = replace(mine, tokens=prompt(20, seed=9), proven=False)
    ends = answer(stored.submit(asked(prompt(5), 3, begin=false, keep=True, tenant="liar")))[0][3]
    assert not ends.proven
    honest = asked([*prompt(20, seed=9), *prompt(5)], tenant="liar")
    assert answered(stored, honest)[1] == 0
    false_again = asked(prompt(5), 3, begin=false, tenant="liar")  # and does not find what is true either
    assert answered(stored, false_again)[1] == 20


def test_a_diverged_state_is_not_kept(stored):
    begin = answer(stored.submit(asked(prompt(20), 0, keep=True)))[0][3]
    begin.state.layers[0].S.fill_(torch.nan)
    stream = stored.submit(asked([1, 2], begin=begin, boundaries=(21,)))
    assert answer(stream)[0][2] == "error"
    assert answered(stored, asked([*prompt(20), 1, 2]))[1] == 20


class Broken:
    """A store whose disk is gone."""

    def longest(self, tenant, tokens, room=0):
        raise OSError("no such disk")

    def keep(self, tenant, snapshot):
        raise OSError("no such disk")


def test_an_answer_does_not_depend_on_the_store(served):
    with Engine(served(), store=Broken()) as one:
        assert answered(one, asked(prompt(20)))[1] == 0
        assert one.stats.error == "the store of states: no such disk"
        assert (one.stats.errors, one.ready) == (0, True)
