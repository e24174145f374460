"""The line before the engine: whose run is computed and whose waits, in order.

Gradio's queue holds a run back and tells nobody; this is what the page can tell meanwhile.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Line:
    """Sessions in the order in which they pressed Run. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: list[str] = []
        self._begun: set[str] = set()

    def join(self, session: str) -> None:
        """Go to the end of the line."""
        self.leave(session)
        with self._lock:
            self._sessions.append(session)

    def begin(self, session: str) -> None:
        """The session's run is being computed; it stays before the others until it leaves."""
        with self._lock:
            self._begun.add(session)

    @contextmanager
    def at_work(self, session: str) -> Iterator[None]:
        """Its run is being computed; afterwards it has left."""
        self.begin(session)
        try:
            yield
        finally:
            self.leave(session)

    def leave(self, session: str) -> None:
        """Out of the line, if it was in it."""
        with self._lock:
            self._begun.discard(session)
            if session in self._sessions:
                self._sessions.remove(session)

    def ahead(self, session: str) -> int | None:
        """How many runs come before the session's; None if it does not wait."""
        with self._lock:
            if session in self._begun or session not in self._sessions:
                return None
            return self._sessions.index(session)
