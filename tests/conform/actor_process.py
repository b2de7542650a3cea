"""How the examined actor is started again and again: by a command, or by the person who reads the terminal."""

import signal
import subprocess
from collections.abc import Callable, Sequence


class Command:
    """The examiner starts the actor itself: it then also sees whether the process ends, and can send SIGTERM."""

    stops_by_signal = True

    def __init__(self, words: Sequence[str], output: int | None = None) -> None:
        self.words, self._output = words, output
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, number: int, num_starts: int) -> None:
        self._process = subprocess.Popen(self.words, stdin=subprocess.DEVNULL, stdout=self._output,
                                         stderr=self._output)

    def end(self, signal_number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal_number)
            if signal_number == signal.SIGKILL:
                self._process.wait()

    def ended(self) -> bool | None:
        return self._process is None or self._process.poll() is not None


class ByHand:
    """A person starts it, perhaps on another machine; whether it ends cannot be seen."""

    stops_by_signal = False

    def __init__(self, address: str, notify: Callable[[str], None]) -> None:
        self._address, self._notify = address, notify

    def start(self, number: int, num_starts: int) -> None:
        again = "Start" if number == 1 else "End the actor if it still runs, and start"
        self._notify(f"{again} it with the address {self._address} ({number} of {num_starts})")

    def end(self, signal_number: int) -> None:
        pass

    def ended(self) -> bool | None:
        return None
