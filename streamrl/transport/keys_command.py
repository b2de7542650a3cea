"""`streamrl keys`: who may connect to a hub. `streamrl join`: an actor from one address and one key."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

from streamrl.errors import ConfigError
from streamrl.transport.keys import PREFIX, KeyDirectory, actor_key, read_actor_key, short

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
        raise ConfigError(f"give the address first, or a run directory that is there\n\n{JOIN_USAGE}")
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
