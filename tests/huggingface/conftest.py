"""Small models of every kind."""

from support.model_kinds import ids, kind, make_model, model  # noqa: F401
