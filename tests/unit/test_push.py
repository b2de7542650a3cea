"""`streamrl push`: a model reaches a stand-in for the Hugging Face hub by the real huggingface_hub package."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from streamrl.errors import ConfigError
from streamrl.verbs.push import card_of, model_of

ROOT = Path(__file__).parents[2]


class FakeHub(BaseHTTPRequestHandler):
    """Takes a commit of files that are small, and notes the repository, the files and the tag."""

    taken: dict

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            self.taken["repository"] = json.loads(body)
            self._say({"url": f"http://{self.headers['Host']}/me/model"})
        elif "/preupload/" in self.path:
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for one in json.loads(body)["files"]]
            self._say({"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.taken[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._say({"commitUrl": f"http://{self.headers['Host']}/me/model/commit/1", "commitOid": "1"})
        elif "/tag/" in self.path:
            self.taken["tag"] = json.loads(body)["tag"]
            self._say({})
        else:  # what checks the card
            self._say({"errors": [], "warnings": []})

    def _say(self, answer: dict) -> None:
        raw = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run, with a model of one file."""
    run_dir = tmp_path / "runs" / "mine-001"
    (run_dir / "model").mkdir(parents=True)
    (run_dir / "EPOCH").write_text("1\n")
    (run_dir / "config.yaml").write_text("policy: {model_path: Qwen/Qwen2.5-7B}\n")
    (run_dir / "status.json").write_text('{"version": 7}')
    (run_dir / "summary.json").write_text('{"steps": 7, "eval_score_last": 0.75}')
    (run_dir / "model" / "config.json").write_text("{}")
    (run_dir / "model" / "model.safetensors").write_bytes(b"weights")
    return run_dir


def test_model_card_and_tag_arrive_in_a_private_repository(run_dir: Path) -> None:
    handler = type("Handler", (FakeHub,), {"taken": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_x",
                   "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    words = [sys.executable, "-m", "streamrl.cli", "push", "mine-001", "me/model"]
    done = subprocess.run(words, cwd=run_dir.parents[1], env=environment, capture_output=True, text=True, timeout=60)
    server.shutdown()
    server.server_close()

    assert done.returncode == 0, done.stderr
    assert "version 7 of runs/mine-001 is at http://127.0.0.1" in done.stdout
    taken = handler.taken
    assert "private" in str(taken["repository"]) and taken["tag"] == "mine-001-7"
    assert taken["model.safetensors"] == b"weights" and taken["config.json"] == b"{}"
    card = taken["README.md"].decode()
    assert "base_model: Qwen/Qwen2.5-7B" in card and "last evaluation 0.75" in card


@pytest.mark.parametrize(("known", "said"), [
    ({"eval_score_last": 0.75}, ", last evaluation 0.75"),
    ({"eval_score_last": 0, "eval_sets": [["hard", 0.1, 0.5]]}, ", last evaluation 0, last evaluation on hard 0.5"),
    ({"eval_score_last": None, "eval_sets": [["hard", 0.1, 0.5]]}, ", last evaluation on hard 0.5"),
    ({"eval_score_last": None, "kind": "sft", "held_out_loss_last": 0.25}, ", last held-out loss 0.25"),
    ({"eval_score_last": None}, ""),
    ({}, ""),
])
def test_the_card_says_what_was_measured_and_nothing_of_what_was_not(run_dir: Path, known, said) -> None:
    (run_dir / "summary.json").write_text(json.dumps({"steps": 7, **known}))

    assert card_of(run_dir, 7).endswith(f"; 7 steps in all{said}.\n")


@pytest.mark.parametrize("file, later", [
    ("status.json", {"version": 9, "state": "stopped"}), ("status.json", {"version": 9, "state": "running"}),
    ("summary.json", {"steps": 9, "stopped": "stopped"}), ("summary.json", {"steps": 9, "failed": "no memory"}),
])
def test_a_model_is_not_pushed_as_a_version_that_the_run_reached_later(run_dir: Path, file: str, later: dict) -> None:
    assert model_of(str(run_dir))[1] == 7
    (run_dir / file).write_text(json.dumps(later))

    with pytest.raises(ConfigError, match=r"went on and has not finished since: name a version, or take .*@best"):
        model_of(str(run_dir))
