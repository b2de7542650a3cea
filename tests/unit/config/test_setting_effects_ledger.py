"""Settings of grouping, staleness, filters and leases: from the config to a ledger that behaves differently."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from learner.hub.ledger.ledger import Ledger
from learner.hub.ledger.plan import plan_batch
from learner.hub.setup import make_ledger
from learner.hub_client.settings import hub_settings, limits
from streamrl.config.load import from_plain, load_config, to_plain
from streamrl.config.rules import steps_per_batch
from streamrl.config.schema import Config
from streamrl.errors import ConfigError
from streamrl.messages import TO_HUB, ActorHeartbeat, RejectReason, ReturnReason, Sampling, VersionRef, Welcome
from streamrl.messages.codec import Decoder
from streamrl.transport.session import ActorSession, Deliver, Disconnected, Send
from tests.unit.hub.factories import FakeActor, cut, end_batch, publish, run_started, train

SMALL = (
    "experiment=quickstart", "trainer.num_steps=50", "rollout.num_prompts_per_step=2",
    "rollout.num_responses_per_prompt=2", "staleness.eta=1",
)
VOCAB_SIZE = 100
BASE = to_plain(load_config(SMALL))


def config_of(*words: str) -> Config:
    """The small run with these words on top."""
    return from_plain(BASE, words)


def settings_of(*words: str, run_dir: Path = Path("/nowhere"), bind: str = "tcp://127.0.0.1:0"):
    """What the learner would tell its hub under these words."""
    return hub_settings(
        config_of(*words), started=run_started(), run_dir=run_dir, lineage=(), dp_ranks=(0,), bind=bind,
        rank_endpoint=f"ipc://{run_dir}/ranks", shm_dir=run_dir, vocab_size=VOCAB_SIZE, restore_path=None,
    )


def ledger_of(*words: str) -> Ledger:
    ledger = make_ledger(settings_of(*words))
    publish(ledger, VersionRef(1, 0))
    return ledger


def joined(ledger: Ledger, name: str = "a1", *, slots: int = 50) -> FakeActor:
    actor = FakeActor(ledger, name, incarnation=11 + ord(name[-1]), slots=slots)
    actor.join()
    return actor


def state_of(ledger: Ledger) -> tuple[float, float, float]:
    """Groups that wait for an actor, that are held complete, that were dropped."""
    counts = ledger.counters()
    return counts["num_groups_ready"], counts["num_groups_queued"], counts["num_groups_dropped"]


# --- how much is drawn, and in which order ---------------------------------------------------------------------------


@pytest.mark.shows("trainer.num_steps", "rollout.num_prompts_per_step", "staleness.eta")
@pytest.mark.parametrize(
    ("word", "num_leases"),
    [
        ("rollout.num_prompts_per_step=2", 4), ("rollout.num_prompts_per_step=5", 10), ("staleness.eta=0", 2),
        ("staleness.eta=3", 8), ("trainer.num_steps=1", 2), ("trainer.eval_only=true", 0),
    ],
)
def test_the_lead_in_groups_follows_batch_eta_and_the_steps_of_the_run(word, num_leases):
    assert len(joined(ledger_of(word)).ask()) == num_leases


@pytest.mark.shows("staleness.force")
@pytest.mark.parametrize(("word", "num_needed"), [("staleness.force=null", 2), ("staleness.force=3", 8)])
def test_a_forced_lag_waits_for_as_many_batches_as_are_set_in_place_of_eta(word, num_needed):
    ledger = ledger_of(word)
    actor = joined(ledger)
    leases = actor.ask()
    for lease in leases[: num_needed - 1]:
        actor.finish(lease)
    assert ledger.cut_batch(0) is None
    actor.finish(leases[num_needed - 1])

    assert len(ledger.cut_batch(0)) == 2


@pytest.mark.shows("learner.num_minibatches")
def test_the_plan_of_a_batch_has_as_many_equal_minibatches_as_are_set_and_the_bound_knows_their_steps():
    def planned(*words: str) -> tuple[list[int], int]:
        settings, ledger = settings_of(*words), ledger_of(*words)
        actor = joined(ledger)
        for lease in actor.ask():
            actor.finish(lease)
        rows = plan_batch(ledger.cut_batch(0), 1, settings.num_minibatches)
        end_batch(ledger, steps_per_batch(config_of(*words)))
        return [row.minibatch for row in rows], ledger.lag.rule.max_lag

    assert planned() == ([0, 0, 0, 0], 2)
    assert planned("learner.num_minibatches=2") == ([0, 0, 1, 1], 5)
    assert planned("learner.num_epochs=3") == ([0, 0, 0, 0], 8)


def test_an_evaluation_only_run_still_leases_evaluations():
    ledger = ledger_of("trainer.eval_only=true")
    ledger.evals.request(0, version=0, num_prompts=3)

    assert [lease.purpose for lease in joined(ledger).ask(free_eval=9)] == [1, 1, 1]


def test_single_answers_make_a_batch_without_waiting_for_siblings():
    """Four prompts of one answer each: every answer is a whole group the moment it comes in."""
    ledger = ledger_of(
        "rollout.num_responses_per_prompt=1", "rollout.num_prompts_per_step=4", "advantage.baseline=batch",
    )
    actor = joined(ledger)
    leases = actor.ask()

    assert {lease.members for lease in leases} == {(0,)}
    for done, lease in enumerate(leases[:4], start=1):
        actor.finish(lease, rewards=[float(done % 2)])
        assert state_of(ledger)[1:] == (done, 0)
    assert len(cut(ledger)) == 4


@pytest.mark.shows("rollout.num_responses_per_prompt")
@pytest.mark.parametrize("group_size", [1, 2, 6])
def test_the_group_size_is_the_number_of_members_of_a_lease(group_size):
    words = (f"rollout.num_responses_per_prompt={group_size}", "advantage.baseline=none")
    (lease, *_) = joined(ledger_of(*words)).ask()

    assert lease.members == tuple(range(group_size)) and len(set(lease.seeds)) == group_size


@pytest.mark.shows("data.shuffle")
def test_without_shuffling_prompts_come_in_order_and_the_seed_decides_the_shuffled_order():
    orders = [
        [lease.prompt_index for lease in joined(ledger_of("staleness.eta=9", *words)).ask()]
        for words in (["data.shuffle=false"], [], ["run.seed=7"])
    ]

    assert orders[0] == list(range(20))
    assert orders[1] != orders[0] != orders[2] != orders[1]


@pytest.mark.shows("run.seed")
def test_the_seed_of_the_run_decides_what_members_sample():
    words = ("run.seed=1", "run.seed=1", "run.seed=2")
    first, again, other = (joined(ledger_of(word)).ask()[0].seeds for word in words)

    assert first == again and not set(first) & set(other)


@pytest.mark.shows("env.name", "env.path", "env.options")
def test_another_task_or_another_option_of_it_gives_other_prompts(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "def record(split, index):\n    return {'prompt': f'mine {index}'}\n\n"
        "def reward(record, completion):\n    return 1.0\n"
    )
    words = (["env.name=string.reverse"], ["env.name=string.sort"], ["env.options.alphabet=vwxyz"], [f"env.path={own}"])
    reverse, sort, letters, mine = (joined(ledger_of("data.shuffle=false", *word)).ask()[0].prompt for word in words)

    assert len({reverse, sort, letters, mine}) == 4
    assert b"mine 0" in mine


@pytest.mark.shows(
    "rollout.train.sampling.temperature", "rollout.test.sampling.temperature", "rollout.test.sampling.top_p",
    "rollout.test.sampling.top_k", "rollout.test.sampling.min_p",
)
@pytest.mark.parametrize(
    ("split", "name", "value"),
    [
        ("train", "temperature", 0.7), ("test", "temperature", 0.7), ("test", "top_p", 0.8), ("test", "top_k", 9),
        ("test", "min_p", 0.125),
    ],
)
def test_a_lease_carries_the_sampling_of_its_split(split, name, value):
    ledger = ledger_of(f"rollout.{split}.sampling.{name}={value}")
    ledger.evals.request(0, version=0, num_prompts=1)
    leases = joined(ledger).ask(free_eval=1)

    for lease in leases:
        changed = lease.purpose == (split == "test")
        assert (getattr(lease.sampling, name) == value) is changed


@pytest.mark.shows("rollout.train.member_temperatures", "rollout.train.member_top_p")
def test_the_members_of_a_group_have_samplings_in_turn_and_must_be_drawn_with_them():
    actor = joined(ledger_of(
        "rollout.num_responses_per_prompt=3", "rollout.train.member_temperatures=[0.5,2.0]",
        "rollout.train.member_top_p=[1.0,1.0,0.9]",
    ))
    assert actor.ask()[0].samplings == (Sampling(0.5), Sampling(2.0), Sampling(0.5, 0.9, 1024))

    actor = joined(ledger_of("rollout.train.member_temperatures=[0.5,2.0]"))
    first, second, *_ = actor.ask()
    refused = actor.send(actor.group(first))
    assert refused.reason == RejectReason.MALFORMED and "the lease asked for Sampling(temperature=0.5" in refused.detail
    group = actor.group(second)
    drawn = zip(group.members, second.samplings, strict=True)
    members = tuple(msgspec.structs.replace(one, sampling=own) for one, own in drawn)
    assert actor.send(msgspec.structs.replace(group, members=members)).kind == "accepted"


@pytest.mark.shows("rollout.train.final_temperature", "rollout.train.num_annealing_steps")
def test_the_temperature_moves_from_batch_to_batch_of_groups():
    actor = joined(ledger_of(
        "rollout.train.final_temperature=0.5", "rollout.train.num_annealing_steps=4", "staleness.eta=7"
    ))
    leases = actor.ask()
    temperatures = {lease.group_id // 2: lease.sampling.temperature for lease in leases}
    assert len(temperatures) > 5
    assert temperatures == {batch: max(0.5, 1.0 - 0.125 * batch) for batch in temperatures}
    assert {actor.finish(lease).kind for lease in leases} == {"accepted"}


@pytest.mark.parametrize(("words", "said"), [
    (("rollout.train.final_temperature=0.5",), "need each other"),
    (("rollout.train.num_annealing_steps=5",), "need each other"),
    (("rollout.train.member_temperatures=[0.5,0]",), "must be positive numbers"),
    (("rollout.train.member_top_p=[1.5]",), "above 0 and at most 1"),
    (("rollout.train.member_top_p=[0.5]", "rollout.train.final_temperature=1", "rollout.train.num_annealing_steps=5"),
     "leave one of them out"),
    (("distill.teacher=http://host:1/v1", "rollout.train.member_temperatures=[1,0.5]"), r"sample at \[0.5\]"),
    (("distill.teacher=http://host:1/v1", "rollout.train.final_temperature=0.8",
      "rollout.train.num_annealing_steps=5"), r"temperature 1 only, .* sample at \[0.8\]: leave these out"),
])
def test_samplings_that_contradict_each_other_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        config_of(*words)


@pytest.mark.parametrize(
    ("words", "keep_s"), [([], 1800.0), (["eval.pin_s=60"], 60.0), (["eval.pin=false"], 0.0)]
)
def test_an_evaluation_keeps_its_version_for_as_long_as_set(words, keep_s):
    ledger = ledger_of(*words)
    ledger.evals.request(0, version=0, num_prompts=1)
    (lease,) = [one for one in joined(ledger).ask(free_eval=1) if one.purpose]
    assert lease.keep_s == keep_s


def test_a_set_is_asked_with_its_own_prompts_and_sampling(tmp_path):
    (tmp_path / "hard.jsonl").write_text('{"question": "abc", "answer": "cba"}\n')
    hard = f"{{path: {tmp_path}/hard.jsonl, reward: {{type: exact}}, sampling: {{temperature: 0.3}}}}"
    ledger = ledger_of(f"eval.datasets={{hard: {hard}, upper: {{env: {{name: string.sort}}}}}}")
    for number, name in enumerate(("", "hard", "upper")):
        ledger.evals.request(number, version=0, num_prompts=1, dataset=name)
    own, hard, upper = [one for one in joined(ledger).ask(free_eval=3) if one.purpose]

    assert [lease.dataset for lease in (own, hard, upper)] == ["", "hard", "upper"]
    assert (json.loads(hard.prompt)["question"], hard.sampling.temperature) == ("abc", 0.3)
    assert own.prompt != upper.prompt and own.sampling.temperature == upper.sampling.temperature == 0.0


# --- staleness -------------------------------------------------------------------------------------------------------


@pytest.mark.shows("staleness.num_lookahead_groups")
@pytest.mark.parametrize(("window", "trained"), [(0, None), (1, None), (2, [1, 2])])
def test_the_window_limits_how_many_groups_overtake_an_unfinished_one(window, trained):
    ledger = ledger_of(f"staleness.num_lookahead_groups={window}")
    actor = joined(ledger)
    for lease in actor.ask()[1:]:
        actor.finish(lease)

    batch = ledger.cut_batch(0)

    assert (batch and [group.group_id for group in batch]) == trained


OVERTAKE = ("rollout.num_prompts_per_step=1", "staleness.num_lookahead_groups=2")


def late_group(*words: str) -> tuple[Ledger, FakeActor, str]:
    """A group whose first token is two versions old arrives: the ledger, another actor and the result."""
    ledger = ledger_of(*OVERTAKE, *words)
    slow, quick = joined(ledger, "a1", slots=1), joined(ledger, "a2")
    (first,) = slow.ask()
    for version in range(2):
        quick.install(version)
        quick.finish(quick.ask()[0], rewards=[0.0, 1.0])
        train(ledger)
    quick.install(2), slow.install(2)
    return ledger, quick, slow.finish(first, versions=[(1, 0), (1, 1), (1, 2)], rewards=[0.0, 1.0]).kind


@pytest.mark.shows("staleness.max_lag")
def test_max_lag_decides_whether_an_old_group_is_trained():
    for max_lag, kind, trained in ((1, "rejected", 0), (2, "accepted", 1)):
        ledger, _, result = late_group(f"staleness.max_lag={max_lag}")
        assert (result, state_of(ledger)[1]) == (kind, trained)


@pytest.mark.shows("staleness.on_stale")
def test_on_stale_decides_whether_an_old_group_is_made_again():
    for choice, dropped in (("reissue", 0), ("drop", 1)):
        ledger, quick, result = late_group("staleness.max_lag=1", f"staleness.on_stale={choice}")
        assert result == "rejected" and state_of(ledger)[2] == dropped
        assert ((0, 1) in [lease.ref for lease in quick.ask()]) is (not dropped)


@pytest.mark.shows("staleness.mode", "staleness.hard_max_lag")
def test_the_mode_decides_what_happens_to_an_old_group():
    late = {
        words: late_group(*words)[2]
        for words in (
            ("staleness.max_lag=1",),
            ("staleness.max_lag=1", "staleness.mode=mask_old_tokens"),
            ("staleness.max_lag=1", "staleness.mode=reweight"),
            ("staleness.max_lag=0", "staleness.mode=reweight", "staleness.hard_max_lag=1"),
        )
    }

    assert list(late.values()) == ["rejected", "accepted", "accepted", "rejected"]


def test_a_resumed_hub_begins_with_the_bounds_that_the_control_had_moved_to():
    settings = hub_settings(
        config_of("staleness.adaptive.enabled=true"), started=run_started(), run_dir=Path("/nowhere"), lineage=(),
        dp_ranks=(0,), bind="tcp://127.0.0.1:0", rank_endpoint="ipc:///nowhere/ranks",
        shm_dir=Path("/nowhere"), vocab_size=VOCAB_SIZE, restore_path=None, bounds=(5, 6),
    )
    ledger = make_ledger(settings)
    publish(ledger, VersionRef(1, 0))

    assert (ledger.lag.rule.eta, ledger.lag.rule.max_lag) == (5, 6)
    assert len(joined(ledger).ask()) == 2 * (5 + 1)


def test_under_wait_no_group_overtakes_another():
    for mode, trained in (("drop", [1, 2]), ("wait", None)):
        ledger = ledger_of(f"staleness.mode={mode}")
        actor = joined(ledger)
        for lease in actor.ask()[1:]:
            actor.finish(lease)
        batch = ledger.cut_batch(0)
        assert (batch and [group.group_id for group in batch]) == trained


# --- incomplete groups -----------------------------------------------------------------------------------------------


def incomplete(*words: str, present: int = 2, now: float = 0.0) -> tuple[Ledger, FakeActor, int]:
    """A group of four of which only the first `present` came: the ledger, its actor and the group's id."""
    ledger = ledger_of("rollout.num_responses_per_prompt=4", *words)
    actor = joined(ledger)
    (lease, *_) = actor.ask()
    actor.finish(lease, now, aborted=range(present, 4))
    return ledger, actor, lease.group_id


