"""Bundles that come from anybody: plain files of bounded size inside the folder, or one sentence."""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from learner.replay.verify import verify
from streamrl.errors import ControlError
from streamrl.stream.archive import DIGEST, MANIFEST, BundleError, NoBundleError, pack, unpack

pytestmark = pytest.mark.timeout(60)


def entry(name: str, kind: bytes = tarfile.REGTYPE, **about: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = kind
    for key, value in about.items():
        setattr(made, key, value)
    return made


def bundle_of(path: Path, add: Callable[[tarfile.TarFile], None], manifest: bytes | None = None,
              form: int = tarfile.GNU_FORMAT) -> Path:
    """A tar file of somebody who writes headers by hand; the manifest is right for itself."""
    manifest = json.dumps({"files": {"a": {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}}}).encode() \
        if manifest is None else manifest
    with tarfile.open(path, "w", format=form) as tar:
        add(tar)
        for name, content in ((MANIFEST, manifest), (DIGEST, hashlib.sha256(manifest).hexdigest().encode())):
            header = entry(name, size=len(content))
            tar.addfile(header, io.BytesIO(content))
    return path


def sparse(tar: tarfile.TarFile) -> None:
    """One entry of 512 bytes that is a terabyte large when it is written."""
    header = bytearray(entry("big", tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT))
    header[386:398], header[398:410] = b"%011o\0" % 0, b"%011o\0" % 0
    header[483:495] = b"%011o\0" % (1 << 32)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    tar.fileobj.write(bytes(header))
    tar.offset += len(header)


def pax_sparse(tar: tarfile.TarFile) -> None:
    about = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": str(1 << 40),
             "GNU.sparse.map": f"0,0,{1 << 40},0", "GNU.sparse.name": "big"}
    tar.addfile(entry("big", pax_headers=about))


def negative(kind: bytes, size: int = -512) -> Callable[[tarfile.TarFile], None]:
    """A header that sends its reader back to itself, before the file, or for more than memory holds."""
    def add(tar: tarfile.TarFile) -> None:
        header = bytearray(entry("a", kind).tobuf(tarfile.GNU_FORMAT))
        header[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        tar.fileobj.write(bytes(header))
        tar.offset += len(header)
    return add


def added(*entries: tarfile.TarInfo) -> Callable[[tarfile.TarFile], None]:
    return lambda tar: [tar.addfile(one, io.BytesIO(bytes(one.size))) for one in entries] and None


HOSTILE: dict[str, tuple[Callable[[tarfile.TarFile], None], str]] = {
    "a sparse file": (sparse, "no plain file"), "a sparse file of the other form": (pax_sparse, "no plain file"),
    "a link": (added(entry("a", tarfile.SYMTYPE, linkname="/etc/passwd")), "no plain file"),
    "a hard link": (added(entry("a", tarfile.LNKTYPE, linkname="/etc/passwd")), "no plain file"),
    "a device": (added(entry("a", tarfile.CHRTYPE)), "no plain file"),
    "a pipe": (added(entry("a", tarfile.FIFOTYPE)), "no plain file"),
    "a directory": (added(entry("a", tarfile.DIRTYPE)), "no plain file"),
    "an absolute name": (added(entry("/tmp/a")), "no plain file"),
    "a name above": (added(entry("../a")), "no plain file"),
    "a name that goes up": (added(entry("b/../a")), "no plain file"),
    "another way to write a name": (added(entry("./a")), "no plain file"),
    "an escape sequence": (added(entry("a\x1b[2J")), "no plain file"),
    "a long name": (added(entry("n" * 300)), "a name of 300 characters"),
    "a deep name": (added(entry("/".join("n" * 1000))), "a name of 1999 characters"),
    "a file beside its folder": (added(entry("a"), entry("a/b")), "as a file or a folder, a"),
    "a folder beside its file": (added(entry("a/b"), entry("a")), "as a file or a folder, a"),
    "twice": (added(entry("a"), entry("a")), "twice"), "a negative size": (negative(tarfile.REGTYPE), "."),
    "a long name of a negative size": (negative(tarfile.GNUTYPE_LONGNAME), "."),
    "a header of a negative size": (negative(tarfile.XHDTYPE), "."),
    "a size before the file": (negative(tarfile.REGTYPE, -(1 << 20)), "no plain file"),
    "a long name beyond memory": (negative(tarfile.GNUTYPE_LONGNAME, 1 << 62), "too large"),
    "a header beyond memory": (negative(tarfile.XHDTYPE, 1 << 62), "too large"),
    "cut short": (added(entry("a", size=0), entry("b", size=10)), "does not name"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_plain_file_of_a_bundle_is_refused_in_a_sentence(kind, tmp_path):
    add, said = HOSTILE[kind]
    form = tarfile.PAX_FORMAT if add is pax_sparse else tarfile.GNU_FORMAT
    path, folder = bundle_of(tmp_path / "x.tar", add, form=form), tmp_path / "out"
    folder.mkdir()
    with pytest.raises(BundleError, match=said) as raised:
        unpack(path, folder)

    written = [one for one in folder.rglob("*") if one.is_file()]
    assert sum(one.stat().st_blocks * 512 for one in written) <= path.stat().st_size + 4096 * len(written)
    assert "\x1b" not in str(raised.value) and {*os.listdir(tmp_path)} == {"x.tar", "out"}


@pytest.mark.parametrize("manifest", [
    b"[" * 200_000, b"{\"files\":" * 100_000, b"null", b"{}", b"{\"files\": []}", b"{\"files\": {\"a\": 1}}",
    b"{\"files\": {\"../a\": {\"size\": 0, \"sha256\": \"\"}}}", b"{\"files\": {\"a\": {\"size\": {}, \"sha256\": 3}}}",
    b"\xff", b"",
])  # fmt: skip
def test_a_manifest_that_is_none_is_a_sentence(manifest, tmp_path):
    path = bundle_of(tmp_path / "x.tar", added(entry("a")), manifest)
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match="Get it again"):
        unpack(path, tmp_path / "out")


def test_texts_of_a_manifest_do_not_steer_the_terminal(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("policy: {tiny: {enabled: true}}\n")
    with (tmp_path / "x.tar").open("wb") as out:
        pack({"config.yaml": tmp_path / "config.yaml"}, {"run_id": "\x1b]0;mine\x07\x1b[2J"}, out)
    (tmp_path / "out").mkdir()

    with pytest.raises(ControlError, match="has no log"):
        verify(tmp_path / "x.tar", tmp_path / "out", ["hash"], [], num=1, seed=1)
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\\x1b]0;mine\\x07" in said


def test_what_never_was_a_bundle_is_no_disagreement(tmp_path):
    (tmp_path / "records.jsonl").write_text('{"prompt": 1}\n' * 100)
    (tmp_path / "empty").touch()
    for name in ("records.jsonl", "empty", "none", "."):
        with pytest.raises(NoBundleError, match="streamrl bundle"):
            unpack(tmp_path / name, tmp_path / "out")
