"""A relay, which fetches each version once from the learner and serves it to any number of actors.

    learner hub --ANNOUNCE--> relay            every actor stays linked to the hub itself: leases, groups, acks and
        ^                      |  ^            announcements never pass through here, so nothing about delivery depends
        '------ PULL, once ----'  '-- PULL --  on this process. An actor that gets no answer pulls from the hub.

To the hub it is an actor without leases; the token that actors show is the hub's own, so only they are served.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import zmq

from streamrl.config.addresses import is_address, is_loopback
from streamrl.errors import ConfigError, WeightsError
from streamrl.messages import Announce, Base, Layout, Limits, Manifest, Offer, Welcome
from streamrl.messages.printable import start_log
from streamrl.transport.authentication import serve_with
from streamrl.transport.client import HubClient
from streamrl.transport.keys import ActorKey, read_actor_key, with_key
from streamrl.transport.session import ActorSession, LinkClosed
from streamrl.transport.sockets import bind, bound_endpoint, hub_router
from streamrl.version import __version__
from streamrl.weights.adapter import BASE_REF
from streamrl.weights.document import Document
from streamrl.weights.manifest import same_weights
from streamrl.weights.pull.chunk_server import MAX_PULL_BYTES, ChunkSocket
from streamrl.weights.pull.relay_chunks import InFlightVersions, RelayChunks
from streamrl.weights.transport import WeightSource

log = logging.getLogger("streamrl.weights.pull.relay")

FETCH_DEADLINE_S = 600.0
EXIT_WRONG_RUN = 6


class Relay:
    """One session with the hub at `learner`, one weight socket at `address` (port 0: any free). Raises ConfigError.

    With a `key` both are encrypted: actors find its public half in `endpoint`.
    """

    def __init__(self, learner: str, address: str, key: ActorKey | None = None) -> None:
        self.learner, self._key = learner, key
        self._context = zmq.Context()
        router = hub_router(self._context, max_message_bytes=MAX_PULL_BYTES, receive_hwm=1024)
        if key is not None:
            serve_with(router, key.pair)
        bind(router, address, "--bind")
        bound = bound_endpoint(router)
        self.endpoint = bound if key is None else with_key(bound, key.pair.public)
        self.socket = ChunkSocket(router)
        self.source = WeightSource(self._context, key=key)
        self._in_flight = InFlightVersions(lambda: self.source.puller)
        self._name = f"{key.name + '-' if key else ''}relay-{os.urandom(4).hex()}"
        self._client: HubClient | None = None
        self._chunks = self._empty_chunks(b"", Limits())
        self._assets: tuple[bytes, bytes] | None = None  # digest, bytes
        self._welcome: Welcome | None = None
        self._newest: tuple[Manifest, tuple[Offer, ...]] | None = None
        self._document: Document | None = None
        self._base: Document | None = None
        self._news = asyncio.Event()
        self._leaving = False
        self._cancelled = threading.Event()
        # One thread: fetches follow each other, so two versions never share the link.
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fetch")

    async def run(self) -> int:
        """Serve until the run is over (0) or `leave`; a new run at the same address is joined."""
        self.socket.start()
        fetcher = asyncio.ensure_future(self._fetch_versions())
        try:
            while True:
                closed = await self._run_session()
                log.info("session closed: %s", closed.detail)
                if closed.exit_code != EXIT_WRONG_RUN or self._leaving:
                    return closed.exit_code
                self._forget_the_run()
        finally:
            # Order matters: the fetch is cancelled before its thread is joined, the context goes last.
            self._cancelled.set()
            fetcher.cancel()
            self._threads.shutdown(wait=True, cancel_futures=True)
            self.socket.close()
            self._context.destroy(linger=0)

    def leave(self, reason: str) -> None:
        """Graceful shutdown on SIGINT or SIGTERM; a second call ends the session at once."""
        if self._client is None:
            return
        if self._leaving:
            self._client.events.put_nowait(LinkClosed(130, "interrupted twice"))
            return
        self._leaving = True
        log.info("leaving (%s): actors pull from the learner", reason)
        self._client.drain(reason, 1.0)

    async def _run_session(self) -> LinkClosed:
        """One incarnation, from HELLO to its end."""
        # max_leases=0: to the hub an actor that never gets work, only announcements.
        session = ActorSession(
            self._name, int.from_bytes(os.urandom(7), "little") + 1, engine="relay", max_leases=0,
            transports=tuple(self.source.factories), software=f"streamrl {__version__}", random_seed=os.getpid(),
        )
        client = self._client = HubClient(self.learner, session, self._key)
        client.start()
        try:
            while True:
                event = await client.events.get()
                if isinstance(event, LinkClosed):
                    return event
                self._received(event.event)
        finally:
            client.close()

    def _received(self, event: object) -> None:
        match event:
            case Welcome() as welcome:
                log.info("joined run %s at %s, version %s", welcome.run_id, self.learner, welcome.version)
                self._welcomed(welcome)
            case Announce() as announce:
                self._newest = (announce.manifest, announce.offers)
                self._in_flight.add(announce.manifest.ref)
                self._news.set()

    def _welcomed(self, welcome: Welcome) -> None:
        self.source.pull_token, self.source.limits = welcome.pull_token, welcome.limits
        self._welcome = welcome
        # A WELCOME may come from a restarted hub with another token: the old one must not be served any longer.
        self._chunks = self._empty_chunks(welcome.pull_token, welcome.limits)
        if welcome.manifest is not None:
            self._newest = (welcome.manifest, welcome.offers)
        self._news.set()

    def _empty_chunks(self, pull_token: bytes, limits: Limits) -> RelayChunks:
        chunks = RelayChunks(pull_token, limits, in_flight=self._in_flight)
        self.socket.serve(chunks)
        return chunks

    def _forget_the_run(self) -> None:
        self._document = self._base = self._newest = self._assets = self._welcome = None
        self._chunks = self._empty_chunks(b"", Limits())

    # --- fetching ---------------------------------------------------------------------------------------------------

    async def _fetch_versions(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            self.source.puller = None
            self._in_flight.begin(BASE_REF, *([self._newest[0].ref] if self._newest is not None else []))
            try:
                await self._fetch_news()
            except Exception as error:  # whatever it is: while a fetch seems to go on, actors wait for it
                # The hub announces again to an actor that lags; until then actors are sent to it.
                log.warning("%s", error if isinstance(error, WeightsError) else f"a fetch failed: {error!r}")
                self._in_flight.end(failed=True)
            else:
                self._in_flight.end(failed=False)

    async def _fetch_news(self) -> None:
        loop, chunks, welcome = asyncio.get_running_loop(), self._chunks, self._welcome
        if welcome is None:
            return
        # The model's files first: an actor that starts needs them before any version.
        assets = await loop.run_in_executor(self._threads, self._fetch_assets, welcome)
        with self.socket.lock:
            chunks.put_assets(assets)
        if self._newest is None or self._welcome is None or self._welcome.layout is None:
            return
        if self._welcome.base is not None:
            await self._fetch_base(self._welcome.base, chunks)
        manifest, offers, layout = *self._newest, self._welcome.layout
        # The newest may be here already: a WELCOME or a repeated announcement names it again.
        if chunks.newest is not None and manifest.ref <= chunks.newest:
            return
        held = self._document
        # A restarted learner announces the same weights under its new epoch: renamed, not fetched again.
        if held is not None and same_weights(held.manifest, manifest):
            document = held.renamed(manifest)
        else:
            document = await self._fetch(manifest, offers, layout)
        self._document = document
        with self.socket.lock:  # if a new hub was joined meanwhile, its WELCOME is next and renames this document
            chunks.add_bytes(manifest, document.view(0, document.nbytes), layout)

    async def _fetch_base(self, base: Base, chunks: RelayChunks) -> None:
        """Fetch the base that every version of this run is an adapter of: once, for as long as the run has it."""
        if self._base is None or not same_weights(self._base.manifest, base.manifest):
            self._base = await self._fetch(base.manifest, base.offers, base.layout)
        document = self._base
        with self.socket.lock:
            chunks.add_base_bytes(base.manifest, document.view(0, document.nbytes), base.layout)

    async def _fetch(self, manifest: Manifest, offers: Sequence[Offer], layout: Layout) -> Document:
        fetched = await asyncio.get_running_loop().run_in_executor(self._threads, lambda: self.source.fetch(
            manifest, offers, layout, cancelled=self._cancelled, deadline_s=FETCH_DEADLINE_S
        ))
        log.info("version %s came over %s in %.0f ms", manifest.ref, fetched.source.name, 1000 * fetched.transfer_s)
        return fetched.document

    def _fetch_assets(self, welcome: Welcome) -> bytes:
        # Kept by digest, so a hub that restarts does not have to send them again.
        if self._assets is not None and self._assets[0] == welcome.assets_digest:
            return self._assets[1]
        nbytes, digest = welcome.assets_nbytes, welcome.assets_digest
        data = self.source.fetch_assets(welcome.offers, nbytes, digest, cancelled=self._cancelled)
        self._assets = (digest, data)
        return data


USAGE = """streamrl relay --learner tcp://HOST:PORT [--bind tcp://127.0.0.1:PORT] [--key FILE]