@pytest.mark.shows("rollout.group_policy")
@pytest.mark.parametrize(("policy", "members"), [("reissue_missing", (2, 3)), ("reissue_whole", (0, 1, 2, 3))])
def test_the_group_policy_decides_which_members_are_leased_again(policy, members):
    _, actor, group_id = incomplete(f"rollout.group_policy={policy}")

    assert [lease.members for lease in actor.ask() if lease.group_id == group_id] == [members]


@pytest.mark.shows("rollout.num_min_members")
@pytest.mark.parametrize(("num_min", "num_held"), [(2, 1), (3, 0)])
def test_a_partial_group_is_held_if_it_has_enough_members(num_min, num_held):
    ledger, _, _ = incomplete("rollout.group_policy=accept_partial", f"rollout.num_min_members={num_min}")

    assert state_of(ledger)[1] == num_held


@pytest.mark.shows("hub.group_deadline_s")
@pytest.mark.parametrize(("deadline_s", "num_held"), [(0.0, 1), (50.0, 0)])
def test_before_its_deadline_a_partial_group_waits_for_its_missing_members(deadline_s, num_held):
    ledger, actor, _ = incomplete("rollout.group_policy=accept_partial", f"hub.group_deadline_s={deadline_s}")
    assert state_of(ledger)[1] == num_held

    actor.beat(60.0)
    ledger.tick(60.0)
    assert state_of(ledger)[1] == 1


