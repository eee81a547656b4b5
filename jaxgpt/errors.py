"""Errors that are the user's to mend: one line that says what was given, what is allowed and what to do."""

import errno
import os

RESUMABLE = 75
"""Exit status of what the same command goes on with, from the last checkpoint: EX_TEMPFAIL of sysexits.h. Of a run that
a signal ended and that is saved, whatever the signal was; and where another process of the run is gone."""
REFUSED_BY_SYSTEM = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR),
)
"""What the operating system says of a disk or folder that the user must mend."""


class UserError(ValueError):
    """A value, file or combination that jaxgpt refuses. The command line prints its one line and exits with 2.

    Bugs raise anything else and keep their traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def require(condition: bool, flag: str, value: object, allowed: str, fix: str = "") -> None:
    """Raises UserError(f"{flag} {value}: {allowed}; {fix}") unless condition holds."""
    if not condition:
        raise UserError(f"{flag} {value}: {allowed}" + (f"; {fix}" if fix else ""))


def told_of(error: BaseException) -> tuple[str, int] | None:
    """What a command says of an error in one line, and its exit status; None of a bug, which keeps its traceback."""
    if isinstance(error, UserError):
        return str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, OSError) and error.errno in REFUSED_BY_SYSTEM:
        return f"{error.filename or 'disk'}: {error.strerror or os.strerror(error.errno)}", 2
    return None
