"""Small models of every kind, and the tokens that a fused step was given."""

from support.fused_texts import tokens  # noqa: F401
from support.model_kinds import ids, kind, make_model, model  # noqa: F401
