"""NCCL through cupy: the communicators of `streamrl.weights.gpu.broadcast` on GPUs. The only user of cupy.

Buckets travel as bytes, so their dtype never matters; cupy is given addresses of torch's memory and one of its streams.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import contextmanager
from typing import Any

import torch

from streamrl.errors import ConfigError, EngineError, WeightsError
from streamrl.weights.gpu.cuda_memory import require_gpu

UNIQUE_ID_BYTES = 128


def require_nccl(device: str) -> None:
    """Refuse at start-up what could not work later.

    Raises:
        ConfigError: no GPU, no cupy, or a cupy without NCCL; says what to install.
    """
    require_gpu("nccl", "between GPUs", device)
    _nccl()


def _nccl() -> Any:
    try:
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise ConfigError(
            f"the transport nccl needs cupy, which cannot be imported here ({error}): pip install "
            "'streamrl[nccl]' (a driver of CUDA 12: 'streamrl[nccl-cu12]'), or take nccl off the list of transports"
        ) from error
    if not nccl.available:
        raise ConfigError(
            f"cupy {cupy.__version__} found no NCCL library: install nvidia-nccl-cu12 or nvidia-nccl-cu13 too, "
            "or take nccl off the list of transports"
        )
    return nccl


class CupyNccl:
    """Makes communicators whose rank here is one GPU.

    Args:
        device: the GPU of this process, "cuda" or "cuda:N".
    Raises:
        ConfigError: see `require_nccl`.
    """

    def __init__(self, device: str | torch.device) -> None:
        require_nccl(str(device))
        self._nccl = _nccl()
        self._cupy = importlib.import_module("cupy")
        self.device = torch.device("cuda", torch.device(device).index or 0)

    @property
    def version(self) -> int:
        """The version of the loaded NCCL library, e.g. 22809."""
        return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        """Names a new group; called by its rank 0."""
        return bytes(self._nccl.get_unique_id()).ljust(UNIQUE_ID_BYTES, b"\0")

    def connect(self, world: int, unique_id: bytes, rank: int) -> CupyCommunicator:
        """Blocks until all ranks have connected."""
        with torch.cuda.device(self.device), self._cupy.cuda.Device(self.device.index), named_errors():
            torch.cuda.current_stream().synchronize()  # makes torch's context the current one of this thread
            inner = self._nccl.NcclCommunicator(world, unique_id, rank)
        return CupyCommunicator(self._nccl, inner, self.device, world)


_NUMBERS = {6: "remote error", 7: "operation in progress", 8: "a timeout"}
"""Results of NCCL that cupy has no name for: it raises a KeyError of the number."""


@contextmanager
def named_errors() -> Iterator[None]:
    """Inside, an error of NCCL that cupy cannot name keeps its number."""
    try:
        yield
    except KeyError as error:
        number = error.args[0] if error.args else None
        if not isinstance(number, int):
            raise
        raise WeightsError(f"NCCL error {number} ({_NUMBERS.get(number, 'unknown to cupy')})") from error


class CupyCommunicator:
    """One rank of one group that never changes, on one GPU, with a stream of its own.

    Methods block; after any failure only `abort` may be called.
    """

    def __init__(self, nccl: Any, inner: Any, device: torch.device, world: int) -> None:
        self._nccl, self._inner, self._device, self._world = nccl, inner, device, world
        # Never the default stream: a broadcast that hangs there would hold up everything else of the process.
        self._stream = torch.cuda.Stream(device)
        self._aborted = False

    def test(self) -> None:
        """A one-element all-reduce; raises WeightsError unless it counts every rank."""
        with torch.cuda.device(self._device), named_errors():
            one = torch.ones(1, dtype=torch.int32, device=self._device)
            self._stream.wait_stream(torch.cuda.current_stream())
            address, nccl = one.data_ptr(), self._nccl
            self._inner.allReduce(address, address, 1, nccl.NCCL_INT32, nccl.NCCL_SUM, self._stream.cuda_stream)
            self._stream.synchronize()
            if (total := int(one)) != self._world:
                raise WeightsError(f"{total} ranks answered, the group has {self._world}")

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Copy rank 0's bytes (uint8, contiguous) into every rank's buffer; complete when this returns."""
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous() or buffer.device != self._device:
            raise WeightsError(f"a broadcast moves contiguous bytes on {self._device}, got {buffer.dtype} there: "
                               f"{buffer.device}")
        with torch.cuda.device(self._device), named_errors():
            # The buffer may still be written on the caller's stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            self._inner.bcast(buffer.data_ptr(), buffer.numel(), self._nccl.NCCL_UINT8, 0, self._stream.cuda_stream)
            self._stream.synchronize()
            # An abort ends the kernel that was waited for, then frees what would be asked.
            if self._aborted:
                raise WeightsError("the communicator was aborted")
            self._inner.check_async_error()

    def abort(self) -> None:
        """End whatever is in progress here; callable from any thread."""
        self._aborted = True  # before the abort: the call that it ends looks at this
        with torch.cuda.device(self._device), named_errors():
            self._inner.abort()


log = logging.getLogger(__name__)

ABORT_DEADLINE_S = 5.0
"""An abort that takes longer will not return."""


class CommunicatorError(WeightsError):
    """The communicator failed, was aborted, or was too slow; it must not be used again."""