@pytest.mark.shows("hub.num_max_attempts")
@pytest.mark.parametrize("num_max", [1, 2])
def test_a_group_is_dropped_after_so_many_failures(num_max):
    ledger = ledger_of(f"hub.num_max_attempts={num_max}", "staleness.eta=0")
    actor = joined(ledger, slots=1)
    for attempt in range(num_max):
        assert state_of(ledger)[2] == 0
        (lease,) = actor.ask()
        assert lease.ref == (0, attempt)
        actor.hand_back(lease, ReturnReason.ENV_ERROR)

    assert state_of(ledger)[2] == 1


# --- filters ---------------------------------------------------------------------------------------------------------


@pytest.mark.shows("filter.zero_std", "filter.min_std", "filter.accuracy_range")
@pytest.mark.parametrize(
    ("words", "rewards", "dropped"),
    [
        ([], (1.0, 1.0), 0),
        (["filter.zero_std=true"], (1.0, 1.0), 1),
        (["filter.zero_std=true"], (0.4, 0.5), 0),
        (["filter.zero_std=true", "filter.min_std=0.2"], (0.4, 0.5), 1),
        ([], (1.0, 0.8), 0),
        (["filter.accuracy_range=[0.1,0.7]"], (1.0, 0.8), 1),
        (["filter.accuracy_range=[0.1,0.7]"], (1.0, 0.0), 0),
        (["filter.zero_std=true", "filter.refill=false"], (1.0, 1.0), 0),
    ],
)
def test_each_filter_drops_its_groups(words, rewards, dropped):
    ledger = ledger_of(*words)
    actor = joined(ledger)
    actor.finish(actor.ask()[0], rewards=rewards)

    assert state_of(ledger)[1:] == (1 - dropped, dropped)


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.shows("hub.dead_after_s")
@pytest.mark.parametrize(("dead_after_s", "gone"), [(5.0, True), (20.0, False)])
def test_a_silent_actor_is_dead_after_the_time_set(dead_after_s, gone):
    ledger = ledger_of(f"hub.dead_after_s={dead_after_s}")
    joined(ledger).ask()

    evicted = [effect.actor_id for effect in ledger.tick(10.0) if effect.kind == "evict"]

    assert evicted == (["a1"] if gone else []) and (state_of(ledger)[0] == 4) is gone


