"""docs/kubernetes: manifests that the API accepts, whose parts fit together and whose commands are real."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.config.load import load_config
from streamrl.transport.keys import KeyDirectory, join_words, read_actor_key

FOLDER = Path(__file__).parents[2] / "docs" / "kubernetes"
PAGE = FOLDER.with_suffix(".md").read_text()
FILES = sorted(FOLDER.glob("*.yaml"))
FOUND = {one["kind"]: one for path in FILES for one in yaml.safe_load_all(path.read_text())}


def pod(kind: str) -> dict[str, Any]:
    return FOUND[kind]["spec"]["template"]


def container(kind: str) -> dict[str, Any]:
    return pod(kind)["spec"]["containers"][0]


@pytest.mark.parametrize("kind", FOUND)
@pytest.mark.parametrize("version", ["1.30", "1.35"])
def test_the_api_accepts_it(kind, version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(FOUND[kind], version, strict=True)


def test_there_is_one_of_each():
    assert FOUND.keys() == {"PersistentVolumeClaim", "Service", "Job", "Deployment"}


def test_the_service_leads_to_the_learner():
    service = FOUND["Service"]["spec"]
    assert service["selector"].items() <= pod("Job")["metadata"]["labels"].items()
    named = {one["name"]: one["containerPort"] for one in container("Job")["ports"]}
    assert {one["targetPort"]: one["port"] for one in service["ports"]} == named
    selector = FOUND["Deployment"]["spec"]["selector"]["matchLabels"]
    assert selector.items() <= pod("Deployment")["metadata"]["labels"].items()


def test_the_learners_words_are_settings_that_fit_the_service():
    text = container("Job")["args"][0].replace("$resume", "false")
    words = shlex.split(text[text.index("streamrl learner") :])[2:]
    config = load_config(words)
    service = FOUND["Service"]
    ports = {one["name"]: one["port"] for one in service["spec"]["ports"]}
    assert config.hub.bind == f"tcp://0.0.0.0:{ports['hub']}"
    assert config.hub.weights_port == ports["weights"]
    assert config.hub.advertise == service["metadata"]["name"]
    mounts = {one["name"]: one["mountPath"] for one in container("Job")["volumeMounts"]}
    assert config.hub.keys == mounts["keys"]
    assert config.run.dir is not None and config.run.dir.startswith(f"{mounts['runs']}/")
    assert f"-e {config.run.dir}/EPOCH" in text


def test_the_secrets_of_the_page_are_the_keys_that_hub_and_actors_read(tmp_path):
    keys = KeyDirectory.create(tmp_path / "keys")
    keys.add("k8s")
    for kind, name in (("Job", "streamrl-hub"), ("Deployment", "streamrl-actor")):
        command = re.search(rf"^kubectl create secret generic {name} (.+)$", PAGE, re.M)
        assert command is not None
        entries = dict(re.findall(r"--from-file=([^=]+)=(\S+)", command[1]))
        secret = next(one["secret"] for one in pod(kind)["spec"]["volumes"] if "secret" in one)
        assert secret["secretName"] == name
        items = {one["key"]: one["path"] for one in secret.get("items", [])} or {one: one for one in entries}
        assert items.keys() == entries.keys()
        for entry, path in items.items():
            target = tmp_path / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((tmp_path / entries[entry]).read_bytes())
            os.chmod(target, secret["defaultMode"])
    mounted = KeyDirectory(tmp_path / "streamrl-hub")
    assert mounted.hub() == keys.hub() and mounted.allowed() == keys.allowed()
    join, address, key = container("Deployment")["command"][1:]
    assert join == "join" and address == f"tcp://{FOUND['Service']['metadata']['name']}:5601"
    mount = container("Deployment")["volumeMounts"][0]["mountPath"]
    local = key.replace(mount, str(tmp_path / "streamrl-actor"))
    assert join_words([address, local])[0] == f"connect={address}"
    assert read_actor_key(local.partition("=")[2]).name == "k8s"


def test_commands_of_the_page_name_what_is_there():
    for path in re.findall(r"-f (docs/\S+\.yaml)", PAGE):
        assert (FOLDER.parents[1] / path).exists()
    name = re.search(r"kubectl scale deployment (\S+) ", PAGE)
    assert name is not None and name[1] == FOUND["Deployment"]["metadata"]["name"]
    assert f"job/{FOUND['Job']['metadata']['name']}" in PAGE
