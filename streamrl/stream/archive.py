"""A bundle: one tar file, equal bytes for equal contents, in which every byte is accounted for.

    the files, by name | MANIFEST.json: what it is, size and sha256 of each file | MANIFEST.sha256: of the manifest

`unpack` compares every file with the manifest, and the tar file with one that is made again of these files: a flipped
byte anywhere is found, also between the files. Somebody who edits a file and makes a new manifest gets another digest
of it; compare it with the one that was published.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

from streamrl.errors import StreamrlError

MANIFEST, DIGEST = "MANIFEST.json", "MANIFEST.sha256"
_PIECE = 1 << 20


MAX_NAME = 255
"""Bytes of a name that every file system takes."""


class BundleError(StreamrlError):
    """A bundle is damaged."""


class NoBundleError(StreamrlError):
    """A file is no bundle, and never was."""


def pack(
    files: Mapping[str, Path], about: Mapping[str, Any], out: IO[bytes],
    progress: Callable[[str, int], None] = lambda name, size: None,
) -> str:
    """Write a bundle; returns the digest of its manifest.

    Args:
        files: name in the bundle -> file.
        about: what the manifest says beside the files' digests.
        progress: called with name and size of each file before it is read.
    Raises:
        OSError: a file cannot be read, also because it grew or shrank meanwhile.
    """
    entries: dict[str, dict[str, Any]] = {}
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted(files):
            with files[name].open("rb") as file:
                size = file.seek(0, io.SEEK_END)
                file.seek(0)
                progress(name, size)
                hashed = _Hashing(file)
                tar.addfile(_header(name, size), hashed)
            entries[name] = {"size": size, "sha256": hashed.digest.hexdigest()}
        manifest = json.dumps({**about, "files": entries}, indent=1, sort_keys=True).encode() + b"\n"
        digest = hashlib.sha256(manifest).hexdigest()
        for name, content in ((MANIFEST, manifest), (DIGEST, digest.encode() + b"\n")):
            tar.addfile(_header(name, len(content)), io.BytesIO(content))
    return digest


def require_bundle(path: Path) -> None:
    """Raise NoBundleError unless this is a tar file, OSError if it cannot be read."""
    if not path.exists():
        raise NoBundleError(f"{path}: no such file, give one that  streamrl bundle RUN  wrote")
    if path.is_dir():
        raise NoBundleError(f"{path} is a directory: make the bundle of a run with  streamrl bundle {path}")
    with path.open("rb") as file:
        if file.read(512)[257:262] != b"ustar":
            raise NoBundleError(f"{path} is no bundle: name a file that  streamrl bundle RUN  has written")


def unpack(path: Path, folder: Path) -> tuple[dict[str, Any], str]:
    """Check a bundle and write its files into a folder; returns its manifest and the manifest's digest.

    It takes no more room than the bundle: an entry is as large as its bytes there.

    Raises:
        NoBundleError: it is no tar file.
        BundleError: a byte of it is not as it was packed; it names the part.
    """
    require_bundle(path)
    found: set[str] = set()
    try:
        with tarfile.open(path, mode="r:") as tar:
            for one in tar:
                _write(tar, one, folder, found)
    except (tarfile.TarError, EOFError, ValueError, RecursionError, MemoryError) as error:  # a size, as it says
        raise BundleError(f"{path} is no bundle, or is damaged: {str(error) or 'too large'}. Get it again") from error
    manifest, digest = _manifest(path, folder, found)
    for name, entry in manifest["files"].items():
        _check_file(path, folder / name, name, entry, there=name in found)
    if more := sorted(found - manifest["files"].keys() - {MANIFEST, DIGEST}):
        raise BundleError(f"{path} holds {more[0]}, which its manifest does not name. Get it again")
    about = {name: value for name, value in manifest.items() if name != "files"}
    again = _Sink()
    pack({name: folder / name for name in manifest["files"]}, about, again)
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").digest() != again.digest.digest():
            raise BundleError(f"{path} was changed between its files: these match its manifest. Get it again")
    return manifest, digest


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header(name: str, size: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.size, header.mode = size, 0o644
    return header


def _write(tar: tarfile.TarFile, one: tarfile.TarInfo, folder: Path, found: set[str]) -> None:
    """Write one file of a bundle, which may come from anybody: nothing but plain files inside the folder.

    Args:
        found: names of the files so far; this one's is added.
    """
    name = PurePosixPath(one.name)
    # A sparse file may be larger than the whole disk, and holds nothing.
    plain = one.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not one.pax_headers and one.size >= 0
    is_inside = not name.is_absolute() and name.parts and ".." not in name.parts and name.as_posix() == one.name
    if not plain or not is_inside or not one.name.isprintable():
        raise BundleError(f"{tar.name} holds {one.name!r:.300}, which is no plain file of a bundle: do not use it")
    if max(len(part.encode()) for part in name.parts) > MAX_NAME or len(one.name) > 4 * MAX_NAME:
        raise BundleError(f"{tar.name} holds a name of {len(one.name)} characters, {one.name[:40]}...: do not use it")
    if one.name in found:
        raise BundleError(f"{tar.name} holds {one.name} twice: it is damaged. Get it again")
    if (other := _in_the_way(name, folder)) is not None:
        raise BundleError(f"{tar.name} holds {one.name} and, as a file or a folder, {other}: do not use it")
    found.add(one.name)
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(one)
    assert source is not None
    with target.open("xb") as out:
        while piece := source.read(_PIECE):
            out.write(piece)


def _in_the_way(name: PurePosixPath, folder: Path) -> str | None:
    """The file that lies where this name needs a folder, or the folder that lies where it is to be."""
    for above in name.parents[:-1]:
        if (folder / above).is_file():
            return str(above)
    return str(name) if (folder / name).exists() else None


def _manifest(path: Path, folder: Path, found: set[str]) -> tuple[dict[str, Any], str]:
    try:
        if not {MANIFEST, DIGEST} <= found:
            raise ValueError
        data, digest = (folder / MANIFEST).read_bytes(), (folder / DIGEST).read_text().strip()
        manifest = json.loads(data)
        entries = {name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BundleError(
            f"{path} has no manifest that can be read: it was cut short, damaged, or is no bundle. Get it again"
        ) from error
    if hashlib.sha256(data).hexdigest() != digest or not entries:
        raise BundleError(f"{path}: its manifest does not match {DIGEST}: one of them was changed. Get it again")
    return manifest, digest


def _check_file(path: Path, file: Path, name: str, entry: Mapping[str, Any], *, there: bool) -> None:
    if not there:
        raise BundleError(f"{path} lacks {name}, which its manifest names. Get it again")
    if file.stat().st_size != entry["size"] or sha256_of(file) != entry["sha256"]:
        raise BundleError(f"{path}: {name} is not what its manifest says: a byte of it was changed. Get it again")


class _Hashing:
    """A file that is hashed while it is read; it ends where the tar file's header says, or not at all."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        piece = self._file.read(size)
        self.digest.update(piece)
        return piece


class _Sink(io.RawIOBase):
    """A file that is only hashed."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)
