"""What a state takes, and what a softmax Transformer of the same shape would keep instead."""

from typing import NamedTuple

from tarnn.serving.model import ServedModel


class Sizes(NamedTuple):
    """Bytes of one sequence of t tokens.

    Its state takes state_bytes + t · state_bytes_per_token: only softmax layers of a hybrid grow. The keys and values of the same
    model with softmax in every layer of attention, in the weights' own type, would take t · cache_bytes_per_token.
    """

    state_bytes: int
    state_bytes_per_token: int
    cache_bytes_per_token: int


def sizes_of(served: ServedModel) -> Sizes:
    """The sizes of this model's states."""
    model = served.model
    empty, one = (sum(x.nbytes for x in model.model.new_states(1, capacity)) for capacity in (0, 1))
    config, number = model.config, model.dtype.itemsize
    layers = sum(config.attention_of(i) != "none" for i in range(config.num_hidden_layers))
    return Sizes(empty, one - empty, 2 * layers * config.num_key_value_heads * config.head_dim * number)