Pulls every version of the weights once from the learner and serves it to any number of actors, so that the learner
sends it once and not once an actor. Start it where the actors are; start them with

  streamrl actor connect=tcp://HOST:PORT actors.relay=tcp://127.0.0.1:PORT

They stay connected to the learner and pull from it whenever the relay does not answer; stop the relay at any time.

  --learner   the address that actors connect to (the hub)
  --bind      where to listen on this machine, tcp://127.0.0.1:0 if not given: a free port. An address that other
              machines reach needs --key.
  --key       file of a key (`streamrl keys add`), where the learner asks for keys; actors then come encrypted, to the
              address with the public key that this command prints
"""


def relay(words: list[str]) -> int:
    """`streamrl relay` until the run is over or a signal comes; the exit status. Raises ConfigError."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    learner, address, key_file = read_words(words)
    key = read_actor_key(key_file) if key_file else None
    start_log("relay", level="INFO", force=True)
    return asyncio.run(_run(Relay(learner, address, key), learner))


async def _run(running: Relay, learner: str) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.leave, signal.Signals(number).name)
    endpoint = running.endpoint
    print(f"relay for {learner} listens at {endpoint}: start actors with  actors.relay={endpoint}", flush=True)
    return await running.run()


def read_words(words: list[str]) -> tuple[str, str, str]:
    """(learner, address to bind, file of a key) from `--learner X` or `--learner=X`; ConfigError names a wrong word."""
    def wrong(message: str) -> ConfigError:
        return ConfigError(f"{message}\n\n{USAGE}")

    given = {"--learner": "", "--bind": "tcp://127.0.0.1:0", "--key": ""}
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while rest:
        name = rest.pop(0)
        if name not in given:
            raise wrong(f"relay knows no option {name!r}")
        if not rest:
            raise wrong(f"{name} needs a value after it")
        given[name] = rest.pop(0)
    for name in ("--learner", "--bind"):
        value = given[name]
        if not is_address(value):
            raise wrong(f"{name}={value or 'nothing'} is not a valid address: give {name} tcp://HOST:PORT")
    if not is_loopback(given["--bind"]) and not given["--key"]:
        raise wrong(
            f"--bind={given['--bind']} is open to the network, where every PULL would show the run's token: give --key "
            "FILE (from `streamrl keys add`), or bind 127.0.0.1"
        )
    return given["--learner"], given["--bind"], given["--key"]
