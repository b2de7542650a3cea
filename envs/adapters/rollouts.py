"""`async def rollout(record, client)`: an interaction loop of the user's own, which generates with the client.

A plain function runs in a thread of its own for the whole episode, and its client waits for the engine there. It takes
no place of `env.num_threads`, where it would hold up other environments while it waits for the engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from envs.async_compat import is_async
from envs.data.shapes import RecordShape
from envs.reward_values import as_step
from streamrl.environment import ChatMessage, Generated, GenerationClient, Record, Step
from streamrl.errors import TaskError

T = TypeVar("T")
OVER = "this episode is over: a client serves the rollout that it was given to, until it returns"


class RolloutEnv:
    """One episode that a user's function plays.

    Args:
        function: the user's, with a parameter `client` and one for the record; plain or async.
        name: file and function, for messages.
        shape: reads the prompt of a record.
    """

    def __init__(self, function: Callable[..., Any], name: str, shape: RecordShape) -> None:
        self._function, self._name, self._shape = function, name, shape
        self._record_name = record_parameter(function, name)

    def reset(self, record: Record) -> Sequence[ChatMessage]:
        """The record's prompt, for which a tiny model is made; the loop itself decides what the model reads."""
        return self._shape.opening(record)

    async def rollout(self, record: Record, client: GenerationClient) -> Step:
        if is_async(self._function):
            value = await self._function(**{self._record_name: record, "client": client})
        else:
            blocking = BlockingClient(client)
            given = {self._record_name: record, "client": blocking}
            value = await in_own_thread(lambda: self._function(**given), blocking)
        return as_step(value, self._name)

    @property
    def close(self) -> Callable[[], Any]:
        """Call the one of the object whose method plays, if it has one."""
        return self._function.__self__.close  # type: ignore[attr-defined]


def record_parameter(function: Callable[..., Any], name: str) -> str:
    """The parameter that takes the record. Raises TaskError if there is not exactly one beside `client`."""
    needed = [
        p.name for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and p.name not in ("client", "self")
    ]
    if len(needed) != 1:
        raise TaskError(f"{name} must take the record and client, as in rollout(record, client); it takes {needed}.")
    return needed[0]


class BlockingClient:
    """A generation client for plain code in a thread: the same calls, which return when the answer is there."""

    def __init__(self, client: GenerationClient) -> None:
        self._client, self._loop = client, asyncio.get_running_loop()
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._closed = False
        self._lock = threading.Lock()  # a call is either canceled with the others or refused
        self.chat = _BlockingChat(self)

    def generate(self, prompt: Any, **options: Any) -> Generated:
        return self.result(self._client.generate(prompt, **options))

    def result(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on the actor's loop and return its result."""
        with self._lock:
            if self._closed:
                work.close()
                raise TaskError(OVER)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._waiting.add(future)
        try:
            return future.result()
        finally:
            self._waiting.discard(future)

    def cancel(self) -> None:
        """End what runs, which ends its sequences in the engine; later calls are refused."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting)
        for future in waiting:
            future.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _BlockingChat:
    def __init__(self, client: BlockingClient) -> None:
        self._client = client

    @property
    def completions(self) -> _BlockingChat:
        return self

    def create(self, **options: Any) -> Any:
        client = self._client
        return client.result(client._client.chat.completions.create(**options))


async def in_own_thread(call: Callable[[], T], client: BlockingClient) -> T:
    """Run the call in its own thread. If this is canceled, so are the client's calls; the thread ends by itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            # A future cannot carry these.
            special = isinstance(error, StopIteration) or not isinstance(error, Exception)
            done.set_exception(TaskError(f"the rollout raised {type(error).__name__}") if special else error)

    def work() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:  # the loop is closed, nothing waits for the result
            return

    threading.Thread(target=work, name="rollout", daemon=True).start()
    try:
        return await done
    finally:
        client.cancel()
