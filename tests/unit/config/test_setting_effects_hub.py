"""Settings of the hub's sockets, of publishing, and of the learner's patience: with real sockets and documents."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import zmq

from learner.hub.context.run_log import RunLog
from learner.hub.context.settings import read_settings, write_settings
from learner.hub_client.link import HubLink
from learner.hub_client.settings import hub_settings, stall_fail_s
from learner.loop.evaluations import Evaluations
from learner.loop.run import Run
from learner.model.paths import wire_dtype
from learner.publish.publisher import Publisher
from learner.ranks.activity import Activity
from learner.ranks.clock import StepClock
from learner.ranks.mesh import Ranks
from learner.record.step_samples import StepSamples
from streamrl.config.eval_sets import eval_sets
from streamrl.errors import ConfigError, StreamrlError
from streamrl.messages import (
    FROM_WEIGHTS,
    RANK_TO_HUB,
    Ack,
    ActorHeartbeat,
    ActorState,
    BatchPending,
    BatchShare,
    Chunk,
    ChunkStatus,
    EvalRequest,
    EvalResult,
    HubHeartbeat,
    HubStatus,
    Installed,
    Leases,
    Lineage,
    Probed,
    Pull,
    PullMode,
    Shutdown,
    StopRequest,
    VersionRef,
)
from streamrl.messages.codec import Decoder, encode
from streamrl.stream.records import Evaluated, GroupArrived
from streamrl.stream.segments import read_records, segments
from streamrl.stream.writer import LogWriter
from streamrl.weights.document import VersionRetired
from streamrl.weights.transport import WeightSource
from tests.flow.processes import free_port
from tests.kit.system import until
from tests.unit.config.setting_harness import LiveHub, config_of, tiny_model
from tests.unit.config.test_setting_effects_ledger import joined, ledger_of
from tests.unit.hub.factories import FakeActor, end_batch, make_ledger, publish, run_started

pytestmark = pytest.mark.timeout(60)
LOOPBACK = next(
    name for name, found in psutil.net_if_addrs().items() if "127.0.0.1" in [one.address for one in found]
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


# --- sockets ---------------------------------------------------------------------------------------------------------


@pytest.mark.shows("hub.bind")
def test_the_hub_listens_at_the_address_that_is_set_and_publishes_it(tmp_path):
    port = free_port()
    with LiveHub(tmp_path, config_of(f"hub.bind=tcp://127.0.0.1:{port}")):
        assert json.loads((tmp_path / "hub.json").read_text())["connect"] == f"tcp://127.0.0.1:{port}"


def test_a_resumed_hub_whose_port_another_process_has_takes_a_free_one_unless_the_settings_name_it(tmp_path, caplog):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.bind("tcp://127.0.0.1:0")
        taken = other.getsockopt_string(zmq.LAST_ENDPOINT)
        with LiveHub(tmp_path, config_of(), bind=taken):
            there = json.loads((tmp_path / "hub.json").read_text())["connect"]
        assert there not in (taken, "tcp://127.0.0.1:0")
        assert f"{taken}, the run's address so far" in caplog.text and there in caplog.text
        with pytest.raises(ConfigError, match=f"hub.bind: {taken} is in use"):
            LiveHub(tmp_path / "named", config_of(f"hub.bind={taken}"))


@pytest.mark.shows("hub.weights_port")
def test_weights_are_served_at_the_port_that_is_set(tmp_path, model_dir):
    port = free_port()
    with LiveHub(tmp_path, config_of(f"hub.weights_port={port}")) as hub:
        hub.publish(0, model_dir)
        (offer,) = (offer for offer in hub.connect().join().offers if offer.transport == "zmq")

    assert offer.name == f"tcp://127.0.0.1:{port}"


@pytest.mark.shows("hub.advertise")
@pytest.mark.parametrize(("advertise", "host"), [
    ("null", "127.0.0.1"), ("localhost", "localhost"), (LOOPBACK, "127.0.0.1"),
])
def test_weights_are_offered_at_the_advertised_host(tmp_path, model_dir, advertise, host):
    with LiveHub(tmp_path, config_of(f"hub.advertise={advertise}")) as hub:
        hub.publish(0, model_dir)
        (offer,) = (offer for offer in hub.connect().join().offers if offer.transport == "zmq")

    assert offer.name.startswith(f"tcp://{host}:")


@pytest.mark.parametrize("words", [(), ("filter.accuracy_range=[0.1,0.9]", "staleness.mode=mask_old_tokens")])
def test_the_hub_process_reads_what_the_learner_wrote(tmp_path, words):
    settings = hub_settings(
        config_of(*words), started=run_started(start=2, learner_epoch=2, version=3), run_dir=tmp_path,
        lineage=(Lineage(1, 0, 3), Lineage(2, 3, 3)), dp_ranks=(0,), bind="tcp://127.0.0.1:0",
        rank_endpoint="ipc:///nowhere", shm_dir=tmp_path, vocab_size=100, restore_path=None,
    )

    write_settings(settings, tmp_path / "hub_settings.json")

    assert read_settings(tmp_path / "hub_settings.json") == settings


# --- checkpoints and delivery ----------------------------------------------------------------------------------------


@pytest.mark.shows("stream.fsync")
@pytest.mark.parametrize(("fsync", "syncs"), [("interval", True), ("always", True), ("never", False)])
def test_an_accepted_group_may_be_forgotten_once_the_log_has_it(tmp_path, model_dir, monkeypatch, fsync, syncs):
    """It is told once the record is written; synced too, unless that is left to the operating system."""
    synced, fdatasync = [], os.fdatasync
    monkeypatch.setattr("streamrl.stream.writer.os.fdatasync", lambda file: (synced.append(file), fdatasync(file)))
    with LiveHub(tmp_path, config_of(f"stream.fsync={fsync}"), vocab_size=100) as hub:
        manifest = hub.publish(0, model_dir)
        peer = hub.connect()
        peer.join()
        peer.send(Installed(manifest.ref, manifest.root, True, 1, 0.0, 0.0, 0.0, 0.0, 0.0, ""))
        peer.send(ActorHeartbeat(11, 1, ActorState.RUNNING, 4, 0, manifest.ref, 0, (), 0, 0, 0, {}, 4))
        (lease, *_) = peer.receive(Leases).grants
        peer.send(FakeActor(hub.server.context.ledger, "a1", ref=manifest.ref).group(lease))
        ack = peer.receive(Ack)
        while not ack.durable_upto:
            ack = peer.receive(Ack)
        (arrived,) = [one for _, one in read_records(tmp_path) if isinstance(one, GroupArrived)]

    assert (ack.settled_upto, ack.durable_upto) == (1, 1)
    assert (arrived.actor_id, arrived.seq, arrived.group_id) == ("a1", 1, lease.group_id)
    assert bool(synced) == syncs


def segments_left(folder: Path, *words: str) -> list[int]:
    """First records of the files that a run of six small files has after its checkpoint at record 4."""
    config = config_of(*words)
    writer = LogWriter(folder, segment_bytes=1)
    for number in range(6):
        writer.append(Evaluated(number, "s" * 40_000, 0.0))  # the last file's whole blocks count little
        until(lambda number=number: writer.durable == number + 1)
    ledger = make_ledger()
    ledger.journal.next_sequence = 4
    log = RunLog(config.stream, folder, writer, ledger)
    log.frozen(0, ledger.freeze(0))
    log.saved(0)
    log.close()
    return [one.first for one in segments(folder)]


@pytest.mark.shows("stream.keep")
@pytest.mark.shows("stream.max_gb")
@pytest.mark.parametrize(
    ("words", "left"),
    [((), [1, 2, 3, 4, 5, 6]), (("stream.keep=recovery",), [4, 5, 6]), (("stream.max_gb=0.00018",), [3, 4, 5, 6]),
     (("stream.max_gb=0.0000001",), [4, 5, 6])],
)
def test_old_files_of_the_log_go_when_no_checkpoint_needs_them_and_as_the_settings_say(tmp_path, words, left):
    assert segments_left(tmp_path, *words)[: len(left)] == left


@pytest.mark.shows("stream.keep_refused")
@pytest.mark.parametrize(("words", "kept"), [((), False), (("stream.keep_refused=true",), True)])
def test_a_group_that_is_refused_for_its_age_leaves_its_frame_in_the_log_if_that_is_set(tmp_path, words, kept):
    ledger = ledger_of("staleness.max_lag=1", *words)
    actor = joined(ledger)
    leases = actor.ask()
    late = actor.group(leases[-1])
    for lease in leases[:-1]:
        actor.finish(lease)
    while ledger.version < 2 and ledger.cut_batch(ledger.version):
        end_batch(ledger, ledger.version + 1)
        publish(ledger, VersionRef(1, ledger.version))
        actor.install(ledger.version)
        for lease in actor.ask():
            actor.finish(lease)
    assert actor.send(late).kind == "rejected"

    (refused,) = [one for one in ledger.journal.take() if isinstance(one, GroupArrived) and one.refused]
    assert (refused.refused, bool(refused.frame), bool(refused.digest)) == ("stale", kept, not kept)


# --- publishing ------------------------------------------------------------------------------------------------------


@pytest.mark.shows("publish.num_keep_versions")
@pytest.mark.parametrize(("num_keep", "oldest_is_there"), [(2, False), (3, True)])
def test_so_many_published_versions_stay_available(tmp_path, model_dir, num_keep, oldest_is_there):
    with LiveHub(tmp_path, config_of(f"publish.num_keep_versions={num_keep}")) as hub:
        oldest = hub.publish(0, model_dir)
        hub.publish(1, model_dir), hub.publish(2, model_dir)
        welcome = hub.connect().join()
        source = WeightSource(hub.context, pull_token=welcome.pull_token, limits=welcome.limits)
        pulled = [offer for offer in welcome.offers if offer.transport == "zmq"]

        if oldest_is_there:
            assert source.fetch(oldest, pulled, welcome.layout).document
        else:
            with pytest.raises(VersionRetired):
                source.fetch(oldest, pulled, welcome.layout)


@pytest.mark.shows("publish.max_bytes_per_s")
@pytest.mark.parametrize(("cap", "refused"), [(0, False), (1000, True)])
def test_a_bandwidth_cap_makes_actors_wait(tmp_path, model_dir, cap, refused):
    with LiveHub(tmp_path, config_of(f"publish.max_bytes_per_s={cap}")) as hub:
        hub.publish(0, model_dir)
        welcome = hub.connect().join()
        pull = Pull(welcome.pull_token, VersionRef(1, 0), PullMode.ASSETS, 0, 0, welcome.assets_nbytes)
        weights, decoder = hub.context.socket(zmq.DEALER), Decoder(FROM_WEIGHTS)
        weights.connect(hub.server.context.weights.endpoint)
        statuses = set()
        for _ in range(1 + 2 * welcome.limits.chunk_bytes // welcome.assets_nbytes):  # two full chunks' worth
            weights.send(encode(pull))
            assert weights.poll(20_000)
            chunk = decoder.decode(weights.recv_multipart()[0])
            assert isinstance(chunk, Chunk)
            statuses.add(chunk.status)

    assert (ChunkStatus.BUSY in statuses) is refused and ChunkStatus.OK in statuses


@pytest.mark.shows("publish.delta_max_ratio")
@pytest.mark.parametrize(("max_ratio", "comes_as"), [(0.0, "ZMQ"), (0.25, "ZMQ_DELTA")])
def test_a_remote_actor_gets_what_changed_if_that_is_little_enough(tmp_path, model_dir, max_ratio, comes_as):
    with LiveHub(tmp_path, config_of(f"publish.delta_max_ratio={max_ratio}")) as hub:
        source, fetched = None, None
        for version in range(2):  # the same weights twice: nothing changed
            manifest = hub.publish(version, model_dir)
            welcome = hub.connect().join()
            source = source or WeightSource(hub.context, pull_token=welcome.pull_token, limits=welcome.limits)
            pulled = [offer for offer in welcome.offers if offer.transport == "zmq"]
            fetched = source.fetch(manifest, pulled, welcome.layout)

    assert fetched is not None and fetched.source.name == comes_as


def published_layout(*words: str):
    publish = config_of(*words).publish
    return Publisher(
        [("weight", torch.nn.Parameter(torch.zeros(1000)))], wire_dtype=wire_dtype(publish.dtype, Ranks().device),
        bucket_bytes=publish.bucket_bytes, shm=None, ranks=Ranks(rank=1),
    ).layout


@pytest.mark.shows("publish.dtype", "publish.bucket_bytes")
def test_weights_are_sent_in_the_type_and_bucket_size_that_are_set():
    words = ("publish.dtype=auto", "publish.dtype=float32", "publish.dtype=bfloat16", "publish.bucket_bytes=1024")
    auto, single, half, buckets = (published_layout(word) for word in words)

    assert [sum(layout.bucket_bytes) for layout in (auto, single, half)] == [4000, 4000, 2000]
    assert {spec.dtype for spec in half.tensors} == {"bfloat16"}
    assert list(auto.bucket_bytes) == [4000] and list(buckets.bucket_bytes) == [1024, 1024, 1024, 928]


@pytest.mark.shows("publish.probe_tolerance")
@pytest.mark.parametrize(("tolerance", "leased"), [(0.5, True), (0.25, False)])
def test_an_actor_whose_probe_is_beyond_the_tolerance_gets_no_leases(tmp_path, model_dir, tolerance, leased):
    with LiveHub(tmp_path, config_of(f"publish.probe_tolerance={tolerance}")) as hub:
        manifest = hub.publish(0, model_dir)
        peer = hub.connect()
        peer.join()
        probed = Probed(0.3, 0.4, "", 0.0)
        peer.send(Installed(manifest.ref, manifest.root, True, 1, 0.0, 0.0, 0.0, 0.0, 0, "", probed))
        running = ActorState.RUNNING
        peer.send(ActorHeartbeat(11, 1, running, 4, 0, manifest.ref, 0, (), 0, 0, 0, {}, 4, manifest.root))
        peer.receive(HubHeartbeat)  # whatever is granted is granted before the next beat is answered
        running = ActorState.RUNNING
        peer.send(ActorHeartbeat(11, 2, running, 4, 0, manifest.ref, 0, (), 0, 0, 0, {}, 4, manifest.root))
        if leased:
            assert peer.receive(Leases).grants
        else:
            assert not peer.received_before(HubHeartbeat, Leases)
            assert hub.server.context.weights.health.metrics()["num_quarantined"] == 1


# --- waiting and evaluating ------------------------------------------------------------------------------------------


class ScriptedHub:
    """A hub that sends only what the test makes it send, and the learner's real connection to it."""

    def __init__(self, *words: str) -> None:
        self.config = config_of(*words)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.link = HubLink(
            f"tcp://127.0.0.1:{port}", rank=0, world=1, version=0, check_hub=lambda: None,
            stop_requested=lambda: False, stall_report_s=self.config.learner.stall_report_s,
            stall_fail_s=self.config.learner.stall_fail_s,
        )
        self._peer, _ = self._router.recv_multipart()

    def send(self, *messages) -> None:
        for message in messages:
            self._router.send_multipart([self._peer, encode(message)])

    def received(self, kind: type) -> list:
        """Every message of this kind that the learner has sent."""
        self.link.shutdown("that was all", finished=False)
        decoder, found = Decoder(RANK_TO_HUB), []
        while not isinstance(message := decoder.decode(self._router.recv_multipart()[1]), Shutdown):
            found += [message] if isinstance(message, kind) else []
        return found

    def close(self) -> None:
        self.link.close()
        self._context.destroy(linger=0)


