"""The tokens that a fused step was given."""

from support.fused_texts import tokens  # noqa: F401
