"""Settings of the actor: from the WELCOME of a real hub to an engine and episodes that behave differently."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from actors.__main__ import work
from actors.engines.vllm.process import engine_arguments
from actors.episode import PromptTooLongError
from actors.render import load_tokenizer
from actors.runtime import ActorRuntime, build_runtime, default_actor_id, weight_source
from actors.settings import engine_spec, pick_device
from learner.hub_client.settings import limits
from learner.model.policy import load_policy
from learner.publish.export import export_model
from learner.setup.model_hub import find_models
from learner.setup.preflight import models_of
from streamrl.config.load import from_plain, to_plain
from streamrl.config.schema import Config
from streamrl.errors import ConfigError, EngineError
from streamrl.messages import InstallSource, Member, MemberStatus, Sampling, VersionRef, Welcome
from streamrl.named_code import words_for_actors
from streamrl.weights.assets import pack_assets, unpack_assets
from tests.unit.config.setting_harness import CHARACTERS, LiveHub, config_of, tiny_model

pytestmark = pytest.mark.timeout(60)
SIZES = (
    "rollout.max_prompt_tokens=64", "rollout.train.sampling.max_new_tokens=16", "rollout.num_responses_per_prompt=4",
    "actors.share_weights=false",
)
SCRIPTED = "actors.engine=tests.fakes.scripted_engine:recording"
V0 = VersionRef(1, 0)


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[LiveHub]:
    with LiveHub(tmp_path_factory.mktemp("run"), config_of()) as live:
        live.publish(0, tiny_model(tmp_path_factory.mktemp("model")))
        yield live


@pytest.fixture(scope="module")
def welcome(hub) -> Welcome:
    return hub.connect().join()


@contextmanager
def runtime_of(hub: LiveHub, welcome: Welcome, *words: str, local: tuple[str, ...] = ()) -> Iterator[ActorRuntime]:
    """What an actor builds when the learner's settings are `words` and its own are `local`."""
    settings = to_plain(config_of(*SIZES, *words))
    told = msgspec.structs.replace(welcome, task=json.dumps(settings).encode())
    local = (*local, *words_for_actors(settings))
    own = from_plain({"policy": {"tiny": {"enabled": True}}}, local)
    source, device_weights = weight_source(own.actors, hub.context)
    runtime = build_runtime(told, local, source, device_weights)
    try:
        yield runtime
    finally:
        asyncio.run(runtime.close())


def played(runtime: ActorRuntime, split: str = "train", *, times: int = 1) -> list[Member]:
    """So many episodes side by side, on the scripted engine."""
    runner = runtime.train if split == "train" else runtime.test

    async def play() -> list[Member]:
        await runtime.engine.install({}, V0)
        record = runner.task.record("train", 0)
        return await asyncio.gather(*(runner.play(record, i, 7, Sampling()) for i in range(times)))

    return asyncio.run(play())


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.shows("actors.engine")
@pytest.mark.parametrize(("word", "name"), [("actors.engine=native", "native"), (SCRIPTED, "scripted")])
def test_the_engine_is_the_one_that_is_named(hub, welcome, word, name):
    with runtime_of(hub, welcome, word) as runtime:
        assert runtime.engine.name == name


@pytest.mark.shows("actors.vllm")
def test_vllm_gets_the_arguments_that_are_set_and_refuses_reserved_ones(hub, welcome):
    """Both are said before any model is loaded; a real engine with real weights is tested with the engine itself."""
    words = ["actors.engine=vllm", "actors.device=cpu", "policy.tiny.num_heads=2"]
    with pytest.raises(EngineError, match="actors.vllm.max_model_len is not yours to set"):
        with runtime_of(hub, welcome, *words, "actors.vllm.max_model_len=9"):
            pass
    given = engine_arguments(
        max_num_seqs=2, max_tokens=64, device="cpu", dtype="float32", kv_bytes_per_token=64,
        extra={"seed": 7, "tensor_parallel_size": 2},
    )
    assert (given["seed"], given["tensor_parallel_size"], given["enforce_eager"]) == (7, 2, True)