@pytest.fixture
def scripted_hub():
    made: list[ScriptedHub] = []

    def make(*words: str) -> ScriptedHub:
        made.append(ScriptedHub(*words))
        return made[-1]

    yield make
    for hub in made:
        hub.close()


@pytest.mark.shows("learner.stall_fail_s")
def test_a_stalled_run_fails_with_the_reason_unless_the_wait_is_unlimited(scripted_hub):
    stalled = BatchPending(0, "group 3 is with actor a7", 120.0, 2)
    impatient, patient, endless = (scripted_hub(f"learner.stall_fail_s={s}") for s in (100, 200, 0))
    for hub in (impatient, patient, endless):
        hub.send(stalled, StopRequest("enough"))

    with pytest.raises(StreamrlError, match=r"120 s although 2 actors.*stall_fail_s=100.*with actor a7"):
        impatient.link.next_batch(0)
    assert patient.link.next_batch(0) is None and endless.link.next_batch(0) is None


def scored(num: int) -> HubStatus:
    return HubStatus(0, {"num_eval_groups": float(num)}, (("a1", "READY", 0.0, 0.0),))


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ((), 600.0),
        (("learner.stall_fail_s=100",), 100.0),
        (("learner.stall_fail_s=0", "rollout.train.sampling.max_new_tokens=32768"), 0.0),
        (("rollout.train.sampling.max_new_tokens=32768",), 16384.0),
        (("learner.stall_fail_s=20000", "rollout.train.sampling.max_new_tokens=32768"), 20000.0),
        (("rollout.test.sampling.max_new_tokens=4096",), 2048.0),
    ],
)
def test_a_run_is_not_stalled_before_its_longest_answer_can_have_come(words, seconds):
    assert stall_fail_s(config_of(*words, "learner.max_tokens_per_device=65536")) == seconds