@pytest.mark.shows("hub.lease_ttl_s")
@pytest.mark.parametrize(("ttl_s", "revoked"), [(30.0, 1), (600.0, 0)])
def test_a_lease_without_progress_expires_after_the_time_set(ttl_s, revoked):
    ledger = ledger_of(f"hub.lease_ttl_s={ttl_s}", "hub.dead_after_s=1000")
    actor = joined(ledger)
    (lease, *_) = actor.ask()
    actor.beat(1.0, stuck=[lease.ref])

    actor.beat(40.0, stuck=[lease.ref])
    effects = ledger.tick(40.0)

    assert sum(effect.kind == "revoke" and lease.ref in effect.leases for effect in effects) == revoked


@pytest.mark.shows("hub.heartbeat_s")
@pytest.mark.parametrize(
    ("heartbeat_s", "num_beats", "silent_after_s"), [(1.0, 2, 3.0), (0.25, 10, 3.0), (4.0, 0, 12.0)]
)
def test_the_heartbeat_sets_the_interval_of_an_actor_and_its_deadline_for_the_hub(
    heartbeat_s, num_beats, silent_after_s
):
    given = limits(config_of(f"hub.heartbeat_s={heartbeat_s}", "hub.dead_after_s=60"), VOCAB_SIZE)
    link = ActorSession("a1", 77, engine="scripted", max_leases=4, transports=("zmq",), software="test")
    link.start(0.0)
    link.received(Welcome(
        protocol=1, run_id="r", learner_epoch=1, version=0, lineage=(), limits=given, task=b"{}", layout=None,
        manifest=None, offers=(), pull_token=bytes(16), assets_nbytes=0, assets_digest=bytes(16), settled_upto=0,
        settled=(), durable_upto=0, durable=(), held=(),
    ), 0.0)
    decoder = Decoder(TO_HUB)

    sent = [effect for tick in range(1, 41) for effect in link.tick(tick / 16) if isinstance(effect, Send)]
    assert sum(isinstance(decoder.decode(effect.frame), ActorHeartbeat) for effect in sent) == num_beats
    assert Deliver(Disconnected()) not in link.tick(silent_after_s)
    assert Deliver(Disconnected()) in link.tick(silent_after_s + 0.1)
