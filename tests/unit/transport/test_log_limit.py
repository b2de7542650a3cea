"""Lines that a peer can cause at any rate, and text that it can make of any characters."""

import io
import logging

import pytest

from streamrl.messages.printable import PrintableFormatter, printable, printable_lines
from streamrl.transport.peers import MAX_CHARS, LogLimit

log = logging.getLogger("streamrl.test_log_limit")


def test_a_burst_passes_then_one_line_an_interval_which_says_how_many_were_left_out(caplog):
    now = 0.0
    told = LogLimit(log, burst=3, interval_s=2.0, clock=lambda: now)
    for number in range(1000):
        told.warning("line %d", number)
    now = 2.0
    told.warning("later")
    told.warning("at once")
    now = 100.0
    for _ in range(9):
        told.warning("much later")

    assert caplog.messages[:4] == ["line 0", "line 1", "line 2", "later (and 997 more such lines before it)"]
    assert caplog.messages[4:] == ["much later (and 1 more such lines before it)", "much later", "much later"]


def test_a_line_is_cut(caplog):
    LogLimit(log).warning("%s", "x" * 10_000)

    assert caplog.messages == ["x" * MAX_CHARS]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, with é and 漢", "plain, with é and 漢"), ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\r\nb\tc", "a\\r\\nb\\tc"), ("\u202eback", "\\u202eback"), ("\x9b2J", "\\x9b2J"),
    ],
)
def test_what_is_not_printable_is_shown_as_an_escape(text, shown):
    assert printable(text) == shown and printable(text).isprintable()


def test_lines_stay_lines():
    assert printable_lines("a\n\tb\x1b") == "a\n\tb\\x1b"


def test_no_message_can_pass_for_a_line_of_another_process_or_reach_the_terminal_behind_it():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(asctime)s hub      %(message)s", datefmt="%H:%M:%S"))
    own = logging.Logger("own")
    own.addHandler(handler)
    own.warning("%s left: %s", "a1", "bye\n12:00:00 learner  all is well\x1b[1A\x1b[2K")
    try:
        raise RuntimeError("cause\x07")
    except RuntimeError:
        own.exception("it failed")

    first, second, *rest = stream.getvalue().splitlines()
    assert first.endswith("hub      a1 left: bye")
    assert second == "  12:00:00 learner  all is well\\x1b[1A\\x1b[2K"
    assert rest[0].endswith("it failed") and rest[-1] == "  RuntimeError: cause\\x07"
