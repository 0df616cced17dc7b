"""The bytes that the server tells of its states are those of the states themselves."""

import pytest
from support.step_models import SERVED, text_model

from tarnn.decoding.opening import open_step
from tarnn.huggingface.config import softmax_twin
from tarnn.models import TarnnForCausalLM
from tarnn.serving.model import ServedModel, StateKey, sizes_of


@pytest.mark.parametrize("kind", ["default", "grouped", "channels", "hybrid", "softmax"])
def test_they_are_those_of_states_and_of_the_twin_with_softmax(kind):
    model = text_model(**SERVED[kind])
    opened = open_step(model)
    sizes = sizes_of(ServedModel("m", opened, opened.step, StateKey("", "float32", "")))
    twin = TarnnForCausalLM(softmax_twin(model.config))
    for t in (0, 7, 40):
        assert model.new_state(1, capacity=t).nbytes == sizes.state_bytes + t * sizes.state_bytes_per_token
        assert twin.new_state(1, capacity=t).nbytes == t * sizes.cache_bytes_per_token
