"""The images of docs/docker fit the tree, the Makefile and the exact versions; the release has one version."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from streamrl.config.load import load_config
from streamrl.version import __version__

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "docker"
IMAGES = {path.suffix[1:]: path for path in sorted(FOLDER.glob("Dockerfile.*"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIP = "python -m pip install "


def steps(image: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile and what follows each: no line is continued."""
    lines = [line for line in IMAGES[image].read_text().splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def of(image: str, instruction: str) -> list[str]:
    return [rest for name, rest in steps(image) if name == instruction]


def pip_lines(text: str) -> list[str]:
    """Commands of pip, without the options that say how they install."""
    how = r"\$\(BIN\)/|--quiet |--disable-pip-version-check |--no-cache-dir |--no-compile |-e |dev,"
    return [line[line.index(PIP):] for line in re.sub(how, "", text).splitlines() if PIP in line]


def test_there_is_an_image_for_a_cpu_and_one_for_gpus():
    assert IMAGES.keys() == {"cpu", "cuda"}
    known = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD"}
    assert {name for image in IMAGES for name, _ in steps(image)} == known
    python = of("cpu", "FROM")[0].removeprefix("python:").removesuffix("-slim")
    assert f"(Python {python})" in (ROOT / "constraints/cpu.txt").read_text()


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_exists_and_is_what_the_project_is_built_from(image):
    copied = {source for rest in of(image, "COPY") for source in rest.split()[:-1]}
    assert [source for source in copied if not (ROOT / source).exists()] == []
    for source, *_, target in map(str.split, of(image, "COPY")):
        assert source == target or not (ROOT / source).is_dir(), "`COPY folder .` would copy what is in the folder"
    packages = {name.removesuffix("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    files = {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    assert copied == packages | files | {"constraints"}


@pytest.mark.parametrize(("image", "constraints"), [("cpu", "constraints/cpu.txt"), ("cuda", "constraints/gpu.txt")])
def test_it_installs_as_the_makefile_does_in_exact_versions(image, constraints):
    installs = pip_lines("\n".join(of(image, "RUN")))
    assert set(installs) <= set(pip_lines((ROOT / "Makefile").read_text()))
    assert len(installs) == (len(of(image, "RUN")) if image == "cpu" else 1)
    assert all(line.endswith(f" -c {constraints}") for line in installs)
    assert set(re.findall(r"\S+==\S+", " ".join(installs))) <= set((ROOT / constraints).read_text().splitlines())
    order = [name for name, rest in steps(image) if name == "COPY" or PIP in rest]
    assert order[0] == "COPY" and order[-1] == "RUN", "pip reads what was copied before it"


@pytest.mark.parametrize("image", IMAGES)
def test_it_starts_a_command_of_the_project_with_words_that_it_takes(image):
    [entry], [verb, *settings] = (json.loads(of(image, name)[0]) for name in ("ENTRYPOINT", "CMD"))
    assert entry in PROJECT["project"]["scripts"]
    assert verb == "launch" and load_config(settings).policy.tiny.num_warm_start_steps > 0


def test_the_pages_build_the_images_and_the_manifests_use_what_they_build():
    built = {}
    for page in ("install.md", "kubernetes.md"):
        for line in re.findall(r"^docker build .+$", (ROOT / "docs" / page).read_text(), re.M):
            words = shlex.split(line)
            built[ROOT / words[words.index("-f") + 1]] = words[words.index("-t") + 1]
            assert words[-1] == ".", "the clone is the context"
    assert built.keys() == set(IMAGES.values())
    manifests = "".join(path.read_text() for path in FOLDER.parent.glob("kubernetes/*.yaml"))
    assert set(re.findall(r"image: (\S+)", manifests)) == {built[IMAGES["cpu"]]}


def test_one_version_stands_in_the_code_the_package_the_citation_and_the_changelog():
    newest = re.search(r"^## \[(.+)\] - (?:unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert newest is not None
    assert {PROJECT["project"]["version"], citation["version"], newest[1]} == {__version__}