def test_actors_that_answer_an_evaluation_do_not_stall_the_run(scripted_hub):
    hub = scripted_hub("learner.stall_fail_s=100")
    hub.link.evaluate(0, 0, 9)
    hub.send(scored(3), BatchPending(0, "an actor takes 4 more", 120.0, 2), StopRequest("enough"))
    assert hub.link.next_batch(0) is None


def arrived(num: int, *, filtered: int = 0, stale: int = 0) -> HubStatus:
    counters = {"num_groups_completed": num, "num_groups_filtered": filtered, "num_groups_stale": stale}
    return HubStatus(0, {name: float(value) for name, value in counters.items()}, (("a1", "READY", 0.0, 0.0),))


@pytest.mark.parametrize(("then", "stalled"), [
    ([arrived(8)], False), ([arrived(9, filtered=1)], False),
    ([arrived(7)], True), ([arrived(9, filtered=2)], True), ([arrived(8, stale=1)], True),
    ([arrived(7, stale=1), arrived(8, stale=1), arrived(8, stale=2)], True),  # the same group again and again
])
def test_a_batch_may_take_longer_than_one_stall_while_groups_are_kept(scripted_hub, then, stalled):
    """Thousands of groups make a batch at a large forced lag, or an engine is slow."""
    hub, waits = scripted_hub("learner.stall_fail_s=100"), BatchPending(0, "7 of 4112 groups have arrived", 120.0, 2)
    hub.send(arrived(7))
    hub.link.wait_until_up()
    hub.link._moved_at = -math.inf  # long ago
    hub.send(*then, waits, StopRequest("enough"))
    if stalled:
        with pytest.raises(StreamrlError, match=r"no batch for 120 s .* 7 of 4112 groups"):
            hub.link.next_batch(0)
    else:
        assert hub.link.next_batch(0) is None


