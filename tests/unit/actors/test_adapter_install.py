"""A base and its adapters until an engine has them: fetched once, checked bit by bit, merged where they must be."""

import copy

import msgspec
import pytest
import torch

from actors.engines.base import AdapterSpec
from actors.engines.native.engine import NativeEngine
from actors.weights.installer import Installer
from streamrl.messages import Base, InstallSource
from streamrl.messages.codec import unpack_logprobs
from streamrl.weights.adapter import BASE_REF, DOWN, UP, merged
from streamrl.weights.document import Document
from streamrl.weights.transport import FetchedVersion
from tests.unit.actors.fakes import V1, V2, Weights
from tests.unit.actors.test_probe import IDS, START, ProbedWeights, plain_copy
from tests.unit.actors.test_worker import TOKENIZER, tiny_engine

SCALE = 2.0


def adapter_of(model, seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            found[name + DOWN] = 0.2 * torch.randn(2, layer.in_features, generator=random)
            found[name + UP] = 0.2 * torch.randn(layer.out_features, 2, generator=random)
    return found


class Hub:
    """What a hub publishes in a run with adapters, and how often it is asked for it."""

    def __init__(self, model) -> None:
        self.base, self.fetched = Weights(model), []
        self.adapters = {ref: Weights(tensors=adapter_of(model, ref.version)) for ref in (V1, V2)}
        self.message = Base(self.base.manifest(BASE_REF), self.base.layout, SCALE)
        self._probes = {}
        for ref in self.adapters:
            whole = copy.deepcopy(model)
            tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
            whole.load_state_dict(dict(merged(tensors, adapter_of(model, ref.version), SCALE)))
            self._probes[ref] = ProbedWeights(whole).probe

    def fetch(self, manifest, offers, layout, **_):
        self.fetched.append(manifest.ref)
        body = self.base.body if manifest.ref == BASE_REF else self.adapters[manifest.ref].body
        return FetchedVersion(Document(body, manifest, layout).verify(), InstallSource.SHM, 0.0, 0.0)

    async def announces(self, installer, ref):
        weights = self.adapters[ref]
        manifest = msgspec.structs.replace(weights.manifest(ref), probe=self._probes[ref])
        return await installer.install(manifest, (), weights.layout, self.message)


def adapted_engine():
    plain, model = tiny_engine()
    adapter = adapter_of(model, 1)
    spec = AdapterSpec(tuple(n.removesuffix(DOWN) for n in adapter if n.endswith(DOWN)), 2, SCALE)
    engine = NativeEngine(copy.deepcopy(plain_copy(model)), TOKENIZER, max_num_seqs=4, max_tokens=64, adapter=spec)
    return plain, engine, model


class MergingEngine:
    """An engine of somebody who knows nothing of adapters: it only loads whole models."""

    def __init__(self, engine) -> None:
        self.name, self._engine = "own", engine

    @property
    def installed(self):
        return self._engine.installed

    async def install(self, tensors, ref):
        return await self._engine.install(tensors, ref)

    async def score(self, token_ids, *, start, temperature):
        return await self._engine.score(token_ids, start=start, temperature=temperature)

    def stats(self):
        return self._engine.stats()


@pytest.mark.parametrize("takes_adapters", [True, False])
async def test_the_base_is_fetched_once_and_every_version_passes_its_probe(takes_adapters):
    plain, adapted, model = adapted_engine()
    hub, engine = Hub(model), adapted if takes_adapters else MergingEngine(plain)
    installer = Installer(engine, hub.fetch)
    reports = [await hub.announces(installer, ref) for ref in (V1, V2)]
    again = await installer.check()

    assert hub.fetched == [BASE_REF, V1, V2]
    for report in (*reports, again):
        assert report.ok and report.probe.failed == "" and report.probe.largest < 1e-5
    assert reports[1].target == engine.installed == V2
    scores = await engine.score(IDS, start=START, temperature=1.0)
    assert max(abs(a - b) for a, b in zip(scores, hub_scores(hub, V1), strict=True)) > 0.01
    await plain.close()
    await adapted.close()


def hub_scores(hub, ref):
    return unpack_logprobs(hub._probes[ref].logprobs).tolist()


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.lora_B.weight"])
async def test_a_flipped_bit_of_base_or_adapter_is_found_and_reloaded(name):
    plain, engine, model = adapted_engine()
    hub = Hub(model)
    installer = Installer(engine, hub.fetch)
    assert (await hub.announces(installer, V1)).ok
    with torch.inference_mode():
        engine.live_tensors()[name].view(torch.int32).reshape(-1)[3] ^= 1 << 20

    found = await installer.check()
    assert name in found.probe.failed
    recovered = await installer.check(reload=True)
    assert recovered.probe.failed == "" and hub.fetched == [BASE_REF, V1]
    await plain.close()
    await engine.close()


async def test_another_base_of_a_new_learner_is_fetched_and_loaded():
    plain, engine, model = adapted_engine()
    hub = Hub(model)
    installer = Installer(engine, hub.fetch)
    assert (await hub.announces(installer, V1)).ok
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    other = Hub(model)
    installer._fetch = other.fetch
    report = await other.announces(installer, V2)
    assert report.probe.failed == "" and other.fetched == [BASE_REF, V2]
    await plain.close()
    await engine.close()


async def test_an_engine_that_wakes_gets_base_and_adapter_and_a_damaged_base_is_fetched_anew():
    plain, engine, model = adapted_engine()
    hub = Hub(model)
    installer = Installer(engine, hub.fetch)
    assert (await hub.announces(installer, V1)).ok
    sound = bytes(hub.base.body)
    for ref, is_damaged in ((V1, False), (V2, True)):
        await installer.release()
        hub.base.body[1000] ^= 0x40 * is_damaged  # the actor's copy and the transport's are one here
        report = await hub.announces(installer, ref)
        assert report.ok is not is_damaged and (engine.installed == ref) is not is_damaged
    assert "has digest" in report.error
    hub.base.body[:] = sound
    report = await hub.announces(installer, V2)
    assert report.ok and report.probe.failed == "" and hub.fetched == [BASE_REF, V1, V2, BASE_REF, V2]
    await plain.close()
    await engine.close()