class CommunicatorStuck(EngineError):
    """A call neither returns nor can be aborted: the process must be restarted."""


class CallingThread:
    """A thread that makes blocking calls, one after another, until one of them never returns."""

    def __init__(self, name: str) -> None:
        # None ends the thread.
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def begin(self, work: Callable[[], Any]) -> Future[Any]:
        call: Future[Any] = Future()
        self._calls.put((work, call))
        return call

    def request_exit(self) -> None:
        """Exit after the current call returns."""
        self._calls.put(None)

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            work, call = asked
            try:
                call.set_result(work())
            except BaseException as error:  # re-raised in the waiting thread
                call.set_exception(error)


class Threads:
    """The threads of a process that were abandoned inside a call."""

    def __init__(self) -> None:
        self._abandoned: list[threading.Thread] = []

    @property
    def num_abandoned(self) -> int:
        """Abandoned threads that are still inside their call."""
        return sum(thread.is_alive() for thread in self._abandoned)

    def abandon(self, thread: threading.Thread) -> None:
        self._abandoned.append(thread)


class GuardedCommunicator:
    """One communicator whose every call has a deadline. Call its methods from one thread, `stop` from any.

    Args:
        threads: shared by all communicators of the process.
        rank, world, unique_id: this rank's place in the group.
    """

    def __init__(
        self, library: CupyNccl, threads: Threads, *, rank: int, world: int, unique_id: bytes, what: str
    ) -> None:
        self._library, self._threads, self._what = library, threads, what
        self._rank, self._world, self._unique_id = rank, world, unique_id
        self._inner: CupyCommunicator | None = None
        self._stop: Future[None] = Future()  # waited for beside a call
        self._dead = False
        self._caller = CallingThread(what)

    def form(self, deadline_s: float) -> None:
        """Connect and test.

        Raises:
            CommunicatorError: not formed; a thread that still waits for the others is abandoned: nothing can end it.
        """
        deadline = time.monotonic() + deadline_s
        self._inner = self._call(
            lambda: self._library.connect(self._world, self._unique_id, self._rank), deadline_s, "connecting"
        )
        # The test shows that data passes between all ranks; it shares the deadline of connecting.
        self.test(max(0.0, deadline - time.monotonic()))

    def test(self, deadline_s: float) -> None:
        """Wait until every rank has come as far as this. Raises as `broadcast`."""
        assert self._inner is not None, "form comes first"
        self._call(self._inner.test, deadline_s, "its test")

    def broadcast(self, buffer: torch.Tensor, deadline_s: float) -> None:
        """Broadcast as `CupyCommunicator.broadcast` does, within `deadline_s`.

        Raises:
            CommunicatorError: it failed or was too slow; the communicator was aborted.
            CommunicatorStuck: the abort did not return either.
        """
        assert self._inner is not None, "form comes first"
        inner = self._inner
        self._call(lambda: inner.broadcast(buffer), deadline_s, "a broadcast")

    def stop(self) -> None:
        """Request an abort of the call in progress; the thread that waits for it carries it out. Returns at once."""
        with contextlib.suppress(InvalidStateError):  # stopped before
            self._stop.set_result(None)

    @property
    def stopped(self) -> bool:
        return self._stop.done()

    def close(self) -> None:
        """Leave the group by an abort: closing waits for the other ranks in some versions of NCCL."""
        self._caller.request_exit()
        if self._inner is not None and not self._dead:
            self._dead = True
            self._abort(self._inner)

    def _call(self, work: Callable[[], Any], deadline_s: float, what: str) -> Any:
        if self._dead or self.stopped:
            raise CommunicatorError(f"{self._what} is over")
        call = self._caller.begin(work)
        wait((call, self._stop), deadline_s, FIRST_COMPLETED)
        try:
            if call.done():
                return call.result()
            end = "was stopped" if self.stopped else f"was not done in {deadline_s:g} s"
            raise CommunicatorError(f"{self._what}: {what} {end}")
        except Exception as error:
            self._dead = True
            self._caller.request_exit()
            if self._inner is not None:
                self._abort(self._inner)
                # The abort lets the blocked call return; a thread that still does not is lost.
                wait((call,), ABORT_DEADLINE_S)
            if not call.done():
                self._threads.abandon(self._caller.thread)
                if self._inner is not None:
                    raise CommunicatorStuck(
                        f"{self._what}: {what} did not end {ABORT_DEADLINE_S:g} s after its abort: restart this process"
                    ) from error
            if isinstance(error, CommunicatorError):
                raise
            raise CommunicatorError(f"{self._what} failed: {error!r}") from error

    def _abort(self, inner: CupyCommunicator) -> None:
        # A thread of its own: the caller's is inside the call that is to be aborted.
        thread = CallingThread(f"{self._what}: its abort")
        call = thread.begin(inner.abort)
        thread.request_exit()
        wait((call,), ABORT_DEADLINE_S)
        if not call.done():
            self._threads.abandon(thread.thread)
            raise CommunicatorStuck(
                f"{self._what}: its abort was not done in {ABORT_DEADLINE_S:g} s: restart this process"
            )
        if (error := call.exception()) is not None:  # already destroyed, which is the goal
            log.info("%s: abort raised %r", self._what, error)
