"""A user's own transport, in a module outside the project: the conformance suite through the real source, and a hub."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
import zmq

from actors.runtime import weight_source
from learner.setup.preflight import check_transports
from streamrl.config.load import from_plain
from streamrl.errors import ConfigError
from streamrl.messages import Hello, InstallSource, Offer, Welcome
from streamrl.weights.document import HEADER_BYTES
from streamrl.weights.transport import Published, WeightSource, load_transport
from tests.unit.config.setting_harness import LiveHub, config_of
from tests.unit.hub.conftest import model_dir  # noqa: F401
from tests.unit.weights.conformance import TransportConformance
from tests.unit.weights.host_wires import ActingEvent, HostWire

OWN = '''
"""Documents travel as files in a folder that both sides mount."""

import shutil
from pathlib import Path

from streamrl.errors import ConfigError
from streamrl.messages import InstallSource, Offer
from streamrl.weights.document import HEADER_BYTES, Document, NotAvailable
from streamrl.weights.transport import Transport

FOLDER = Path(__file__).parent / "folder"


def offer(published):
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / published.manifest.root.hex()
    shutil.copyfile(published.path, path)
    return Offer("", str(path), published.nbytes)


class Receiver:
    source = InstallSource.OTHER

    def __init__(self, offer, actor):
        self.path = Path(offer.name)

    def receive(self, manifest, layout):
        try:
            body = bytearray(self.path.read_bytes()[HEADER_BYTES:])
        except OSError as error:
            raise NotAvailable(f"not in the folder: {error}") from error
        yield 0
        return Document(body, manifest, layout)


def require(device):
    if device == "cuda:9":
        raise ConfigError("the folder is not mounted there")


FOLDER_TRANSPORT = Transport(offer=offer, receiver=Receiver, require=require)
NO_TRANSPORT = 7
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a transport in a module of the user's."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "my_transports.py").write_text(OWN)
    monkeypatch.syspath_prepend(home)
    yield "my_transports:FOLDER_TRANSPORT"
    sys.modules.pop("my_transports", None)


class OwnWire(HostWire):
    """What hub and actor do with any transport that a setting names."""

    def __init__(self, layout, folder, name):
        super().__init__(layout, folder)
        self._name, self._context = name, zmq.Context()
        self._offers = {}

    def publish(self, ref, body):
        manifest = super().publish(ref, body)
        made = load_transport(self._name, setting="publish.transports").offer(
            Published(manifest, self.layout, str(self._newest[1]), "tcp://nowhere:1")
        )
        self._offers[ref] = Offer(self._name, made.name, made.nbytes)
        return manifest

    def receive(self, manifest, *, layout=None, cancelled=None, deadline_s=20.0):
        fetched = WeightSource(self._context, transports=[self._name]).fetch(
            manifest, [self._offers[manifest.ref]] if manifest.ref in self._offers else [], layout or self.layout,
            cancelled=ActingEvent(cancelled or threading.Event(), self._act), deadline_s=deadline_s,
        )
        self.source = fetched.source
        return fetched.document

    def flip(self, offset):
        with open(self._offers[self._newest[0].ref].name, "r+b") as file:
            file.seek(HEADER_BYTES + offset)
            wrong = file.read(1)[0] ^ 0x10
            file.seek(HEADER_BYTES + offset)
            file.write(bytes([wrong]))

    def close(self):
        self._context.destroy(linger=0)
        super().close()


class TestOwnTransport(TransportConformance):
    sources = {InstallSource.OTHER}

    @pytest.fixture
    def wire(self, layout, tmp_path, own):
        wire = OwnWire(layout, tmp_path, own)
        yield wire
        wire.close()


def test_a_hub_offers_it_and_an_actor_installs_over_it(tmp_path, own, model_dir, context):  # noqa: F811
    with LiveHub(tmp_path, config_of(f"publish.transports=[{own},zmq]")) as hub:
        hub.publish(0, model_dir)
        peer = hub.connect()
        peer.send(Hello(
            protocol_min=1, protocol_max=1, actor_id="a1", incarnation=11, run_id=None, engine="test", software="test",
            max_leases=4, transports=(own, "zmq"), installed=None, held=(), outbox=(), next_seq=1,
        ))
        welcome = peer.receive(Welcome)
        local = from_plain({"policy": {"tiny": {"enabled": True}}}, (f"actors.transports=[{own},zmq]",))
        source, device_weights = weight_source(local.actors, context)

        fetched = source.fetch(welcome.manifest, welcome.offers, welcome.layout)

    assert [offer.transport for offer in welcome.offers] == [own, "zmq"]
    assert list(source.factories) == [own, "zmq"] and device_weights is None
    assert fetched.source == InstallSource.OTHER and fetched.document.manifest == welcome.manifest


@pytest.mark.parametrize("fault", ["raise OSError('full')", "raise KeyError('a bug')", "return None"])
def test_a_version_that_it_cannot_offer_comes_over_another_transport(tmp_path, own, model_dir, fault):  # noqa: F811
    path = tmp_path / "home" / "my_transports.py"
    path.write_text(OWN.replace("    FOLDER.mkdir(exist_ok=True)", f"    {fault}"))
    with LiveHub(tmp_path, config_of(f"publish.transports=[{own},zmq]")) as hub:
        hub.publish(0, model_dir)

        assert [offer.transport for offer in hub.connect().join().offers] == ["zmq"]


@pytest.mark.parametrize(
    ("name", "device", "wrong"),
    [
        ("my_transports:FOLDER_TRANSPORT", "cuda:9", "the folder is not mounted there"),
        ("my_transports:NO_TRANSPORT", "cpu", "publish.transports=my_transports:NO_TRANSPORT is int"),
        ("my_transports:FOLDER_TRANSPROT", "cpu", "Did you mean FOLDER_TRANSPORT"),
        ("nowhere_at_all:T", "cpu", "cannot import 'nowhere_at_all'"),
    ],
)
def test_one_that_cannot_work_is_refused_before_the_learner_starts(own, name, device, wrong):
    check_transports([own, "zmq"], torch.device("cpu"))

    with pytest.raises(ConfigError, match=wrong):
        check_transports([name, "zmq"], torch.device(device))
