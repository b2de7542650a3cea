from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WeightsError
from streamrl.weights.assets import MAX_ASSETS_BYTES, pack_assets, unpack_assets

SENT = {
    "config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "tokenizer.model",
    "added_tokens.json", "vocab.txt", "additional_chat_templates/tool_use.jinja",
}


@pytest.fixture
def model_dir(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "additional_chat_templates").mkdir()
    for name in SENT:
        (folder / name).write_bytes(name.encode() * 3)
    (folder / "additional_chat_templates" / "own.py").write_bytes(b"stays at home")
    for name in ("model.safetensors", "pytorch_model.bin", "modeling_own.py", "README.md", "config.json.bak"):
        (folder / name).write_bytes(b"stays at home")
    (folder / "tokenizer_dir.json").mkdir()
    return folder


def test_assets_come_back_byte_for_byte_and_nothing_else_travels(model_dir, tmp_path):
    data = pack_assets(model_dir)

    paths = unpack_assets(data, tmp_path / "target")

    target = tmp_path / "target"
    assert {path.relative_to(target).as_posix() for path in paths} == SENT
    assert {path for path in target.rglob("*") if path.is_file()} == {*paths}
    assert all(path.read_bytes() == (model_dir / path.relative_to(target)).read_bytes() for path in paths)
    assert pack_assets(tmp_path / "target") == data


def test_a_directory_without_a_config_is_no_model(tmp_path):
    with pytest.raises(WeightsError, match="no config.json"):
        pack_assets(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../config.json", "/etc/passwd", "a/config.json", "tokenizer/../x.json", "tokenizer\\x.json", "tokenizer\0.json",
     "config.json/", "modeling.py", "model.safetensors", "", ".", "tokenizer" + "x" * 200 + ".json",
     "additional_chat_templates/../x.jinja", "additional_chat_templates/a/b.jinja", "additional_chat_templates/own.py",
     "a/additional_chat_templates/x.jinja", "additional_chat_templates//x.jinja", "additional_chat_templates"],
)
def test_hostile_names_are_refused_before_anything_is_written(name, tmp_path):
    data = msgspec.msgpack.encode({"config.json": b"{}", name: b"x"})

    with pytest.raises(WeightsError, match="is refused"):
        unpack_assets(data, tmp_path / "target")

    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"config.json": 3}), b"\x91" * 100_000,
     msgspec.msgpack.encode({"config.json": b"{}"}) + b"x", b"\x81\xa2\xff\xfe\xc4\x01x"],
    ids=["empty", "invalid", "list", "number", "nested", "trailing", "not-utf8"],
)
def test_bytes_that_are_no_map_of_names_are_refused(data, tmp_path):
    with pytest.raises(WeightsError, match="no map"):
        unpack_assets(data, tmp_path)


def test_assets_over_the_limit_are_refused(tmp_path):
    with pytest.raises(WeightsError, match="over the limit"):
        unpack_assets(bytes(MAX_ASSETS_BYTES + 1), tmp_path)


@given(st.binary(max_size=200))
def test_no_bytes_at_all_raise_anything_but_a_weights_error(data):
    try:
        unpack_assets(data, "/dev/null/nothing-can-be-written-here")
    except WeightsError:
        pass
    except NotADirectoryError:
        assert msgspec.msgpack.decode(data) == {}