@pytest.mark.shows("actors.num_concurrent")
@pytest.mark.parametrize(("num", "groups"), [(8, 3), (64, 17)])
def test_concurrency_is_the_engines_and_sets_how_many_groups_are_held(hub, welcome, num, groups):
    with runtime_of(hub, welcome, SCRIPTED, f"actors.num_concurrent={num}") as runtime:
        assert (runtime.engine.max_num_seqs, runtime.max_leases) == (num, groups)


@pytest.mark.shows("actors.dtype")
def test_half_precision_halves_the_cache(hub, welcome):
    sizes = []
    for dtype in ("auto", "bfloat16"):
        with runtime_of(hub, welcome, "actors.device=cpu", f"actors.dtype={dtype}") as runtime:
            sizes.append(runtime.engine.stats().extra["kv_cache_bytes"])

    assert sizes[0] == 2 * sizes[1] > 0


@pytest.mark.shows("actors.device")
def test_the_engine_uses_the_device_that_is_set(hub, welcome):
    assert pick_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises((RuntimeError, AssertionError)), runtime_of(hub, welcome, "actors.device=cuda:99"):
        pass


@pytest.mark.shows("actors.num_threads")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_engine_computes_with_the_threads_that_are_set(hub, welcome, num_threads):
    async def asked(engine) -> int:
        return await engine._on_thread(torch.get_num_threads, engine._inbox)

    with runtime_of(hub, welcome, f"actors.num_threads={num_threads}") as runtime:
        assert asyncio.run(asked(runtime.engine)) == num_threads


@pytest.mark.shows("actors.on_install")
@pytest.mark.parametrize(("choice", "policy"), [("keep", "continue"), ("recompute", "recompute"), ("finish", "drain")])
def test_on_install_chooses_the_engines_policy(hub, welcome, choice, policy):
    """What each policy does to running sequences is tested with the engine itself."""
    with runtime_of(hub, welcome, f"actors.on_install={choice}") as runtime:
        assert runtime.engine._policy == policy


@pytest.mark.shows("actors.transports")
@pytest.mark.parametrize(("transports", "source"), [("[shm,zmq]", InstallSource.SHM), ("[zmq]", InstallSource.ZMQ)])
def test_weights_come_by_a_transport_that_this_actor_may_use(hub, welcome, transports, source):
    with runtime_of(hub, welcome, SCRIPTED, local=(f"actors.transports={transports}",)) as runtime:
        report = asyncio.run(runtime.installer.install(welcome.manifest, welcome.offers, welcome.layout))

    assert report.ok and report.source == source


@pytest.mark.shows("actors.share_weights")
@pytest.mark.parametrize(("share", "second"), [("true", InstallSource.SHM), ("false", InstallSource.ZMQ)])
def test_actors_of_one_host_pull_a_version_once_if_they_share(hub, welcome, share, second):
    mine = msgspec.structs.replace(welcome, run_id=f"share-test-{os.getpid()}")
    local = ("actors.transports=[zmq]", f"actors.share_weights={share}")
    with runtime_of(hub, mine, SCRIPTED, local=local) as one, runtime_of(hub, mine, SCRIPTED, local=local) as two:
        sources = [
            asyncio.run(runtime.installer.install(mine.manifest, mine.offers, mine.layout)).source
            for runtime in (one, two)
        ]

    assert sources == [InstallSource.ZMQ, second]
    assert not list(Path("/dev/shm").glob(f"*share-test-{os.getpid()}*")), "the last one removes what they shared"


@pytest.mark.shows("actors.relay")
def test_an_actor_asks_the_relay_that_is_set_before_the_learner(hub, welcome):
    asked = zmq.Context.instance().socket(zmq.ROUTER)
    relay = f"tcp://127.0.0.1:{asked.bind_to_random_port('tcp://127.0.0.1')}"
    with runtime_of(hub, welcome, SCRIPTED, local=("actors.transports=[zmq]", f"actors.relay={relay}")) as runtime:
        report = asyncio.run(runtime.installer.install(welcome.manifest, welcome.offers, welcome.layout))

    assert report.ok and asked.poll(0), "it was asked, and the learner when it did not answer"
    asked.close(linger=0)