def test_several_evaluations_may_take_longer_than_one_stall(scripted_hub, monkeypatch):
    hub, now = scripted_hub("learner.stall_fail_s=100"), [0.0]
    monkeypatch.setattr(hub.link, "_clock", lambda: now[0])
    receive = hub.link._receive

    def slowly():
        """Each message comes a minute after the one before."""
        while (message := receive()) is None:
            pass
        now[0] += 60.0
        return message

    monkeypatch.setattr(hub.link, "_receive", slowly)
    hub.link._heard_at = 0.0
    hub.link.evaluate(0, 0, 2)
    hub.link.evaluate(1, 0, 1)
    means = (1.0, 1.0, 5.0, 0.0)
    hub.send(scored(1), scored(2), EvalResult(0, 0, 2, *means), scored(3), EvalResult(1, 0, 1, *means))
    hub.link.wait_for_evals()
    assert [result.eval_id for result in hub.link.evals] == [0, 1] and now == [300.0]

    hub.link.evaluate(2, 0, 1)
    hub.send(*[scored(3)] * 4)
    with pytest.raises(StreamrlError, match="evaluation unfinished for 120 s although 1 actors"):
        hub.link.wait_for_evals()


def test_a_batch_brings_the_hubs_counters_as_of_its_cut(scripted_hub):
    hub = scripted_hub()
    hub.send(HubStatus(0, {"eta": 1.0}, ()), BatchShare(3, (), (), stats={"eta": 4.0}))

    assert hub.link.next_batch(0).version == 3
    assert hub.link.status.counters == {"eta": 4.0}


