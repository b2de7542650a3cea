"""The worker between a hub that says things and an engine that does them: every lease comes back, once and truly."""

import asyncio
import threading

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.engines.native.engine import NativeEngine
from actors.env_calls.executor import MAX_ABANDONED
from actors.leases import RunningLeases
from actors.weights.installer import InstallState
from actors.weights.updater import GRACE_S
from actors.worker import EXIT_ENGINE_HUNG, EXIT_RESTART
from streamrl.environment import Step
from streamrl.errors import EngineError
from streamrl.messages import Announce, Drain, Limits, Outcome, Purpose, ReturnReason
from streamrl.transport.session import Progress
from tests.fakes.scripted_engine import ScriptedEngine
from tests.kit.loops import DEADLINE_S, JumpingLoop, jump, jumping, run, until
from tests.unit.actors.fakes import (
    TOKENIZER,
    V1,
    V2,
    V3,
    VOCAB,
    TableTask,
    Weights,
    actor,
    always,
    ids_of,
    lease,
    make_runner,
    says,
)


def gated(**options) -> tuple[ScriptedEngine, asyncio.Event]:
    gate = asyncio.Event()
    return ScriptedEngine(says("ok"), gate=gate, **options), gate


# --- what comes back --------------------------------------------------------------------------------------------------


async def test_leases_become_groups_of_their_members_and_progress_says_so():
    async with actor(ScriptedEngine(says("ok")), always(), max_leases=3) as one:
        one.client.grants(lease(1, members=4), lease(2, members=2), lease(3, purpose=Purpose.EVAL))
        groups = await one.finished(3)
        members = {group.group_id: sorted(member.index for member in group.members) for group in groups}
        assert members == {1: [0, 1, 2, 3], 2: [0, 1], 3: [0]}
        assert all(group.outcome == Outcome.COMPLETE for group in groups)
        await until(lambda: one.client.progress.held == ())
        assert (one.client.progress.free, one.client.progress.free_eval) == (3, 64)
        assert one.client.progress.tokens_total == 14


async def test_the_heartbeat_beside_the_first_installation_already_offers_leases():
    async with actor(ScriptedEngine(says("ok")), always(), max_leases=3) as one:
        assert one.client.free_at_reports == [3]  # with 0 the hub would grant nothing before the next heartbeat


async def test_groups_that_end_in_one_pass_of_the_event_loop_update_the_progress_once():
    async with actor(ScriptedEngine(says("ok")), always()) as one:
        updates: list[Progress] = []
        one.client.update = updates.append
        for _ in range(20):
            one.worker._update_progress_soon()
        await asyncio.sleep(0)
        assert 1 <= len(updates) <= 2  # the second, if one of those that come by the clock falls in this pass


async def test_a_lease_for_a_version_newer_than_the_installed_one_is_handed_back():
    async with actor(ScriptedEngine(says("ok")), always()) as one:
        one.client.grants(lease(1, min_version=V2), lease(2))
        await one.finished(2)
        assert one.client.returns() == {1: ReturnReason.STALE}
        await one.announce(V2)
        one.client.grants(lease(3, min_version=V2))
        await one.finished(3)
        assert one.client.groups[-1].outcome == Outcome.COMPLETE


async def test_a_group_that_the_hub_would_refuse_is_handed_back_instead_of_sent():
    def reply(prompt, seed, version):
        return [VOCAB + 1] if seed == 5 else ids_of("ok")

    async with actor(ScriptedEngine(reply), always()) as one:
        one.client.grants(lease(1, seeds=(5,)))
        one.client.grants(lease(2))
        await one.finished(2)
        assert one.client.returns() == {1: ReturnReason.ENV_ERROR}
        refused = next(group for group in one.client.groups if group.group_id == 1)
        assert "token id 65 is outside the vocabulary 0..63" in refused.detail and refused.members == ()


async def test_an_engine_error_that_leaves_the_engine_alive_costs_one_group():
    class Choosy(ScriptedEngine):
        async def generate(self, request):
            if request.seed == 5:
                raise EngineError("too long for me")
            return await super().generate(request)

    async with actor(Choosy(says("ok")), always()) as one:
        one.client.grants(lease(1, seeds=(5,)), lease(2))
        await one.finished(2)
        assert one.client.returns() == {1: ReturnReason.ENGINE_ERROR}
        # Another attempt would end as this one did: a run of nothing else must come to its end.
        assert {group.group_id: group.num_failed_episodes for group in one.client.groups} == {1: 1, 2: 0}
        assert not one.life.done()


