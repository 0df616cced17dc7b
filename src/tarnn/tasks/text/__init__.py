"""Text: a causal language model on the tokens of a corpus, and an encoder that guesses hidden tokens."""

from tarnn.tasks.text.task import TextSettings, TextTask

__all__ = ["TextSettings", "TextTask"]
