"""A small model steps on one thread, and nobody else notices."""

import pytest
import torch

from tarnn.decoding import threads
from tarnn.decoding.threads import threads_for_steps


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_one_thread_for_a_small_model_while_it_steps(make_model):
    with threads_for_steps(make_model()):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_a_large_model_or_a_gpus_keeps_all(make_model, monkeypatch):
    with threads_for_steps(make_model().to("meta")):
        assert torch.get_num_threads() == 2
    monkeypatch.setattr(threads, "SMALL", 1000)
    with threads_for_steps(make_model()):
        assert torch.get_num_threads() == 2


def test_an_error_gives_the_threads_back(make_model):
    with pytest.raises(KeyError), threads_for_steps(make_model()):
        raise KeyError
    assert torch.get_num_threads() == 2
