"""CURVE key pairs on disk: the hub's own, and one for each name that may connect to it.

    keys/                      0700, on the learner's machine
      hub.key                  0600  the hub's secret key
      allowed/NAME.pub         the public key of NAME; without this file NAME cannot connect
      actors/NAME.key          0600  the text below, for the machine that NAME runs on; may be deleted here afterwards

The text of an actor's key is `streamrl-key:NAME:` and base64 of (public key of the hub, secret key of NAME): what an
actor needs to know whom it talks to, and to show who it is. Keys are those of CurveZMQ (RFC 26), 32 bytes each.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from streamrl.errors import ConfigError

log = logging.getLogger("streamrl.transport")

PREFIX = "streamrl-key"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One CURVE key pair, each half as Z85 text of 40 bytes."""

    public: bytes
    secret: bytes

    @staticmethod
    def new() -> KeyPair:
        return KeyPair(*zmq.curve_keypair())

    @staticmethod
    def of_secret(secret: bytes) -> KeyPair:
        return KeyPair(zmq.curve_public(secret), secret)

    def __repr__(self) -> str:
        return f"KeyPair({short(self.public)})"  # the secret half must not reach a log


@dataclass(frozen=True, slots=True)
class ActorKey:
    """The credentials of an actor: its name, its key pair, and the public key of the hub that it trusts."""

    name: str
    pair: KeyPair
    hub: bytes

    @property
    def text(self) -> str:
        """The one line that `actor_key` reads; it contains the secret."""
        raw = z85.decode(self.hub) + z85.decode(self.pair.secret)
        return f"{PREFIX}:{self.name}:{base64.urlsafe_b64encode(raw).decode().rstrip('=')}"

    def __repr__(self) -> str:
        return f"ActorKey({self.name}, {self.pair})"


def actor_key(text: str) -> ActorKey:
    """The key that `ActorKey.text` wrote. Raises ConfigError, without showing the text: it may be a secret."""
    prefix, _, rest = text.strip().partition(":")
    name, _, encoded = rest.partition(":")
    try:
        raw = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except (ValueError, binascii.Error):
        raw = b""
    if prefix != PREFIX or not NAME.fullmatch(name) or len(raw) != 2 * _KEY_BYTES:
        raise ConfigError(
            f"this is not an actor's key: it must be one line, {PREFIX}:NAME:..., as `streamrl keys add` writes it"
        )
    return ActorKey(name, KeyPair.of_secret(z85.encode(raw[_KEY_BYTES:])), z85.encode(raw[:_KEY_BYTES]))


def read_actor_key(path: str | Path) -> ActorKey:
    """The key in a file. Raises ConfigError: it is missing, wrong, or others on this machine can read it."""
    return actor_key(_read_secret(Path(path), "actors.key"))


