"""Every exception that streamrl raises on purpose, drawn once.

    StreamrlError
    ├── ConfigError              a setting is unknown, impossible or contradicts another
    ├── TaskError                a task or environment file cannot be loaded or broke its protocol
    │   ├── DataChangedError         a data file was changed while a run used it
    │   ├── EpisodeFullError         an interaction loop asked for a turn for which its episode has no room
    │   └── RequestError             a request that no engine can serve: its sender's mistake, and the engine goes on
    ├── WireError                bytes from a peer were refused; `.counter` names the statistic
    │   ├── FrameError               wrong magic, flags or number of frames, or a frame over the size limit
    │   ├── ProtocolVersionError     the peer uses a protocol number that this build does not support
    │   ├── KindError                unknown kind, or a kind that is illegal in this direction
    │   ├── DigestError              the body does not match its digest
    │   ├── BodyError                the body is not a MessagePack value of the struct of its kind
    │   └── ContentError             decoded, but its contents are impossible (lengths, NaN, ids, ranges)
    ├── WeightsError             a weight document is incomplete, corrupt or does not fit the model; below it,
    │   │                            in `streamrl.weights.document`:
    │   ├── NotAvailable             this transport cannot deliver: the next offer is tried
    │   │   └── VersionRetired           the version was retired: a newer one is on its way
    │   └── Superseded               the fetch was abandoned for a newer version
    ├── EngineError              the inference engine failed, whatever it was asked for
    ├── CheckpointError          a checkpoint is damaged or belongs to another run
    ├── RunLockedError           another learner owns the run directory, or this one was fenced by a newer
    ├── ControlError             a command for a running run cannot be carried out
    │   └── RunNotFoundError         no run has this name, or is in this directory
    └── RunFailedError           a launched run ended with a failure; `.exit_code` is its status

Peers' mistakes are `WireError`s: they are counted and never end the process that found them.
"""

from __future__ import annotations

import traceback
from pathlib import Path


class StreamrlError(Exception):
    """Root of everything below; catching it catches no programming error."""


def install_extra(name: str) -> str:
    """The command that installs an extra of pyproject.toml, for the error about a missing package."""
    return f"pip install 'streamrl[{name}]' (in a clone: pip install -e '.[{name}]')"


class ConfigError(StreamrlError, ValueError):
    """A setting is unknown, impossible, or contradicts another; the message names the key and the remedy."""


class TaskError(StreamrlError):
    """A task or environment cannot be loaded, or broke its protocol."""


class DataChangedError(TaskError):
    """A data file was changed while a run used it."""


class EpisodeFullError(TaskError):
    """An interaction loop asked for a turn that env.max_turns or the tokens of a trajectory do not allow.

    A loop may catch it and return the reward earned so far. If it does not, the episode ends here, cut by a limit,
    with what `client.reward` was given.
    """


class RequestError(TaskError):
    """A request that no engine can serve. It is its sender's mistake: it fails alone, and the engine goes on."""


class WireError(StreamrlError):
    """Bytes from a peer were refused."""

    counter = "wire"


class FrameError(WireError):
    counter = "frame"


class ProtocolVersionError(WireError):
    counter = "protocol"


class KindError(WireError):
    counter = "kind"


class DigestError(WireError):
    counter = "digest"


class BodyError(WireError):
    counter = "body"


class ContentError(WireError):
    """A decoded message carries impossible contents; `check` names the rule that it broke."""

    counter = "content"

    def __init__(self, check: str, message: str) -> None:
        super().__init__(message)
        self.check = check


class WeightsError(StreamrlError):
    """A weight document is incomplete, corrupt, or does not fit the model."""


class EngineError(StreamrlError):
    """The inference engine failed; a request that cannot be served is a `RequestError`."""


class CheckpointError(StreamrlError):
    """A checkpoint is damaged, or belongs to another run."""


class RunLockedError(StreamrlError):
    """Another learner owns the run directory, or a newer one has fenced this one."""


class ControlError(StreamrlError):
    """A command for a running run was refused, or its process could not be reached."""


class RunNotFoundError(ControlError, FileNotFoundError):
    """No run has this name, or is in this directory."""


class RunFailedError(StreamrlError):
    """A launched run ended with a failure; `exit_code` is its status."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def one_sentence(error: Exception) -> str:
    """The error in words; what the operating system refuses with the file that it refuses."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename} cannot be read or written: {error.strerror}"
    return str(error)


def in_one_line(error: Exception) -> str:
    """The beginning of a library's message, in one line."""
    return " ".join((one_sentence(error) if isinstance(error, OSError) else str(error) or repr(error)).split())[:400]


def describe(error: BaseException) -> str:
    """The error with the innermost place where it happened, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    if isinstance(error, SyntaxError):  # its text holds the place, too
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename or '?').name}, line {error.lineno})"
    return f"{type(error).__name__}: {error}{where}"