@pytest.mark.shows("actors.actor_id")
def test_an_actor_takes_the_id_that_is_set(tmp_path):
    names: list[str] = []
    with LiveHub(tmp_path, config_of(SCRIPTED, *SIZES)) as hub:
        hub.publish(0, tiny_model(tmp_path / "model"))

        def watch() -> None:
            while not hub.server.context.connections.all():
                threading.Event().wait(0.02)
            names.extend(link.actor_id for link in hub.server.context.connections.all())
            hub.link.shutdown("seen", finished=True)

        watcher = threading.Thread(target=watch)
        watcher.start()
        own = ["actors.actor_id=ada", f"actors.allow=[{SCRIPTED.partition('=')[2]}]"]
        assert asyncio.run(work(hub.server.endpoint, own)) == 0
        watcher.join()

    assert names == ["ada"] and default_actor_id() != default_actor_id()


# --- episodes --------------------------------------------------------------------------------------------------------


@pytest.mark.shows(
    "rollout.train.sampling.max_new_tokens", "rollout.train.sampling.stop", "rollout.train.sampling.ignore_eos",
    "rollout.test.sampling.max_new_tokens", "rollout.test.sampling.stop", "rollout.test.sampling.ignore_eos",
)
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(("name", "value"), [("max_new_tokens", 3), ("stop", ("ab",)), ("ignore_eos", True)])
def test_the_limits_of_a_turn_are_those_of_its_split(hub, welcome, split, name, value):
    shown = f"[{','.join(value)}]" if isinstance(value, tuple) else value
    with runtime_of(hub, welcome, SCRIPTED, f"rollout.{split}.sampling.{name}={shown}") as runtime:
        for other in ("train", "test"):
            played(runtime, other)
            takes = other == split or split == "train"  # evaluation samples as training does, unless set
            assert (getattr(runtime.engine.requests[-1], name) == value) is takes


def test_a_set_has_an_environment_and_limits_of_its_own(hub, welcome):
    words = "eval.datasets={long: {env: {name: string.sort, max_turns: 2}, sampling: {max_new_tokens: 40}}}"
    with runtime_of(hub, welcome, SCRIPTED, words) as runtime:
        runner = runtime.sets["long"]
        assert (runner.task.name, runner.rules.max_new_tokens, runner.rules.max_turns) == ("string.sort", 40, 2)
        assert (runtime.test.task.name, runtime.test.rules.max_turns) == ("string.reverse", 1)
    settings = config_of(*SIZES, words, "learner.max_tokens_per_device=96")
    assert engine_spec(settings, Path(), None).max_tokens == 64 + 2 * 40
    assert limits(settings, 64).max_new_tokens == 96  # with the environment's part of a conversation


@pytest.mark.shows("rollout.max_prompt_tokens")
def test_a_prompt_over_the_limit_is_refused(hub, welcome):
    with runtime_of(hub, welcome, SCRIPTED, "rollout.max_prompt_tokens=1") as runtime:
        with pytest.raises(PromptTooLongError):
            played(runtime)


def read_by(hub, welcome, *words: str) -> list[int]:
    """The prompt of one episode."""
    with runtime_of(hub, welcome, SCRIPTED, *words) as runtime:
        played(runtime)
        return list(runtime.engine.requests[-1].prompt_ids)


def with_tokenizer(model: Path, other: Path) -> Config:
    """The settings of a run of the model with the other one's tokenizer, as a learner makes them ready."""
    config = config_of(
        f"policy.model_path={model}", f"policy.tokenizer_path={other}", f"policy.tiny.cache_dir={model.parent}", *SIZES
    )
    find_models(models_of(config), notify=pytest.fail)
    return config