# --- taken back and given up ------------------------------------------------------------------------------------------


async def test_a_revoked_lease_is_cancelled_and_its_sequences_in_the_engine_end():
    engine, gate = gated(max_num_seqs=2)
    async with actor(engine, always()) as one:
        one.client.grants(lease(1, members=2))
        await until(lambda: engine.stats().running == 2)
        one.client.grants(lease(2), revoked=((1, 0),))
        await until(lambda: engine.stats().running == 1)
        gate.set()
        await one.finished(1)
        assert [group.group_id for group in one.client.groups] == [2]
        assert engine.stats().running == engine.stats().waiting == 0


async def test_a_lease_that_is_granted_again_at_once_after_its_revocation_is_still_held():
    engine, gate = gated()
    async with actor(engine, always()) as one:
        one.client.grants(lease(1))
        await until(lambda: engine.stats().running == 1)
        one.client.grants(lease(1), revoked=((1, 0),))
        await until(lambda: len(engine.requests) == 2 and engine.stats().running == 1)
        await until(lambda: one.client.progress.held == ((1, 0),))
        gate.set()
        await one.finished(1)
        await until(lambda: one.client.progress.held == ())
        assert len(one.client.groups) == 1


async def test_only_training_groups_that_began_before_the_bound_are_handed_back():
    engine, gate = gated()
    async with actor(engine, always()) as one:
        one.client.grants(lease(1), lease(2, purpose=Purpose.EVAL))
        await until(lambda: engine.stats().running == 2)
        await one.announce(V2)
        one.client.grants(lease(3))
        await until(lambda: engine.stats().running == 3)
        await one.announce(V3)
        one.client.heartbeat(V1)
        one.client.heartbeat(V2)
        await one.finished(1)
        assert one.client.returns() == {1: ReturnReason.STALE}
        await until(lambda: engine.stats().running == 2)
        gate.set()
        await one.finished(3)
        assert {g.group_id for g in one.client.groups if g.outcome == Outcome.COMPLETE} == {2, 3}


async def test_leaving_hands_every_lease_back_before_the_link_is_drained():
    engine, _ = gated()
    async with actor(engine, always()) as one:
        one.client.grants(lease(1), lease(2))
        await until(lambda: engine.stats().running == 2)
        one.worker.leave("SIGTERM")
        assert (await one.life).exit_code == 0
        assert one.client.returns() == {1: ReturnReason.DRAIN, 2: ReturnReason.DRAIN}
        assert one.client.drained_with[0] == 2 and one.client.closed


async def test_an_actor_that_the_hub_drains_finishes_its_leases_and_takes_no_more():
    engine, gate = gated()
    async with actor(engine, always()) as one:
        one.client.grants(lease(1), lease(2))
        await until(lambda: engine.stats().running == 2 and len(one.client.progress.held) == 2)
        one.client.says(Drain("streamrl drain", 60.0))
        one.client.grants(lease(3))
        await until(lambda: 3 in one.client.returns())
        assert one.client.progress.free == 0 and not one.life.done()
        gate.set()
        assert (await one.life).exit_code == 0
        assert {g.group_id for g in one.client.groups if g.outcome == Outcome.COMPLETE} == {1, 2}
        assert one.client.returns() == {3: ReturnReason.DRAIN}


async def test_a_signal_during_a_drain_hands_the_rest_back():
    engine, _ = gated()
    async with actor(engine, always()) as one:
        one.client.grants(lease(1))
        await until(lambda: engine.stats().running == 1 and len(one.client.progress.held) == 1)
        one.client.says(Drain("streamrl drain", 60.0))
        await until(lambda: one.client.drained_with is not None)
        one.worker.leave("SIGTERM")
        assert (await one.life).exit_code == 0
        assert one.client.returns() == {1: ReturnReason.DRAIN}