@pytest.mark.shows("learner.stall_report_s")
def test_a_wait_is_reported_only_after_the_time_set(scripted_hub, caplog):
    caplog.set_level(logging.WARNING, "streamrl.learner")
    for report_s, told in ((3600, False), (1e-9, True)):
        hub = scripted_hub(f"learner.stall_report_s={report_s}")
        hub.send(BatchPending(0, "group 3 is with actor a7", 120.0, 2), StopRequest("enough"))
        hub.link.next_batch(0)
        assert ("group 3 is with actor a7" in caplog.text) is told


def run_of(hub: ScriptedHub) -> SimpleNamespace:
    """The parts of a run that evaluating needs: config, step and version, and the evaluations of this hub."""
    samples = StepSamples(hub.config.samples, seed=hub.config.run.seed, ranks=Ranks())
    clock, recorder = StepClock(Activity()), SimpleNamespace(evaluated=lambda result, asked: None)
    evaluations = Evaluations(
        eval_sets(hub.config), hub.link, samples, clock, recorder, every_steps=hub.config.eval.every_steps
    )
    return SimpleNamespace(
        config=hub.config, step=0, version=0, eval_lost=False, evaluations=evaluations,
        trainer=SimpleNamespace(clock=clock), run_dir=Path(), ranks=Ranks(), leave_device=lambda: None,
    )


