"""The one exception that the command line reports without a traceback: something that the user can mend."""


class UserError(ValueError):
    """A mistake in what was given, told in one sentence: what was expected, what was got, what to do."""