async def test_a_resumed_run_with_other_settings_gets_its_leases_back_and_a_new_process():
    engine, _ = gated()
    async with actor(engine, always()) as one:
        one.client.grants(lease(1), lease(2))
        await until(lambda: engine.stats().running == 2)
        one.client.says(one.welcome(V2))
        await until(lambda: V2 in one.client.installed)
        assert one.client.returns() == {} and not one.life.done(), "the same settings: the same process"
        one.fits = lambda later: False
        one.client.says(one.welcome(V3))
        gone = await one.life
        assert gone.exit_code == EXIT_RESTART and "other settings" in gone.detail
        assert one.client.returns() == {1: ReturnReason.DRAIN, 2: ReturnReason.DRAIN}
        assert one.client.drained_with == (2, ()) and V3 not in one.client.installed


# --- evaluations ------------------------------------------------------------------------------------------------------


def asked(group_id: int, **fields):
    return lease(group_id, purpose=Purpose.EVAL, **fields)


@pytest.mark.parametrize("keep_s", [0.0, 60.0])
async def test_a_new_version_waits_for_the_leases_of_a_pinned_evaluation_only(keep_s):
    engine, gate = gated()
    async with actor(engine, always()) as one:
        one.client.grants(asked(1, keep_s=keep_s), lease(2))
        await until(lambda: engine.stats().running == 2)
        one.client.says(Announce(one.weights.manifest(V2), ()))
        if keep_s == 0.0:
            await until(lambda: V2 in one.client.installed)
        else:
            await until(lambda: one.client.events.empty())
            one.client.says(Announce(one.weights.manifest(V3), ()))  # the newer one is installed in its place
        gate.set()
        await until(lambda: one.client.installed[-1] == (V3 if keep_s else V2))
        (answer,) = [group for group in await one.finished(2) if group.group_id == 1]
        versions = {span.version for span in answer.members[0].versions}
        assert (versions == {V1.version}) is (keep_s > 0) and V2 not in one.client.installed[:-1]


async def test_a_version_that_is_being_fetched_when_a_pinned_lease_comes_is_loaded_after_it():
    engine, gate = gated()
    fetching, fetched = threading.Event(), threading.Event()
    weights = Weights()
    plain = weights.fetch

    def fetch(manifest, *rest, **options):
        if manifest.ref == V2:
            fetching.set()
            assert fetched.wait(DEADLINE_S)
        return plain(manifest, *rest, **options)

    weights.fetch = fetch
    async with actor(engine, always(), weights=weights) as one:
        weights.body[0] ^= 1  # other weights, or there were nothing to fetch
        one.client.says(Announce(weights.manifest(V2), ()))
        await until(fetching.is_set)
        one.client.grants(asked(1, keep_s=60.0))
        await until(lambda: engine.stats().running == 1)
        fetched.set()
        await until(lambda: one.worker._runtime.installer.state is InstallState.VERIFIED)
        gate.set()
        await until(lambda: V2 in one.client.installed)
        (answer,) = await one.finished(1)
        assert {span.version for span in answer.members[0].versions} == {V1.version}


@jumping
async def test_an_evaluation_with_more_prompts_to_come_is_given_a_moment_to_send_them():
    async with actor(ScriptedEngine(says("ok")), always()) as one:
        one.client.grants(asked(1, keep_s=60.0, num_after=1))
        await one.finished(1)
        one.client.says(Announce(one.weights.manifest(V2), ()))
        one.client.grants(asked(2, keep_s=60.0))
        await one.finished(2)
        assert {span.version for group in one.client.groups for span in group.members[0].versions} == {1}
        await until(lambda: V2 in one.client.installed)
        one.client.grants(asked(3, keep_s=60.0, num_after=1, min_version=V2))
        await one.finished(3)
        one.client.says(Announce(one.weights.manifest(V3), ()))
        await until(lambda: one.client.events.empty())
        await jump(GRACE_S)
        await until(lambda: V3 in one.client.installed)


@jumping
async def test_a_pinned_lease_that_never_ends_delays_an_install_only_for_as_long_as_it_says():
    engine, _ = gated()
    async with actor(engine, always()) as one:
        one.client.grants(asked(1, keep_s=60.0))
        await until(lambda: engine.stats().running == 1)
        one.client.says(Announce(one.weights.manifest(V2), ()))
        await until(lambda: one.worker._install_waits)
        await jump(59.0)
        assert V2 not in one.client.installed
        await jump(1.0)
        await until(lambda: V2 in one.client.installed)