@pytest.mark.shows("policy.tokenizer_path")
def test_actors_and_exports_have_the_tokenizer_that_is_set(welcome, hub, tmp_path):
    model, other = tiny_model(tmp_path / "model"), tiny_model(tmp_path / "other", characters=CHARACTERS[::-1])
    config = with_tokenizer(model, other)
    made, read = Path(config.policy.model_path), {}
    with LiveHub(tmp_path, config) as live:
        live.publish(0, made)
        for name, one, told in (("own", hub, welcome), ("other", live, live.connect().join())):
            with runtime_of(one, told, SCRIPTED) as runtime:
                played(runtime)
                read[name] = list(runtime.engine.requests[-1].prompt_ids)
    export_model(load_policy(made), made, tmp_path / "export")
    mine, theirs, exported = (load_tokenizer(folder) for folder in (model, other, tmp_path / "export"))

    assert read["own"] != read["other"] and mine.decode(read["own"]) == theirs.decode(read["other"])
    assert exported.encode("abc") == theirs.encode("abc") != mine.encode("abc")
    assert with_tokenizer(made, other).policy.model_path == str(made), "as for a run that goes on"
    assert from_plain(to_plain(config)).policy.tokenizer_path == str(other)


def test_all_of_a_tokenizer_goes_where_the_model_goes(tmp_path):
    """Additional templates, such as the one for prompts with tools, and tokens that an old file adds."""
    model, other = tiny_model(tmp_path / "model"), tiny_model(tmp_path / "other", characters=CHARACTERS[:-1])
    written = load_tokenizer(other)
    written.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools }}"}
    written.save_pretrained(other)
    (other / "added_tokens.json").write_text(json.dumps({"abc": len(written)}))
    expected = load_tokenizer(other)
    made = Path(with_tokenizer(model, other).policy.model_path)
    unpack_assets(pack_assets(made), tmp_path / "assets")
    policy = load_policy(made)
    export_model(policy, made, tmp_path / "export")
    for folder in (made, tmp_path / "assets", tmp_path / "export"):
        found = load_tokenizer(folder)
        assert found.chat_template == expected.chat_template == written.chat_template, folder
        assert found.encode("abcabc") == expected.encode("abcabc") != written.encode("abcabc"), folder

    export_model(policy, made, tmp_path / "export", chat_template="{{ 1 }}")
    assert load_tokenizer(tmp_path / "export").chat_template == "{{ 1 }}"


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path):
    model, larger = tiny_model(tmp_path / "model"), tiny_model(tmp_path / "larger", characters=f"{CHARACTERS}xyz")
    with pytest.raises(ConfigError, match=f"policy.tokenizer_path={larger}: .* 3 tokens that its model has no row for"):
        with_tokenizer(model, larger)
    with pytest.raises(ConfigError, match="holds no tokenizer, give a folder with one"):
        with_tokenizer(model, tmp_path)
    with pytest.raises(ConfigError, match="does not fit a tiny model"):
        config_of(f"policy.tokenizer_path={larger}")


@pytest.mark.shows("data.apply_chat_template", "data.system_prompt")
@pytest.mark.shows("data.chat_template")
def test_system_prompt_and_chat_template_change_what_the_model_reads(hub, welcome):
    plain, with_system, without_template, other_template = (
        read_by(hub, welcome, *words) for words in (
            [], ["data.system_prompt=abc"], ["data.apply_chat_template=false"],
            ['data.chat_template="{% for one in messages %}{{ one.content }}{{ one.content }}{% endfor %}"'],
        )
    )

    assert len(with_system) == len(plain) + 4  # three letters and the separator
    assert without_template == plain[:-1]
    assert other_template == 2 * without_template


def test_the_automatic_system_prompt_is_the_rewards(hub, welcome, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "ab", "answer": "ba"}\n')
    (tmp_path / "reward.py").write_text("system_prompt = 'abc'\ndef reward_fn(messages, answer):\n    return 1\n")
    own = (f"data.path={tmp_path / 'train.jsonl'}", "data.test_ratio=0", f"env.path={tmp_path / 'reward.py'}")
    plain, automatic = (read_by(hub, welcome, *own, *words) for words in ([], ["data.system_prompt=auto"]))

    assert automatic[4:] == plain and len(automatic) == len(plain) + 4


