"""A version whose file is gone before the hub serves it, as a learner of many steps a second leaves it."""

import msgspec
import pytest

from learner.hub.handlers.ranks import MAX_REPLACED
from streamrl.errors import StreamrlError
from streamrl.messages import Publish, VersionRef
from streamrl.messages.codec import encode
from tests.unit.config.setting_harness import LiveHub, config_of
from tests.unit.hub.handlers.test_refused_ranks import MANIFEST


@pytest.mark.timeout(60)
def test_versions_that_were_replaced_are_passed_over_but_not_without_limit(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    epoch = MANIFEST.ref.learner_epoch

    def gone(message, now):
        raise FileNotFoundError(f"no such file: {message.path}")

    with LiveHub(tmp_path, config_of()) as hub:
        monkeypatch.setattr(hub.server.context.weights, "publish", gone)
        for version in range(MAX_REPLACED):
            manifest = msgspec.structs.replace(MANIFEST, ref=VersionRef(epoch, version))
            hub.link._socket.send(encode(Publish(manifest, "/gone", 1)))
        while f"{epoch}:{MAX_REPLACED - 1} was replaced" not in caplog.text:
            hub.link.refresh_status()  # and no version was refused

        manifest = msgspec.structs.replace(MANIFEST, ref=VersionRef(epoch, MAX_REPLACED))
        hub.link._socket.send(encode(Publish(manifest, "/gone", 1)))
        with pytest.raises(StreamrlError, match="the hub refused Publish of learner rank 0: no such file: /gone"):
            while True:
                hub.link.refresh_status()
