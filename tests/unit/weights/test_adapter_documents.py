"""The base under adapters: it stays while versions come and go, and goes through every transport as a version does."""

from __future__ import annotations

import pytest
import torch

from streamrl.errors import WeightsError
from streamrl.messages import Offer, VersionRef
from streamrl.weights.adapter import BASE_REF, DOWN, UP, adapted_layers, merged, rank_of
from streamrl.weights.manifest import make_layout, make_manifest
from streamrl.weights.pull.chunk_server import ChunkServer
from streamrl.weights.shm.transport import shm_offer
from streamrl.weights.transport import WeightSource
from tests.unit.weights.conftest import TOKEN, random_bytes

ADAPTER = make_layout([("up" + DOWN, "float32", (2, 41)), ("up" + UP, "float32", (7, 2))], 100)


def test_a_base_outlives_every_version_in_shared_memory(shm, layout):
    writer = shm.begin(BASE_REF, layout, for_good=True)
    writer.append(random_bytes(1888, 1))
    base = writer.commit()
    for version in range(6):
        writer = shm.begin(VersionRef(1, version), ADAPTER)
        writer.append(random_bytes(384, version))
        writer.commit()
    shm.settle()

    left = {path.name for path in shm.directory.iterdir() if path.name.startswith("w.")}
    assert base.exists() and left == {"w.0.0", "w.1.4", "w.1.5", "w.spare.tmp"}
    shm.close()
    assert not base.exists()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_late_actor_gets_the_base_and_the_newest_version(shm, layout, context, serve, transport):
    server = ChunkServer(pull_token=TOKEN, keep_versions=2)
    bodies = {}
    for ref, kind, for_good in [(BASE_REF, layout, True), *((VersionRef(1, v), ADAPTER, False) for v in range(5))]:
        writer = shm.begin(ref, kind, for_good=for_good)
        bodies[ref] = random_bytes(sum(kind.bucket_bytes), 1 + ref.version)
        writer.append(bodies[ref])
        manifest, path = make_manifest(kind, ref, None, writer.digests()), writer.commit()
        (server.add_base if for_good else server.add)(manifest, path, kind)
        bodies[ref] = bodies[ref], manifest, path
    router = serve(server)
    source = WeightSource(context, pull_token=TOKEN, transports=(transport,))
    try:
        for ref, kind in ((BASE_REF, layout), (VersionRef(1, 4), ADAPTER), (BASE_REF, layout)):
            body, manifest, path = bodies[ref]
            offer = shm_offer(path) if transport == "shm" else Offer("zmq", router.endpoint, len(body))
            found = source.fetch(manifest, [offer], kind, deadline_s=30)
            assert bytes(found.document.view(0, len(body))) == body
    finally:
        source.close()


def test_merging_adds_the_scaled_product_in_float32_and_keeps_the_type():
    random = torch.Generator().manual_seed(0)
    base = {"up.weight": torch.randn(7, 41, generator=random).bfloat16(), "norm.weight": torch.ones(41)}
    adapter = {"up" + DOWN: torch.randn(2, 41, generator=random), "up" + UP: torch.randn(7, 2, generator=random)}

    found = dict(merged(base, adapter, 0.5))

    expected = base["up.weight"].float() + 0.5 * adapter["up" + UP] @ adapter["up" + DOWN]
    assert list(found) == list(base) and found["up.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(found["up.weight"], expected.bfloat16())
    assert found["norm.weight"] is base["norm.weight"]
    assert adapted_layers(adapter) == ["up"] and rank_of(ADAPTER) == 2


@pytest.mark.parametrize("change, said", [
    ({"up" + UP: None}, "one is missing"), ({"strange": torch.zeros(1)}, "strange"),
    ({"up" + UP: torch.zeros(7, 3)}, "differ in rank"), ({"up" + UP: torch.zeros(8, 2)}, "another model"),
    ({"down" + DOWN: torch.zeros(2, 4), "down" + UP: torch.zeros(4, 2)}, "has no layer down"),
])
def test_an_adapter_that_does_not_belong_to_the_base_is_refused(change, said):
    adapter = {"up" + DOWN: torch.zeros(2, 41), "up" + UP: torch.zeros(7, 2), **change}
    adapter = {name: tensor for name, tensor in adapter.items() if tensor is not None}

    with pytest.raises(WeightsError, match=said):
        dict(merged({"up.weight": torch.zeros(7, 41)}, adapter, 1.0))