@pytest.mark.shows("data.prompt_overflow")
def test_a_long_prompt_can_be_cut_at_its_beginning(hub, welcome):
    whole = read_by(hub, welcome)
    cut = read_by(hub, welcome, "rollout.max_prompt_tokens=3", "data.prompt_overflow=truncate_left")

    assert len(whole) > 3 and cut == whole[-3:]


TASK = """
import threading
from streamrl.environment import ChatMessage, Step

meeting, never = threading.Barrier(2, timeout=2), threading.Event()

class Strange:
    name = "strange"

    def __init__(self, mood="endless"):
        self.mood = mood

    def num_records(self, split):
        return 4

    def record(self, split, index):
        return {"prompt": "ab"}

    def env(self):
        return Episode(self.mood)

class Episode:
    def __init__(self, mood):
        self.mood = mood

    def reset(self, record):
        return [ChatMessage("user", "ab")]

    def step(self, completion):
        if self.mood == "broken":
            raise RuntimeError("no reward today")
        if self.mood == "slow":
            never.wait(1.0)
        if self.mood == "sociable":
            meeting.wait()
        return Step(reward=1.0, done=self.mood != "endless", messages=[ChatMessage("user", "c")])
"""


def strange(path: Path, mood: str, *words: str) -> list[str]:
    (path / "strange.py").write_text(TASK)
    return [SCRIPTED, f"env.path={path / 'strange.py'}", f"env.options.mood={mood}", *words]


@pytest.mark.shows("env.max_turns")
@pytest.mark.parametrize("max_turns", [1, 3])
def test_an_endless_episode_has_the_most_turns_allowed(hub, welcome, tmp_path, max_turns):
    with runtime_of(hub, welcome, *strange(tmp_path, "endless", f"env.max_turns={max_turns}")) as runtime:
        (member,) = played(runtime)

    assert len(member.turns) == max_turns


@pytest.mark.shows("env.on_error", "env.reward_floor")
@pytest.mark.parametrize(
    ("words", "status", "reward"),
    [
        ([], MemberStatus.ABORTED, 0.0), (["env.on_error=floor"], MemberStatus.FINISHED, 0.0),
        (["env.on_error=floor", "env.reward_floor=-2"], MemberStatus.FINISHED, -2.0),
    ],
)
def test_a_broken_environment_is_dropped_or_gets_the_floor(hub, welcome, tmp_path, words, status, reward):
    with runtime_of(hub, welcome, *strange(tmp_path, "broken", *words)) as runtime:
        (member,) = played(runtime)

    assert (member.status, member.reward) == (status, reward)


@pytest.mark.shows("env.step_timeout_s")
@pytest.mark.parametrize(
    ("timeout_s", "status"), [(0.05, MemberStatus.ABORTED), (30.0, MemberStatus.FINISHED)]
)
def test_a_step_may_take_as_long_as_set(hub, welcome, tmp_path, timeout_s, status):
    with runtime_of(hub, welcome, *strange(tmp_path, "slow", f"env.step_timeout_s={timeout_s}")) as runtime:
        (member,) = played(runtime)

    assert member.status == status


@pytest.mark.shows("env.num_threads")
@pytest.mark.parametrize(("num_threads", "status"), [(1, MemberStatus.ABORTED), (2, MemberStatus.FINISHED)])
def test_so_many_environments_run_at_once(hub, welcome, tmp_path, num_threads, status):
    with runtime_of(hub, welcome, *strange(tmp_path, "sociable", f"env.num_threads={num_threads}")) as runtime:
        assert {member.status for member in played(runtime, times=2)} == {status}


@pytest.mark.shows("env.num_max_instances")
@pytest.mark.parametrize(("num", "status"), [(1, MemberStatus.ABORTED), (2, MemberStatus.FINISHED)])
def test_so_many_environments_are_open_at_once(hub, welcome, tmp_path, num, status):
    words = strange(tmp_path, "sociable", "env.num_threads=2", f"env.num_max_instances={num}")
    with runtime_of(hub, welcome, *words) as runtime:
        assert {member.status for member in played(runtime, times=2)} == {status}
