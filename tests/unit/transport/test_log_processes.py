"""What a peer says reaches the logs of real processes without control characters, and never as a line of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from streamrl.messages import TO_HUB, Hello, Stop, StopReason
from streamrl.messages.codec import Decoder, encode

ROOT = Path(__file__).parents[3]
FORGED = "gone\x1b[2J\r\n12:00:00 hub      all is well\x07"
COMMANDS = {
    "actor": ["-m", "actors", "connect={}", "actors.actor_id=a1"],
    "relay": ["-m", "streamrl.cli", "relay", "--learner", "{}"],
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_hub_cannot_reach_the_terminal_behind_a_log(name):
    context = zmq.Context()
    hub = context.socket(zmq.ROUTER)
    port = hub.bind_to_random_port("tcp://127.0.0.1")
    words = [one.format(f"tcp://127.0.0.1:{port}") for one in COMMANDS[name]]
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert hub.poll(60_000), "no HELLO came"
        route, frame = hub.recv_multipart()
        assert isinstance(Decoder(TO_HUB).decode(frame), Hello)
        hub.send_multipart([route, bytes(encode(Stop(StopReason.MODEL, False, 0.0, 1, FORGED)))])
        printed = process.communicate(timeout=60)[0].decode()
    finally:
        process.kill()
        process.wait()
        context.destroy(linger=0)

    assert "gone\\x1b[2J" in printed and "\\x07" in printed, printed
    assert not re.search(r"[^\n\t -~]", printed) and not re.search(r"^12:00:00 hub", printed, re.MULTILINE), printed


def test_every_process_starts_its_log_in_one_way():
    """Another `basicConfig` or format would let through what `PrintableFormatter` escapes."""
    sources = [path for package in ("streamrl", "learner", "actors", "envs") for path in (ROOT / package).rglob("*.py")]
    found = [path.name for path in sources if re.search(r"basicConfig|logging\.\w*Handler\(\)", path.read_text())]
    assert found == ["printable.py"], found
    uses = r"^(import|from) logging\b"
    mains = [path for path in sources if path.name == "__main__.py" and re.search(uses, path.read_text(), re.M)]
    assert len(mains) > 3 and all("start_log(" in path.read_text() for path in mains), mains
