"""The exception that the command line reports without a traceback, and the warning about a slower path."""


class UserError(ValueError):
    """A mistake in the input, in one sentence: what was expected, what was got, what to do."""


class OneProcessError(UserError):
    """An error of one process among several: every process that has one reports it, not only the first."""


NO_MEMORY = (  # what torch and numpy say where an allocation fails, or its size can't be a size
    "can't allocate memory",
    "out of memory",
    "Unable to allocate",
    "not enough memory",
    "calculation overflowed",
    "Overflow when unpacking",
)


def is_out_of_memory(error: BaseException) -> bool:
    words = "" if isinstance(error, UserError) else str(error)
    return isinstance(error, MemoryError) or any(sign in words for sign in NO_MEMORY)


class SlowPathWarning(RuntimeWarning):
    """A result is computed by a slower path than necessary. It says why, once per process."""


class LostRankError(RuntimeError):
    """Another process of a group has ended, or did not answer within the group's timeout."""
