"""What the processes of a run agree on outside of the devices' programs: that a checkpoint is written, or whole."""

from typing import Protocol, runtime_checkable

PATIENCE = 3600.0
"""Seconds that a process waits for what another one writes or reads: a slow disk is no fault."""


@runtime_checkable
class Group(Protocol):
    """The processes of a run. What they say goes by no device, so that a thread in the background can say it while a
    step runs."""

    @property
    def index(self) -> int:
        """Which of them this one is, from 0."""

    @property
    def count(self) -> int:
        """How many there are."""

    def exchange(self, name: str, said: str, timeout: float) -> list[str]:
        """What each process says under a name, in their order, once all of them have said it.

        A name may be used again: of one name, every process makes its calls in the same order. Raises TimeoutError
        where another has said nothing after `timeout` seconds.
        """
