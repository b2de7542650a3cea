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
import json
import logging
import os
import re
import stat
import time
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
                              "or add a key under another name")
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
        raise ConfigError(f"{endpoint}: the text after # is not a public key: give the address as `streamrl relay` "
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


# --- between a hub and its ranks -------------------------------------------------------------------------------------

VARIABLE = "STREAMRL_RANK_KEYS"
RANKS = "ranks"


@dataclass(frozen=True, slots=True)
class RankKeys:
    """Keys between a hub and learner ranks on other machines; an `Authenticator` reads them like a `KeyDirectory`.

    Made for one start, and written to no file: the hub gets them in its environment, as a child of rank 0; the other
    ranks get theirs through the process group.
    """

    server: KeyPair
    ranks: KeyPair

    @staticmethod
    def new() -> RankKeys:
        return RankKeys(KeyPair.new(), KeyPair.new())

    def environment(self) -> dict[str, str]:
        """The environment variable that passes the keys to the hub's process."""
        return {VARIABLE: f"{self.server.secret.decode()} {self.ranks.secret.decode()}"}

    @staticmethod
    def from_environment() -> RankKeys | None:
        """Read the keys that `environment` passed; None without any."""
        text = os.environ.get(VARIABLE)
        return None if text is None else RankKeys(*(KeyPair.of_secret(one.encode()) for one in text.split()))

    @property
    def key(self) -> ActorKey:
        """The key that a rank shows, and the hub that it trusts."""
        return ActorKey(RANKS, self.ranks, self.server.public)

    def hub(self) -> KeyPair:
        return self.server

    def allowed(self) -> dict[bytes, str]:
        return {self.ranks.public: RANKS}

    def stamp(self) -> tuple[tuple[str, int], ...]:
        return ()


# --- `streamrl keys` and `streamrl join` -----------------------------------------------------------------------------

USAGE = """streamrl keys new [DIRECTORY]             make the hub's key pair, and a key for actors that launch starts
streamrl keys add [DIRECTORY] NAME        a key for NAME, which may join from now on
streamrl keys remove [DIRECTORY] NAME     NAME may not join any more; its open connections end within a second
streamrl keys list [DIRECTORY]            names, and the first bytes of their public keys

DIRECTORY is `keys` if not given. Start with it:

  streamrl launch experiment=quickstart hub.bind=tcp://0.0.0.0:5601 hub.advertise=HOST hub.keys=keys

and join from another machine, after keys/actors/NAME.key was copied there:

  streamrl join tcp://HOST:5601 key=NAME.key

An actor with the key of NAME may call itself NAME or NAME-anything, so one key serves any number of actors of one
machine or cluster. A key file is all it takes to join: copy it as you would a password.
"""
JOIN_USAGE = """streamrl join tcp://HOST:PORT [key=FILE] [key=value ...]
streamrl join RUN_DIR [key=FILE] [key=value ...]

An actor for a run anywhere, or for the run of a directory on a file system that both machines share: it then waits for
the learner to write its address there. Its key is the file that `streamrl keys add` wrote on the learner's machine; the
text in that file may also stand after the address, tcp://HOST:PORT#streamrl-key:..., where no other user sees the
command line. Other words are settings, as for `streamrl actor`.
"""
DIRECTORY = "keys"


def keys(words: list[str]) -> int:
    """`streamrl keys`; the exit status. Raises ConfigError."""
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return 0 if words else 2
    verb, *rest = words
    takes_name = verb in ("add", "remove")
    if verb not in ("new", "add", "remove", "list") or not takes_name <= len(rest) <= takes_name + 1:
        raise ConfigError(f"streamrl keys {' '.join(words)} is not a command: use one of these\n\n{USAGE}")
    name = rest.pop() if takes_name else ""
    directory = rest[0] if rest else DIRECTORY
    if verb == "new":
        KeyDirectory.create(directory).add(KeyDirectory.LAUNCHED)
        print(f"{directory} has the hub's key, and one for the actors that launch starts. Next, for another machine:\n"
              f"  streamrl keys add {directory} NAME")
    elif verb == "add":
        path = KeyDirectory(directory).add(name)
        print(f"{name} may join. Copy {path} to its machine, in secret, and start there\n"
              f"  streamrl join tcp://HOST:PORT key={path.name}")
    elif verb == "remove":
        KeyDirectory(directory).remove(name)
        print(f"{name} may not join any more")
    else:
        found = KeyDirectory(directory)
        print(f"hub  {short(found.hub().public)}")
        for public, one in sorted(found.allowed().items(), key=lambda item: item[1]):
            print(f"{one}  {short(public)}")
    return 0


def join_words(words: list[str]) -> list[str]:
    """The words of `streamrl actor` for those of `streamrl join`. Raises ConfigError."""
    if words and Path(words[0]).is_dir():
        words = [_address_in(Path(words[0])), *words[1:]]
    if not words or not re.match(r"tcp://", words[0]):
        raise ConfigError(f"give the address first, or an existing run directory\n\n{JOIN_USAGE}")
    address, _, text = words[0].partition("#")
    files = [word.partition("=")[2] for word in words[1:] if word.startswith("key=")]
    others = [word for word in words[1:] if not word.startswith("key=")]
    if len(files) + bool(text) > 1:
        raise ConfigError("give one key: key=FILE, or its text after the address")
    if files:
        read_actor_key(files[0])  # a wrong file is told here, before a process waits for an answer
    elif text:
        files = [str(_keep(text))]
    return [f"connect={address}", *(f"actors.key={file}" for file in files), *others]


def _address_in(run_dir: Path) -> str:
    """Wait until the hub of this run has written its address, and return it."""
    note = run_dir / "hub.json"
    if not note.exists():
        print(f"waiting for the learner to write {note}", flush=True)
    while not note.exists():  # perhaps on another machine: nothing tells when it appears
        time.sleep(1)
    return str(json.loads(note.read_text())["connect"])


def _keep(text: str) -> Path:
    """A file of this user's with the key, because settings are shown and files are not."""
    key = actor_key(text if text.startswith(PREFIX) else f"{PREFIX}:{text}")
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "streamrl/keys"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{key.name}-{short(key.pair.public)}.key"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key.text + "\n")
    return path
