"""A hub that takes a connection and never answers is asked once: what is in the cache counts, or the refusal comes."""

import socket
import threading

import pytest

from envs.data import hub
from envs.data.sources import open_source
from learner.setup.model_hub import find_models
from streamrl.config.load import load_config
from streamrl.errors import ConfigError, TaskError

pytestmark = pytest.mark.timeout(60)


class SilentHub:
    """A listening socket that counts connections and answers none."""

    def __init__(self) -> None:
        self.num_asked, self.asked, self._held = 0, threading.Event(), []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.num_asked += 1
            self._held.append(connection)
            self.asked.set()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=10)
        for connection in self._held:
            connection.close()


@pytest.fixture
def silent(monkeypatch):
    datasets = pytest.importorskip("datasets")
    one = SilentHub()
    for module, name, value in (
        ("huggingface_hub.constants", "ENDPOINT", one.endpoint), ("huggingface_hub.constants", "HF_HUB_OFFLINE", False),
        ("datasets.config", "HF_ENDPOINT", one.endpoint), ("datasets.config", "HF_HUB_OFFLINE", False),
    ):
        monkeypatch.setattr(f"{module}.{name}", value)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "LIMIT_S", 0.3)
    assert datasets
    yield one
    one.close()


def test_a_data_set_of_a_silent_hub_is_refused_after_one_question(silent):
    with pytest.raises(TaskError, match=r"no/such is not a file .* hub gives \(it does not answer"):
        open_source("no/such", setting="data.path=no/such")
    assert silent.asked.wait(30) and silent.num_asked == 1


def test_a_model_of_a_silent_hub_is_refused_after_one_question(silent):
    with pytest.raises(ConfigError, match="cannot be reached from here: run hf download no/such"):
        find_models({"policy.model_path": load_config(["policy.model_path=no/such"]).policy}, notify=pytest.fail)
    assert silent.asked.wait(30) and silent.num_asked == 1


def test_the_limit_is_five_seconds_and_an_answer_of_any_kind_counts(silent, monkeypatch):
    import huggingface_hub

    assert hub_limit() == 5.0

    class FakeSession:
        def head(self, url, timeout):
            assert url == silent.endpoint and timeout == 0.3
            return 404

    monkeypatch.setattr(huggingface_hub, "get_session", FakeSession)
    assert hub.hub_answers()
    with hub.from_the_cache():
        assert not hub.hub_answers()
    assert hub.hub_answers() and silent.num_asked == 0


def hub_limit() -> float:
    """As the module has it, whatever a fixture sets."""
    import ast
    import inspect

    values = [node.value for node in ast.parse(inspect.getsource(hub)).body if isinstance(node, ast.Assign)]
    return values[0].value
