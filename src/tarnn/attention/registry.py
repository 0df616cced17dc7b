"""Kinds of attention, and decays of linear attention's state, by name.

A class says what it needs by the arguments of its constructor: a model gives it those that it knows (sizes, causality,
a feature map, a decay, rotary positions …); all others are the options of its name.
"""

from tarnn.registry import Registry

ATTENTIONS = Registry("attention", "tarnn.attention")
DECAYS = Registry("decay", "tarnn.attention")
register, names = ATTENTIONS.register, ATTENTIONS.names
