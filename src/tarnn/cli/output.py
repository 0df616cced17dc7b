"""stdout as a stream that may end: the reader goes away, the disk fills up."""

import os
import stat
import sys

CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Output:
    r"""Writes text at once. `closed` once nobody reads it any more (`| head`); that is no error.

    What an untrained model writes must not steer a terminal: there, control characters (escape among them)
    come out escaped, as \x1b. Elsewhere text is written as it is, but for characters that the encoding lacks, which
    become question marks. A full disk and the like are raised.
    """

    def __init__(self) -> None:
        self.closed = False
        self._line_open = False

    def write(self, text: str) -> None:
        if self.closed or not text:
            return
        encoding = sys.stdout.encoding or "utf-8"
        shown = text.translate(CONTROL) if sys.stdout.isatty() else text
        try:
            sys.stdout.write(shown.encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()
        except OSError as error:
            leave_stdout()
            if not isinstance(error, BrokenPipeError):
                raise
            self.closed = True
        self._line_open = not text.endswith("\n")

    def end_line(self, *, always: bool = False) -> None:
        """A line end, so that a terminal's prompt gets a line of its own; elsewhere the text stays exact."""
        if self._line_open and (always or sys.stdout.isatty()):
            self.write("\n")


def writes_to_file() -> bool:
    """Whether stdout is a file: a terminal shows its text, and so may what reads from a pipe."""
    try:
        return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):
        return False


def same_stream() -> bool:
    """Whether stdout and stderr go to one place (`2>&1`), where a status line must not follow a text on its line."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False


def leave_stdout() -> None:
    """Redirect stdout to devnull so that Python does not raise BrokenPipeError at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
