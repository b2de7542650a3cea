"""The source distribution holds the whole project, the wheel the five packages and nothing else; pip installs it."""

import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from streamrl.version import __version__
from tests.package.build import NOT_SHIPPED, Distributions, build, project_files

PACKAGES = ("streamrl", "actors", "learner", "envs", "configs")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    return build(tmp_path_factory.mktemp("package"), isolated=False)


def test_the_source_distribution_holds_every_file_of_the_project(made: Distributions):
    expected = {name for name in project_files() if not name.startswith(NOT_SHIPPED)}

    found = {name for name in made.sdist_files() if ".egg-info/" not in name} - {"PKG-INFO", "setup.cfg"}

    assert found == expected


def test_the_wheel_holds_the_packages_and_nothing_else(made: Distributions):
    expected = {name for name in project_files() if name.partition("/")[0] in PACKAGES and "/" in name}

    found = {name for name in made.wheel_files() if ".dist-info/" not in name}

    assert found == expected
    assert "configs/experiment/quickstart.yaml" in found


def test_the_wheel_says_what_it_is(made: Distributions):
    metadata = made.wheel_text(".dist-info/METADATA")

    assert f"Version: {__version__}\n" in metadata and "License-Expression: Apache-2.0\n" in metadata
    assert "streamrl = streamrl.cli:main" in made.wheel_text(".dist-info/entry_points.txt")
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in made.wheel_files())


def test_pip_installs_it_by_name_from_an_index(made: Distributions, tmp_path: Path):
    page = tmp_path / "index" / "streamrl" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="{made.wheel.as_uri()}">{made.wheel.name}</a>')
    venv.create(tmp_path / "venv", with_pip=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))

    def says(*words: str) -> str:
        done = subprocess.run([tmp_path / "venv" / "bin" / words[0], *words[1:]], cwd=tmp_path, capture_output=True,
                              text=True, timeout=100, env={"PATH": "/usr/bin:/bin"})
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    says("python", "-m", "pip", "install", "--no-deps", "--index-url", page.parents[1].as_uri(), "streamrl")
    # Dependencies come from the tests' environment: a .pth line adds them, and not the project's editable installation.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    assert says("streamrl", "--version").strip() == __version__
    assert "streamrl launch experiment=quickstart" in says("streamrl", "--help")
    assert Path(says("python", "-c", "import streamrl; print(streamrl.__file__)").strip()).is_relative_to(site)
