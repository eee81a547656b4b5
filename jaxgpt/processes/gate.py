"""Where all processes of a run stop: before the same program, whoever is told to stop first.

Every process launches the same programs in the same order, but the hosts run ahead of their devices, some further than
others. So each asks its gate before each program. When one is to stop, all gates are held and say how many programs
they have let pass; the largest of these numbers is where all stop. A process that has passed fewer goes on until then:
those ahead wait for its part of their collectives.
"""

import threading


class Gate:
    """Counts the programs that a process launches, and ends them at the number agreed upon."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passed = 0
        self._until: int | None = None
        self.signal: int | None = None
        """The signal that asked for it."""

    def ends(self) -> bool:
        """To be asked before each program: whether it is not to be launched, nor any after it. While gates are held,
        waits until it is agreed where all stop."""
        with self._changed:
            while self.signal is not None and self._until is None:
                self._changed.wait()
            if self._until is not None and self._passed >= self._until:
                return True
            self._passed += 1
            return False

    def hold(self, signal: int) -> int:
        """Lets no more pass for now; returns how many have passed. From any thread."""
        with self._changed:
            self.signal = signal
            return self._passed

    def release(self, until: int) -> None:
        """Lets pass as many as agreed, counted from the start. From any thread."""
        with self._changed:
            self._until = until
            self._changed.notify_all()
