"""Keys on disk and as text, and the commands that make them."""

import stat
from pathlib import Path

import pytest

from streamrl.errors import ConfigError
from streamrl.transport.keys import (
    KeyDirectory,
    KeyPair,
    actor_key,
    join_words,
    keys,
    may_be,
    read_actor_key,
    split_endpoint,
    with_key,
)


@pytest.fixture
def directory(tmp_path) -> KeyDirectory:
    return KeyDirectory.create(tmp_path / "keys")


def test_a_key_is_read_back_as_it_was_made(directory):
    key = read_actor_key(directory.add("worker-1"))
    assert key.name == "worker-1"
    assert key.hub == directory.hub().public
    assert directory.allowed() == {key.pair.public: "worker-1"}
    assert actor_key(key.text) == key


def test_secrets_are_readable_by_their_owner_alone(directory):
    path = directory.add("worker")
    for file in (directory.path / "hub.key", path):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in (directory.path, path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_actor_key(path)


def test_no_secret_shows_in_a_representation_or_an_error(directory):
    path = directory.add("worker")
    key, secret = read_actor_key(path), path.read_text().strip()
    assert key.pair.secret.decode() not in repr(key) + repr(directory.hub())
    with pytest.raises(ConfigError) as raised:
        actor_key(secret[:-4])
    assert secret[30:60] not in str(raised.value)


@pytest.mark.parametrize("text", [
    "", "streamrl-key", "streamrl-key:a:", "other:a:" + "A" * 86, "streamrl-key:A B:" + "A" * 86,
])
def test_a_text_that_is_no_key_is_refused(text):
    with pytest.raises(ConfigError, match="streamrl keys add"):
        actor_key(text)


@pytest.mark.parametrize("name", ["", "UPPER", "a/b", "../a", "a" * 41, "-a"])
def test_a_name_that_could_leave_the_directory_is_refused(directory, name):
    with pytest.raises(ConfigError, match="not a name"):
        directory.add(name)
    with pytest.raises(ConfigError, match="has no key of"):
        directory.remove(name)


def test_removing_a_key_forgets_it_and_adding_it_again_makes_another(directory):
    first = read_actor_key(directory.add("worker"))
    with pytest.raises(ConfigError, match="has a key already"):
        directory.add("worker")
    before = directory.stamp()
    directory.remove("worker")
    assert directory.allowed() == {}
    assert directory.stamp() != before
    assert read_actor_key(directory.add("worker")) != first


def test_a_directory_is_not_made_twice_and_a_missing_one_says_how_to_make_it(directory, tmp_path):
    with pytest.raises(ConfigError, match="has keys already"):
        KeyDirectory.create(directory.path)
    with pytest.raises(ConfigError, match="streamrl keys new"):
        KeyDirectory(tmp_path / "none").hub()
    with pytest.raises(ConfigError, match="cannot read"):
        KeyDirectory(tmp_path / "none").allowed()


def test_a_damaged_file_allows_no_actor_and_leaves_the_others(directory, caplog):
    key = read_actor_key(directory.add("worker"))
    for name, data in (("broken.pub", b"not a key"), ("._worker.pub", b"\xff" * 40), ("UPPER.pub", key.pair.public)):
        (directory.path / "allowed" / name).write_bytes(data)
    (directory.path / "allowed" / "gone.pub").symlink_to("nowhere")
    assert directory.allowed() == {key.pair.public: "worker"}
    assert len(directory.stamp()) == 4
    assert "broken.pub is not a public key" in caplog.text


def test_no_key_may_take_the_names_of_another(directory):
    directory.add("gpu-1")
    for name in ("gpu", "gpu-1-a"):
        with pytest.raises(ConfigError, match="may call themselves"):
            directory.add(name)
    directory.add("gpu-2")


def test_a_key_belongs_to_its_name_and_names_that_go_on_with_a_dash():
    assert may_be("box", "box")
    assert may_be("box-7", "box")
    assert not may_be("boxes", "box")
    assert not may_be("other-box", "box")


def test_an_address_can_carry_a_public_key():
    public = KeyPair.new().public
    assert split_endpoint(with_key("tcp://h:5601", public)) == ("tcp://h:5601", public)
    assert split_endpoint("tcp://h:5601") == ("tcp://h:5601", b"")
    with pytest.raises(ConfigError, match="not a public key"):
        split_endpoint("tcp://h:5601#short")


def test_the_commands_make_list_and_remove_keys(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert keys(["new"]) == 0
    assert keys(["add", "cluster"]) == 0
    assert keys(["list"]) == 0
    printed = capsys.readouterr().out
    assert "key=cluster.key" in printed
    assert printed.splitlines()[-2].startswith("actor  ")  # for those that launch starts
    assert KeyDirectory("keys").launched_key().exists()
    assert keys(["remove", "keys", "cluster"]) == 0
    assert list(KeyDirectory("keys").allowed().values()) == ["actor"]
    for words in (["add"], ["new", "a", "b"], ["rename", "a"]):
        with pytest.raises(ConfigError, match="is not a command"):
            keys(words)
    assert keys([]) == 2


def test_join_becomes_an_actor_with_the_key_in_a_file(directory, monkeypatch, tmp_path):
    path = directory.add("box")
    assert join_words(["tcp://h:5601", f"key={path}", "actors.engine=vllm"]) == [
        "connect=tcp://h:5601", f"actors.key={path}", "actors.engine=vllm",
    ]
    assert join_words(["tcp://h:5601"]) == ["connect=tcp://h:5601"]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    text = path.read_text().strip()
    connect, setting = join_words([f"tcp://h:5601#{text}"])
    kept = Path(setting.removeprefix("actors.key="))
    assert connect == "connect=tcp://h:5601"
    assert text not in setting
    assert read_actor_key(kept) == read_actor_key(path)
    assert join_words([f"tcp://h:5601#{text}"]) == [connect, setting]  # a second time, too
    for words in ([], ["key=x"], [f"tcp://h:5601#{text}", f"key={path}"], ["tcp://h:5601", "key=missing"]):
        with pytest.raises(ConfigError):
            join_words(words)