async def test_a_lease_for_exactly_another_version_is_handed_back_without_blame():
    async with actor(ScriptedEngine(says("ok")), always()) as one:
        await one.announce(V2)
        one.client.grants(asked(1, keep_s=60.0, min_version=V1), asked(2, min_version=V1))
        await one.finished(2)
        assert one.client.returns() == {1: ReturnReason.DRAIN}


async def test_a_set_is_played_by_its_own_runner_and_an_unknown_one_is_handed_back():
    engine = ScriptedEngine(says("42"))
    async with actor(engine, always(reward=0.0)) as one:
        one.worker._runtime.sets["hard"] = make_runner(always(reward=0.5), engine)
        one.client.grants(asked(1), asked(2, dataset="hard"), asked(3, dataset="unknown"))
        groups = {group.group_id: group for group in await one.finished(3)}
        assert (groups[1].members[0].reward, groups[2].members[0].reward) == (0.0, 0.5)
        assert groups[2].answers == ("42",)
        assert one.client.returns() == {3: ReturnReason.ENV_ERROR} and "unknown" in groups[3].detail


# --- progress ---------------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_without_an_event_is_stuck_and_later_handed_back_though_others_move():
    clock, hold, entered = Clock(), threading.Event(), threading.Event()

    def step(action):
        if action == "hang":
            entered.set()
            assert hold.wait(DEADLINE_S)
        return Step(1.0)

    def reply(prompt, seed, version):
        return ids_of("hang" if seed == 5 else "ok")

    limits = Limits(vocab_size=VOCAB, progress_deadline_s=100.0)

    async def work():
        async with actor(ScriptedEngine(reply), TableTask(step), clock=clock, limits=limits) as one:
            one.client.grants(lease(1, seeds=(5,)))
            await until(entered.is_set)
            for number, seconds in enumerate((90.0, 101.0, 200.0), 2):
                clock.now = seconds
                one.client.grants(lease(number))  # the engine goes on meanwhile
                await one.finished(number - 1)
                expected = () if seconds < 100 else ((1, 0),)
                await until(lambda expected=expected: one.client.progress.stuck == expected)
            await until(lambda: one.client.progress.held == ((1, 0),))
            assert one.client.returns() == {}
            clock.now = 201.0
            await one.finished(4)
            assert one.client.returns() == {1: ReturnReason.TIMEOUT}
            await until(lambda: one.client.progress.held == one.client.progress.stuck == ())

    try:
        run(work)
    finally:
        hold.set()


async def test_an_evaluation_lease_has_a_deadline_of_its_own():
    sent, clock = [], Clock()
    leases = RunningLeases(sent.append, clock)
    for number, purpose in ((1, Purpose.TRAIN), (2, Purpose.EVAL)):
        leases.add(lease(number, purpose=purpose), asyncio.create_task(asyncio.Event().wait()), V1)
    limits = Limits(progress_deadline_s=100.0, eval_progress_deadline_s=500.0)
    clock.now = 201.0
    assert leases.stuck(limits) == ((1, 0),)
    assert leases.stuck(Limits(progress_deadline_s=100.0)) == ((1, 0), (2, 0))  # a hub that knows of one only
    leases.drop_stuck(limits)
    assert leases.held == ((2, 0),) and [group.group_id for group in sent] == [1]
    clock.now = 1001.0
    leases.drop_stuck(limits)
    assert leases.held == ()


async def test_every_member_that_comes_through_is_progress_of_its_lease():
    clock = Clock()
    limits = Limits(vocab_size=VOCAB, progress_deadline_s=100.0)

    gates = {seed: asyncio.Event() for seed in (0, 1)}

    class OneByOne(ScriptedEngine):
        asked = 0

        async def generate(self, request):
            self.asked += 1
            await gates[request.seed].wait()
            return await super().generate(request)

    engine = OneByOne(says("ok"))
    async with actor(engine, always(), clock=clock, limits=limits) as one:
        one.client.grants(lease(1, members=2))
        await until(lambda: engine.asked == 2)
        clock.now = 101.0
        await until(lambda: one.client.progress.stuck == ((1, 0),))
        gates[0].set()
        await until(lambda: one.client.progress.stuck == ())
        clock.now = 201.0  # twice the deadline since the lease began, once since its last event
        gates[1].set()
        (group,) = await one.finished(1)
        assert group.outcome == Outcome.COMPLETE


