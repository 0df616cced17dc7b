"""The exception that the command line reports without a traceback, and the warning of a slower path."""


class UserError(ValueError):
    """A mistake in what was given, told in one sentence: what was expected, what was got, what to do."""


class SlowPathWarning(RuntimeWarning):
    """What was asked for is computed, but by a slower path than there could be; says why, and once a process."""
