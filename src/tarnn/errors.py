"""The exception that the command line reports without a traceback, and the warning about a slower path."""


class UserError(ValueError):
    """A mistake in the input, in one sentence: what was expected, what was got, what to do."""


class SlowPathWarning(RuntimeWarning):
    """A result is computed by a slower path than necessary. It says why, once per process."""