@pytest.mark.shows("eval.every_steps", "eval.num_samples")
@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["eval.every_steps=2"], [(2, 5), (4, 5)]), (["eval.every_steps=3", "eval.num_samples=9"], [(3, 9)]),
        (["eval.every_steps=0"], []), (["eval.every_steps=1", "eval.num_samples=0"], []),
    ],
)
def test_evaluations_are_requested_as_often_and_as_large_as_set(scripted_hub, words, asked):
    hub = scripted_hub("trainer.num_steps=6", "eval.num_samples=5", *words)
    run = run_of(hub)
    for run.step in range(1, 6):
        run.version = run.step
        Run.evaluate_if_due(run)

    assert [(request.version, request.num_prompts) for request in hub.received(EvalRequest)] == asked


@pytest.mark.shows("eval.at_start")
@pytest.mark.parametrize(
    ("words", "asked"),
    [([], [0]), (["eval.at_start=false"], []), (["eval.at_start=false", "trainer.eval_only=true"], [0])],
)
def test_the_starting_weights_are_evaluated_unless_it_is_switched_off(scripted_hub, words, asked):
    hub = scripted_hub("eval.num_samples=5", *words)
    hub.send(EvalResult(0, 0, 5, 0.5, 0.5, 4.0, 0.0))  # ends the wait

    Run.evaluate_at_start(run_of(hub))

    assert [request.version for request in hub.received(EvalRequest)] == asked


@pytest.mark.shows("samples.num_per_eval")
@pytest.mark.parametrize("num", [0, 3, 9])
def test_an_evaluation_asks_for_as_many_transcripts_as_set(scripted_hub, num):
    hub = scripted_hub("eval.num_samples=5", f"samples.num_per_eval={num}")

    run_of(hub).evaluations.start(0)

    (request,) = hub.received(EvalRequest)
    assert len(set(request.keep)) == min(num, 5) and set(request.keep) <= set(range(5))


@pytest.mark.shows("eval.num_responses")
def test_an_evaluation_asks_for_as_many_answers_as_set(scripted_hub):
    hub = scripted_hub("eval.num_samples=5", "eval.num_responses=4", "rollout.test.sampling.temperature=1")
    run_of(hub).evaluations.start(0)
    assert [request.num_responses for request in hub.received(EvalRequest)] == [4]


@pytest.mark.shows("trainer.eval_only")
@pytest.mark.parametrize(("words", "steps"), [([], [1, 2, 3]), (["trainer.eval_only=true"], [])])
def test_an_evaluation_only_run_has_no_steps(scripted_hub, words, steps):
    run = run_of(scripted_hub("trainer.num_steps=3", *words))
    done = []
    for step in Run.remaining_steps(run):
        done.append(step)
        run.step += 1

    assert done == steps
