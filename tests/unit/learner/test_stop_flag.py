"""Stop requests by signals."""

import io
import logging
import signal
import sys

from learner.ranks.stop_flag import StopFlag, log
from tests.kit.system import until


class InterruptedWrite(io.RawIOBase):
    """A terminal at which Ctrl-C is pressed while the first line is written to it."""

    def __init__(self) -> None:
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: memoryview) -> int:
        if not self.written:
            signal.raise_signal(signal.SIGINT)
        self.written += bytes(data)
        return len(data)


def test_a_signal_counts_whatever_is_being_written(monkeypatch, caplog):
    terminal = InterruptedWrite()
    stream = io.TextIOWrapper(io.BufferedWriter(terminal), write_through=True)
    monkeypatch.setattr(sys, "stderr", stream)
    handler, before = logging.StreamHandler(stream), {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    log.addHandler(handler)
    caplog.set_level(logging.INFO, logger=log.name)
    try:
        stop = StopFlag(grace_s=60)
        log.info("step 8")
        assert stop() and stop.reason == "SIGINT"
        until(lambda: b"finishing this step" in terminal.written)
        assert terminal.written.startswith(b"step 8\nSIGINT: finishing this step, saving")
    finally:
        log.removeHandler(handler)
        for number, old in before.items():
            signal.signal(number, old)
