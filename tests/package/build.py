"""Builds the source distribution and the wheel from the project's files, in a folder of their own."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_SHIPPED = (".ci/", ".gitignore")


@dataclass(frozen=True, slots=True)
class Distributions:
    """Distributions that `python -m build` made."""

    sdist: Path
    wheel: Path

    def sdist_files(self) -> set[str]:
        """Paths inside it, without the leading `streamrl-VERSION/`."""
        with tarfile.open(self.sdist) as archive:
            return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}

    def wheel_files(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def wheel_text(self, suffix: str) -> str:
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(suffix)]
            return archive.read(name).decode()


def project_files() -> list[str]:
    """Every file of the project: tracked, or new and not ignored."""
    done = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                          capture_output=True, text=True, check=True, timeout=60)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def build(folder: Path, isolated: bool) -> Distributions:
    """Build both distributions from a copy: what earlier builds left in the checkout cannot get in.

    Args:
        isolated: in an environment of its own, as an installer does it; False uses the setuptools that is installed.
    """
    source = folder / "source"
    for name in project_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    out = folder / "dist"
    # From the sdist comes the wheel: a file that the sdist lacks is missing from both.
    words = ["-m", "build", "--outdir", str(out), *([] if isolated else ["--no-isolation"]), str(source)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Distributions(sdist, wheel)