# --- the end of a broken process --------------------------------------------------------------------------------------


def tiny_engine() -> tuple[NativeEngine, torch.nn.Module]:
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=128, eos_token_id=1, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    return NativeEngine(model, TOKENIZER, max_num_seqs=4, max_tokens=64, num_threads=1), model


async def test_a_real_engine_serves_a_worker():
    engine, model = tiny_engine()
    async with actor(engine, always(), weights=Weights(model), ignore_eos=True) as one:
        one.client.grants(lease(1, members=3))
        (group,) = await one.finished(1)
        assert group.outcome == Outcome.COMPLETE and all(len(m.token_ids) == 4 * 8 for m in group.members)


async def test_a_dead_engine_hands_every_lease_back_once_and_ends_the_process_with_its_exit_code():
    engine, model = tiny_engine()
    entered, hold = threading.Event(), threading.Event()

    def dies(*_):
        entered.set()
        assert hold.wait(DEADLINE_S)
        raise RuntimeError("device lost")

    async with actor(engine, always(), weights=Weights(model)) as one:
        model.register_forward_pre_hook(dies)
        one.client.grants(lease(1, members=2), lease(2), lease(3, purpose=Purpose.EVAL))
        await until(lambda: entered.is_set() and len(one.client.progress.held) == 3)
        hold.set()
        gone = await one.life
        assert gone.exit_code == EXIT_ENGINE_HUNG == 9 and "device lost" in gone.detail
        assert one.client.returns() == dict.fromkeys((1, 2, 3), ReturnReason.ENGINE_ERROR)
        assert [group.num_failed_episodes for group in one.client.groups] == [0, 0, 0]  # others may do better
        assert one.client.drained_with == (3, ())  # nothing was held any more when the link was drained


def test_too_many_hung_environments_end_the_process_after_its_leases_are_handed_back():
    hold, lock, entered = threading.Event(), threading.Lock(), []

    def step(action):
        with lock:
            entered.append(action)
        assert hold.wait(DEADLINE_S)

    count = MAX_ABANDONED + 1

    async def work():
        engine = ScriptedEngine(says("ok"))
        async with actor(engine, TableTask(step), num_threads=count, step_timeout_s=50.0, max_leases=count) as one:
            one.client.grants(*(lease(number) for number in range(count)))
            await until(lambda: len(entered) == count)
            await jump(51.0)
            gone = await one.life
            assert gone.exit_code == EXIT_ENGINE_HUNG and "restart this actor" in gone.detail
            assert set(one.client.returns()) == set(range(count)) and len(one.client.groups) == count
            assert set(one.client.returns().values()) <= {ReturnReason.ENV_ERROR, ReturnReason.ENGINE_ERROR}

    try:
        run(work, loop_factory=JumpingLoop)
    finally:
        hold.set()


async def test_an_engine_that_can_neither_install_nor_return_ends_the_process_with_its_exit_code():
    class Breaks(ScriptedEngine):
        async def install(self, tensors, ref):
            if self.installs:
                raise RuntimeError("out of memory")
            return await super().install(tensors, ref)

    engine = Breaks(says("ok"), gate=asyncio.Event())
    async with actor(engine, always()) as one:
        one.client.grants(lease(1))
        await until(lambda: engine.stats().running == 1)
        one.weights.body[0] ^= 1  # other weights, so that they must be loaded
        one.client.says(one.welcome(V2))
        gone = await one.life
        assert gone.exit_code == EXIT_ENGINE_HUNG and "mixed model" in gone.detail
        assert one.client.returns() == {1: ReturnReason.ENGINE_ERROR}


# --- what it says -----------------------------------------------------------------------------------------------------


def test_the_first_install_is_logged_and_work_is_summed_up_instead_of_later_ones(caplog, monkeypatch):
    monkeypatch.setattr("actors.activity.EVERY_S", 0.0)
    caplog.set_level("INFO")

    async def work():
        async with actor(ScriptedEngine(says("ok")), always(), max_leases=3) as one:
            one.client.grants(lease(1, members=4))
            await one.finished(1)
            await until(lambda: "mean reward" in caplog.text)
            await one.announce(V2)

    run(work)

    assert "working: 1 groups" in caplog.text
    assert caplog.text.count("installed version") == 1
