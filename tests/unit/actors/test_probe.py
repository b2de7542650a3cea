"""An engine whose weights are not what they should be is found; a good one never is."""

import copy
import math

import msgspec
import pytest
import torch

from actors.weights.installer import Installer
from actors.weights.probe import compare, probe_engine
from actors.weights.updater import WeightUpdater
from streamrl.messages import Installed, Probe
from streamrl.messages.codec import pack_ids, pack_logprobs
from tests.fakes.scripted_engine import ScriptedEngine
from tests.kit.loops import until
from tests.unit.actors.fakes import V1, V2, V3, Weights, actor, always, lease, says
from tests.unit.actors.test_worker import tiny_engine

IDS, START = [5, 9, 17, 33, 60, 2, 7, 41], 2


def plain_copy(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights in transformers' own attention: the learner's side of the comparison."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    plain = type(model)(config).eval()
    plain.load_state_dict(model.state_dict())
    return plain


class ProbedWeights(Weights):
    """Documents in small buckets whose manifests carry the log-probs of the model that they were made of."""

    def __init__(self, model: torch.nn.Module, *, tolerance: float = 0.01) -> None:
        super().__init__(model)
        nbytes = sum(self.layout.bucket_bytes)
        self.layout = msgspec.structs.replace(
            self.layout, bucket_bytes=(1000,) * (nbytes // 1000) + ((nbytes % 1000,) if nbytes % 1000 else ())
        )
        ids, plain = torch.tensor(IDS), plain_copy(model)
        with torch.no_grad():
            scores = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[START - 1 :, 0]
        self.probe = Probe(pack_ids(IDS), START, 1.0, pack_logprobs(scores.tolist()), tolerance)

    def manifest(self, ref):
        return msgspec.structs.replace(super().manifest(ref), probe=self.probe)


def flip(engine, name: str = "model.norm.weight", index: int = 3) -> None:
    """One bit of one parameter, in memory."""
    with torch.inference_mode():
        engine.live_tensors()[name].view(torch.int32).reshape(-1)[index] ^= 1 << 30


async def installed(engine, weights: Weights) -> tuple[Installer, Installed]:
    installer = Installer(engine, weights.fetch)
    report = await installer.install(weights.manifest(V1), (), weights.layout)
    assert report is not None and report.ok, report
    return installer, report


async def test_a_good_engine_passes_at_every_version_and_every_look():
    engine, model = tiny_engine()
    weights = ProbedWeights(model)
    installer, report = await installed(engine, weights)
    reports = [report]
    for ref in (V2, V3):
        reports += [await installer.install(weights.manifest(ref), (), weights.layout), await installer.check()]
    assert all(one.probe.failed == "" and one.probe.mean < 1e-5 for one in reports)
    await engine.close()


async def test_one_flipped_bit_in_memory_is_found_with_its_bucket_and_healed_by_loading_the_document_again():
    engine, model = tiny_engine()
    weights = ProbedWeights(model, tolerance=100.0)  # the log-probs alone would not tell
    installer, _ = await installed(engine, weights)
    flip(engine, "lm_head.weight", 7)
    sent: list[Installed] = []
    updater = WeightUpdater(installer, report=sent.append, broken=pytest.fail)

    await updater.check()

    assert [bool(one.probe.failed) for one in sent] == [True, False] and {one.target for one in sent} == {V1}
    offset = 0
    for spec in weights.layout.tensors:
        if spec.name == "lm_head.weight":
            break
        offset += 4 * math.prod(spec.shape)
    bucket = (offset + 4 * 7) // 1000
    assert f"bucket {bucket} of {len(weights.layout.bucket_bytes)}" in sent[0].probe.failed
    assert "lm_head.weight differs from element 7 on" in sent[0].probe.failed
    assert (await installer.check()).probe.failed == ""
    await engine.close()


async def test_an_engine_that_computes_something_else_is_found_by_its_log_probs_though_its_tensors_are_right():
    engine, model = tiny_engine()
    weights = ProbedWeights(model)
    installer, report = await installed(engine, weights)
    assert report.probe.failed == ""
    hook = model.model.norm.register_forward_hook(lambda module, args, out: -out)
    wrong = await installer.check()
    assert "log-probs" in wrong.probe.failed and "bucket" not in wrong.probe.failed and wrong.probe.mean > 0.01
    assert (await installer.check(reload=True)).probe.failed, "loading again cannot help"
    hook.remove()
    assert (await installer.check()).probe.failed == ""
    await engine.close()


async def test_an_engine_that_loads_wrongly_is_reported_twice_and_then_waits_for_a_version_that_passes():
    engine, model = tiny_engine()
    weights = ProbedWeights(model)
    right = engine._weights.stage

    def wrong(tensors):
        staged = right(tensors)
        staged["model.norm.weight"][0] += 1.0
        return staged

    engine._weights.stage = wrong
    sent: list[Installed] = []
    updater = WeightUpdater(Installer(engine, weights.fetch), report=sent.append, broken=pytest.fail)
    await updater.install(weights.manifest(V1), (), weights.layout)
    assert [(one.ok, bool(one.probe.failed)) for one in sent] == [(True, True), (True, True)]
    engine._weights.stage = right
    weights.body[0] ^= 1  # other weights, so that they are loaded
    await updater.install(msgspec.structs.replace(weights.manifest(V2), probe=None), (), weights.layout)
    assert sent[-1].target == V2 and sent[-1].probe is None, "not a version with a probe"
    await engine.close()


async def test_a_worker_tells_its_hub_of_every_probe_and_works_on():
    engine, model = tiny_engine()
    async with actor(engine, always(), weights=ProbedWeights(model), ignore_eos=True) as one:
        one.client.grants(lease(1))
        await one.finished(1)
        assert one.client.reports[-1].probe.failed == "" and one.client.reports[-1].probe.mean < 1e-5
        flip(engine)
        await one.worker._updater.check()
        await until(lambda: len(one.client.reports) == 3)
        assert [bool(r.probe.failed) for r in one.client.reports] == [False, True, False]


async def test_an_engine_that_can_do_neither_says_so_and_is_believed(caplog):
    caplog.set_level("INFO")

    weights = Weights()
    probe = Probe(pack_ids(IDS), START, 1.0, pack_logprobs([-1.0] * 6), 0.01)
    manifest = msgspec.structs.replace(weights.manifest(V1), probe=probe)
    installer = Installer(ScriptedEngine(says("ok")), weights.fetch)
    report = await installer.install(manifest, (), weights.layout)
    assert report.ok and report.probe is None
    assert "the scripted engine cannot score tokens" in caplog.text


def test_numbers_that_are_missing_or_not_finite_are_infinitely_far_off():
    probe = Probe(pack_ids(IDS), 6, 1.0, pack_logprobs([-1.0, -2.0]), 0.5)

    assert compare([-1.5, -2.0], probe) == (0.25, 0.5)
    for scored in ([], [-1.0], [-1.0, float("nan")], [-1.0, float("-inf")]):
        assert compare(scored, probe) == (math.inf, math.inf)


async def test_a_half_precision_engine_is_compared_in_its_own_type():
    engine, model = tiny_engine()
    weights = ProbedWeights(model)
    installer, _ = await installed(engine, weights)
    live = {name: tensor.detach().bfloat16() for name, tensor in engine.live_tensors().items()}

    class Half:
        name = "half"

        def live_tensors(self):
            return live

    assert (await probe_engine(Half(), installer.document)).failed == ""
    live["lm_head.weight"][0, 0] += 1
    assert "lm_head.weight differs from element 0 on" in (await probe_engine(Half(), installer.document)).failed
    await engine.close()
