"""What a user can mend becomes one line on stderr and an exit code; everything else keeps its traceback."""

from __future__ import annotations


class CommandError(Exception):
    """A user's mistake. Its text says what was wrong and what to do."""


USERS = (CommandError, ValueError, OSError, NotImplementedError, ModuleNotFoundError)


def one_line(error: BaseException) -> str:
    """An error's text without line breaks; of an error from the system, what failed and on which file."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return " ".join(str(error).split()) or type(error).__name__
