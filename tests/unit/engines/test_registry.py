"""Engines by name: ours by one table, a user's own from the user's own module."""

import asyncio

import pytest

from actors.__main__ import work
from actors.engines.base import ENGINES, EngineSpec, build_engine, engine_factory, wire_name
from streamrl.config.load import load_config
from streamrl.errors import ConfigError
from streamrl.messages import Outcome
from tests.fakes.scripted_engine import ScriptedEngine
from tests.kit.loops import until
from tests.unit.actors.fakes import TOKENIZER, V1, V2, actor, always, lease

pytestmark = pytest.mark.timeout(60)

OWN_ENGINE = '''
"""An engine of a user's own: it repeats the prompt's last token. Only the protocol, nothing inherited."""

from actors.engines.base import EngineStats, Generation, InstallTimes, VersionSpan


class Echo:
    name = "echo"

    def __init__(self, spec):
        self.max_num_seqs, self.limit = spec.max_num_seqs, spec.max_new_tokens
        self.installed, self.tokens = None, 0

    async def generate(self, request):
        count = min(self.limit, request.max_new_tokens)
        self.tokens += count
        return Generation(
            [request.prompt_ids[-1]] * count, [0.0] * count, [VersionSpan(self.installed, 0, count)], "length"
        )

    async def install(self, tensors, ref):
        self.installed = ref
        return InstallTimes(0.0, 0.0)

    def stats(self):
        return EngineStats(tokens_total=self.tokens)

    async def close(self):
        pass


class Half:
    name = "half"

    def __init__(self, spec):
        pass

    async def generate(self, request):
        pass
'''


@pytest.fixture
def own(tmp_path, monkeypatch) -> str:
    (tmp_path / "echo_engine.py").write_text(OWN_ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    return "echo_engine:Echo"


def spec(**fields) -> EngineSpec:
    sizes = {"max_num_seqs": 3, "max_tokens": 24, "max_new_tokens": 4}
    return EngineSpec(**{"model_dir": "unused", "tokenizer": TOKENIZER, **sizes, **fields})


async def test_an_engine_of_ones_own_serves_a_worker_without_a_change_to_our_files(own):
    engine = build_engine(own, spec())

    async with actor(engine, always()) as one:
        one.client.grants(lease(1, members=2))
        await one.announce(V2)
        one.client.grants(lease(2, min_version=V2))
        groups = {group.group_id: group for group in await one.finished(2)}
        assert {group.outcome for group in groups.values()} == {Outcome.COMPLETE}
        (span,) = groups[2].members[0].versions
        assert (span.learner_epoch, span.version) == (V2.learner_epoch, V2.version)
        assert len(groups[1].members[0].token_ids) == 4 * 4
        assert one.client.installed == [V1, V2]
        await until(lambda: one.client.progress.tokens_total == 12)  # comes with the next heartbeat


def test_settings_take_any_engines_name_and_hello_a_short_one(own):
    assert load_config(["experiment=quickstart", f"actors.engine={own}"]).actors.engine == own
    assert [wire_name(name) for name in ("native", own, "m:" + "x" * 40)] == ["native", "Echo", "x" * 32]


def test_our_engines_are_entries_of_one_table(monkeypatch):
    monkeypatch.setitem(ENGINES, "parrot", "tests.fakes.scripted_engine:ScriptedEngine")
    engine = build_engine("parrot", spec())
    assert isinstance(engine, ScriptedEngine) and engine.max_num_seqs == 3


def test_a_wrong_name_is_refused_with_the_nearest_one_before_the_hub_is_asked():
    with pytest.raises(ConfigError, match="actors.engine=nativ is unknown. Did you mean native?"):
        asyncio.run(work("tcp://127.0.0.1:1", ["actors.engine=nativ"]))


@pytest.mark.parametrize(("name", "words"), [
    ("no_such_package:Engine", "cannot import 'no_such_package'"), ("echo_engine:Ecko", "Did you mean Echo"),
])
def test_what_cannot_be_imported_is_named(own, name, words):
    with pytest.raises(ConfigError, match=words):
        engine_factory(name)


def test_what_is_no_engine_is_refused_with_what_it_lacks(own):
    with pytest.raises(ConfigError, match="returned Half, which has no max_num_seqs, installed, install, stats, close"):
        build_engine("echo_engine:Half", spec())
