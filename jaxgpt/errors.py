"""Errors that are the user's to mend: one line that says what was given, what is allowed and what to do."""


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