class KeyDirectory:
    """The hub's keys in one folder. Methods raise ConfigError; none shows a secret."""

    LAUNCHED = "actor"
    """Name of the key that `streamrl launch` gives to the actors it starts."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @staticmethod
    def create(path: str | Path) -> KeyDirectory:
        """Make the folder and the hub's key pair."""
        keys = KeyDirectory(path)
        if keys._hub_file.exists():
            raise ConfigError(f"{keys.path} has keys already: use it, or choose another directory")
        for folder in (keys.path, keys._actors, keys._allowed):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_secret(keys._hub_file, KeyPair.new().secret.decode() + "\n")
        return keys

    @property
    def _hub_file(self) -> Path:
        return self.path / "hub.key"

    @property
    def _actors(self) -> Path:
        return self.path / "actors"

    @property
    def _allowed(self) -> Path:
        return self.path / "allowed"

    def hub(self) -> KeyPair:
        """The hub's own key pair."""
        if not self._hub_file.exists():
            raise ConfigError(f"hub.keys={self.path} has no keys: run `streamrl keys new {self.path}`")
        return KeyPair.of_secret(_read_secret(self._hub_file, "hub.keys").encode())

    def add(self, name: str) -> Path:
        """A new key pair for `name`, allowed from now on; returns the file with its key."""
        if not NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is not a name for a key: use 1 to 40 of a-z, 0-9, dot, dash and underscore")
        if (self._allowed / f"{name}.pub").exists():
            raise ConfigError(f"{name} has a key already: remove it first (`streamrl keys remove {self.path} {name}`), "
                              "or add another name beside it")
        for other in self.allowed().values():
            if may_be(name, other) or may_be(other, name):
                raise ConfigError(f"actors with the key of {min(name, other, key=len)} may call themselves "
                                  f"{max(name, other, key=len)}: choose names where none is another, a dash and more")
        key = ActorKey(name, KeyPair.new(), self.hub().public)
        path = self._actors / f"{name}.key"
        _write_secret(path, key.text + "\n")
        (self._allowed / f"{name}.pub").write_text(key.pair.public.decode() + "\n")
        return path

    def remove(self, name: str) -> None:
        """Refuse `name` from now on; a hub that runs ends its connections within a second."""
        public = self._allowed / f"{name}.pub"
        if not NAME.fullmatch(name) or not public.exists():
            known = ", ".join(sorted(self.allowed().values())) or "none"
            raise ConfigError(f"{self.path} has no key of {name!r}; it has {known}")
        public.unlink()
        (self._actors / f"{name}.key").unlink(missing_ok=True)

    def launched_key(self) -> Path:
        """File of the key for actors that `streamrl launch` starts."""
        path = self._actors / f"{self.LAUNCHED}.key"
        if not path.exists():
            raise ConfigError(f"{self.path} has no key for the actors that launch starts: run `streamrl keys add "
                              f"{self.path} {self.LAUNCHED}`, or set launch.num_actors=0")
        return path

    def allowed(self) -> dict[bytes, str]:
        """Public key (Z85) to the name that may use it; a damaged file allows no actor and is logged.

        Raises:
            ConfigError: the directory cannot be read.
        """
        found = {}
        for name in self._public_files():
            path = self._allowed / name
            try:
                public = path.read_bytes().strip()
            except OSError:
                continue  # removed a moment ago
            if len(public) != 40 or not public.isascii() or not NAME.fullmatch(path.stem):
                log.warning("%s is not a public key and allows no actor: remove it, or make a key with "
                            "`streamrl keys add`", path)
                continue
            found[public] = path.stem
        return found

    def stamp(self) -> tuple[tuple[str, int], ...]:
        """Changes whenever a key was added, removed or replaced. Raises ConfigError as `allowed` does."""
        found = []
        for name in self._public_files():
            with contextlib.suppress(OSError):
                found.append((name, (self._allowed / name).stat().st_mtime_ns))
        return tuple(found)

    def _public_files(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._allowed) if name.endswith(".pub"))
        except OSError as error:
            raise ConfigError(f"hub.keys: cannot read {self._allowed} ({error.strerror}): make keys with "
                              f"`streamrl keys new`, or set it to their directory") from error


def may_be(actor_id: str, name: str) -> bool:
    """Whether the holder of the key `name` may call itself `actor_id`: by that name, or that name, a dash and more."""
    return actor_id == name or actor_id.startswith(f"{name}-")


def with_key(endpoint: str, public: bytes) -> str:
    """tcp://HOST:PORT#KEY: an address that says which public key (Z85) is there."""
    return f"{endpoint}#{base64.urlsafe_b64encode(z85.decode(public)).decode().rstrip('=')}"


def split_endpoint(endpoint: str) -> tuple[str, bytes]:
    """(tcp://HOST:PORT, public key as Z85 or b"") of what `with_key` wrote. Raises ConfigError for a damaged key."""
    address, _, encoded = endpoint.partition("#")
    if not encoded:
        return address, b""
    try:
        raw = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except (ValueError, binascii.Error):
        raw = b""
    if len(raw) != _KEY_BYTES:
        raise ConfigError(f"{endpoint}: what stands after # is not a public key: give the address as `streamrl relay` "
                          "printed it")
    return address, z85.encode(raw)


def short(public: bytes) -> str:
    """A public key for people: its first bytes in hexadecimal."""
    return z85.decode(public)[:6].hex()


def _read_secret(path: Path, setting: str) -> str:
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path} ({error.strerror}): give the file of a key, as "
                          "`streamrl keys add` writes it") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{setting}: other users of this machine can read {path}, a secret: run `chmod 600 {path}`")
    return text


def _write_secret(path: Path, text: str) -> None:
    """Write a file that others can never read, not even for a moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
