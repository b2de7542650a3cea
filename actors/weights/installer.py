"""Weight installer of an actor: fetch, verify, install between two forward passes, report.

    IDLE         the installed version generates, nothing newer is known
    FETCHING     a document is fetched and verified in a thread; running sequences go on with the old version
    VERIFIED     every digest matched; the document waits for its turn at the engine
    INSTALLING   the engine loads it between two forward passes
    ROLLBACK     loading failed halfway; the engine loads the previous document again

A newer announcement abandons a FETCHING one, but never two in a row: after an abandoned fetch the next one ends,
whatever is announced meanwhile, and the newest of that follows. From VERIFIED on a version is installed even if a newer
one is known. Otherwise a learner that publishes faster than this actor fetches would never update it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

from actors.engines.base import Engine, InstallTimes
from actors.weights.base_weights import HeldBase, install_version, verify_again
from actors.weights.probe import probe_engine
from actors.weights.watchdog import EngineHungError, patience, run_with_watchdog
from streamrl.errors import EngineError, WeightsError
from streamrl.messages import Base, Installed, InstallSource, Layout, Manifest, Offer, Probed, VersionRef
from streamrl.weights.document import Document, Superseded
from streamrl.weights.manifest import check_manifest, same_weights
from streamrl.weights.transport import FetchedVersion

log = logging.getLogger(__name__)

_ERROR_CHARS = 2000
_FETCH_GRACE_S = 10.0


class InstallState(Enum):
    IDLE = "idle"
    FETCHING = "fetching"
    VERIFIED = "verified"
    INSTALLING = "installing"
    ROLLBACK = "rollback"


class _Fetch:
    """One fetch in its thread; `cancelled` is polled by that thread, `over` awaited by the loop."""

    def __init__(self) -> None:
        self.cancelled, self.over = threading.Event(), asyncio.Event()

    def end(self) -> None:
        self.cancelled.set()
        self.over.set()


async def _at_once() -> None:
    """Nothing to wait for."""


class Installer:
    """Keeps one engine on the newest complete version.

    Args:
        fetch: `WeightSource.fetch` or anything with its signature.
        fetch_deadline_s: for one document, over all offers.
        install_deadline_s: an engine that makes no progress with an install or a score for so long is presumed hung.
        on_close: called by `close`, after which nothing is fetched any more.
    """

    def __init__(
        self, engine: Engine, fetch: Callable[..., FetchedVersion], *, fetch_deadline_s: float = 120.0,
        install_deadline_s: float = 120.0, on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._fetch, self._on_close = engine, fetch, on_close
        self._fetch_deadline_s, self._install_deadline_s = fetch_deadline_s, install_deadline_s
        # A pool of its own: rewards must not queue before weights. Two threads: an abandoned fetch ends a moment later.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="fetch")
        self.may_load: Callable[[], Awaitable[None]] = _at_once
        """Awaited before a fetched version is loaded; the worker sets it."""
        self._engine_turn = asyncio.Lock()  # install, probe or reload: a probe must not see the weights change
        self._fetching: _Fetch | None = None
        self._abandoned_one = False  # the last fetch was abandoned: the next one ends
        self._target: VersionRef | None = None
        self.document: Document | None = None  # the last one that the engine confirmed; kept for a rollback
        self._base: HeldBase | None = None
        self._released = False
        self._base_turn, self._closing = asyncio.Lock(), threading.Event()
        self._logged_unprobed = False
        self.state = InstallState.IDLE

    async def install(
        self, manifest: Manifest, offers: Sequence[Offer], layout: Layout, base: Base | None = None
    ) -> Installed | None:
        """Bring the engine to this version, an adapter of `base` if there is one; the report for the hub.

        Returns:
            `ok=True` when the version is live; `ok=False` with the reason when it is not, and the old version serves
            on; None when there is nothing to report, because the same or a newer version is being installed.
        Raises:
            EngineError: the engine hangs, or neither the new nor the previous document could be loaded: it must not
                generate, and this process should end.
        """
        if manifest.ref == self._target:
            return None  # the install under way reports; its engine may serve the version before this object knows
        installed = self._engine.installed
        if installed is not None and manifest.ref <= installed:
            # A hub that restarted announces the serving version again, perhaps with another parent, or with a probe.
            if self.document is not None and self.document.manifest.root == manifest.root:
                self.document.manifest = manifest
                return await self.check()
            return _report(manifest, error=f"version {manifest.ref} is not higher than {installed}, which serves here")
        if self._target is not None and manifest.ref < self._target:
            return None  # the install under way reports
        self._target = manifest.ref
        try:
            if base is not None:
                await self._fetch_base(base, manifest.ref)
            return await self._fetch_and_load(manifest, offers, layout)
        except Superseded:
            return None
        except WeightsError as error:
            old = self._engine.installed
            log.warning("version %s was not installed, %s keeps serving: %s", manifest.ref, old, error)
            return _report(manifest, error=str(error))
        finally:
            if self._target == manifest.ref:
                self._target = None
                self.state = InstallState.IDLE

    async def _fetch_and_load(self, manifest: Manifest, offers: Sequence[Offer], layout: Layout) -> Installed | None:
        fetched = await self._fetch_document(manifest, offers, layout)
        await self.may_load()
        async with self._engine_turn:
            installed = self._engine.installed
            if installed is not None and manifest.ref <= installed:
                return None  # a newer one was verified sooner
            first, wakes = self.document is None, self._released
            if wakes:
                self.document = None  # should it be damaged, the next install fetches it anew
                await verify_again(fetched, self._base)
            times = await self._load(fetched.document, manifest.ref)
            self.document, self._released = fetched.document, False
            # Comparing takes as long as loading: only versions that bring a probe are compared, or wake the engine.
            probed = await self._probe(fetched.document) if wakes or manifest.probe is not None else None
        log.log(  # the first says that this actor is ready; later ones are routine
            logging.INFO if first else logging.DEBUG, "installed version %s by %s, paused %.1f ms",
            manifest.ref, fetched.source.name, 1000 * times.pause_s,
        )
        return _report(manifest, fetched.source, fetched, times, probed=probed)

    async def release(self) -> None:
        """Have an engine that `GivesMemoryBack` do so, until the next install. EngineError: it hangs, or cannot."""
        async with self._engine_turn:
            work = self._engine.release()
            await run_with_watchdog(self._engine, work, silent_s=self._install_deadline_s, doing="give memory back")
            self._released = True

    async def _fetch_base(self, base: Base, ref: VersionRef) -> None:
        """Hold the weights that versions are adapters of; Superseded if a newer version came meanwhile."""
        async with self._base_turn:
            if self._base is None or not self._base.serves(base):
                fetched = await asyncio.get_running_loop().run_in_executor(self._threads, lambda: self._fetch(
                    base.manifest, base.offers, base.layout, cancelled=self._closing,
                    deadline_s=self._fetch_deadline_s,
                ))
                log.info("the base of %d MB came by %s", fetched.document.nbytes >> 20, fetched.source.name)
                self._base = HeldBase(fetched.document, base.scale)
        if self._target != ref:
            raise Superseded(f"version {ref}: a newer one came while the base was fetched")

    async def check(self, *, reload: bool = False) -> Installed | None:
        """Probe what serves, None if nothing; with `reload` load it again first. EngineError: it must not generate."""
        async with self._engine_turn:
            if (document := self.document) is None or self._released:
                return None
            if reload and self._base is not None:
                self._base.loaded = False
            times = await self._load(document, document.manifest.ref) if reload else None
            return _report(document.manifest, times=times, probed=await self._probe(document))

    async def _probe(self, document: Document) -> Probed | None:
        probed = await run_with_watchdog(
            self._engine, probe_engine(self._engine, document, self._base), silent_s=self._install_deadline_s,
            doing=f"score the probe of version {document.manifest.ref}",
        )
        if probed is None and document.manifest.probe is not None and not self._logged_unprobed:
            self._logged_unprobed = True
            log.info("the %s engine cannot score tokens: its weights are checked by digests only", self._engine.name)
        if probed is not None and probed.failed:
            log.error("version %s fails its probe: %s", document.manifest.ref, probed.failed)
        return probed

    async def _fetch_document(self, manifest: Manifest, offers: Sequence[Offer], layout: Layout) -> FetchedVersion:
        """The verified document; without a transfer when only the version number is new (a restarted learner)."""
        check_manifest(manifest, layout)
        if self.document is not None and same_weights(self.document.manifest, manifest):
            if self._fetching is not None:
                self._fetching.cancelled.set()  # of an older version, which is of no use any more
            return FetchedVersion(self.document.renamed(manifest), InstallSource.SAME, 0.0, 0.0)
        await self._wait_or_abandon(manifest.ref)
        this = self._fetching = _Fetch()
        self.state = InstallState.FETCHING
        try:
            fetched = await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: self._fetch(
                    manifest, offers, layout, cancelled=this.cancelled, deadline_s=self._fetch_deadline_s
                ),
            )
        except Superseded:
            raise
        except Exception:
            self._abandoned_one = False  # it ended by itself
            raise
        finally:
            this.end()
            if self._fetching is this:
                self._fetching = None
        self._abandoned_one = False
        self.state = InstallState.VERIFIED
        return fetched

    async def _wait_or_abandon(self, ref: VersionRef) -> None:
        """Abandon the running fetch for this version, or let it end; Superseded if a newer one came meanwhile."""
        running = self._fetching
        if running is None:
            return
        if not self._abandoned_one:
            self._abandoned_one = True
            running.cancelled.set()
            return
        try:
            await asyncio.wait_for(running.over.wait(), self._fetch_deadline_s + _FETCH_GRACE_S)
        except TimeoutError:
            log.error("the fetch before that of version %s hangs in its thread: it is left there", ref)
            running.end()  # for every waiting version: each has its own, later deadline
            if self._fetching is running:
                self._fetching = None
        if self._target != ref:
            raise Superseded(f"version {ref}: a newer one came while it waited for its turn")

    async def _load(self, document: Document, ref: VersionRef) -> InstallTimes:
        self.state = InstallState.INSTALLING
        try:
            return await self._engine_install(document, ref)
        except (WeightsError, EngineHungError, asyncio.CancelledError):
            raise  # by the protocol nothing was changed; and an engine that hangs would not load the old version either
        except Exception as error:  # a foreign library failed halfway: whatever it raised, the model is mixed now
            if isinstance(error, EngineError) and self._engine.stats().extra.get("dead"):
                raise  # nothing can be loaded into it any more
            await self._roll_back(error, ref)
            raise WeightsError(f"{self._engine.name} failed to load version {ref}: {error!r}") from error

    async def _roll_back(self, cause: Exception, ref: VersionRef) -> None:
        self.state = InstallState.ROLLBACK
        if self.document is None:
            log.error("the first version %s failed to load: %r", ref, cause)
            return  # nothing was ever installed, so nothing generates
        old = self.document.manifest.ref
        try:
            await self._engine_install(self.document, old)
        except Exception as error:
            raise EngineError(
                f"{self._engine.name} failed to load version {ref} ({cause!r}) and then to return to {old} "
                f"({error!r}): it holds a mixed model, restart this actor"
            ) from error
        log.warning("rolled back to version %s after %r", old, cause)

    async def _engine_install(self, document: Document, ref: VersionRef) -> InstallTimes:
        work = install_version(self._engine, document, ref, self._base)
        nbytes = document.nbytes + (self._base.document.nbytes if self._base is not None else 0)
        return await run_with_watchdog(
            self._engine, work, silent_s=patience(self._install_deadline_s, nbytes),
            doing=f"install version {ref}",
        )

    def close(self) -> None:
        """Abandon a running fetch; may be called twice."""
        self._closing.set()
        if self._fetching is not None:
            self._fetching.cancelled.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._on_close()


def _report(
    manifest: Manifest, source: InstallSource = InstallSource.SAME, fetched: FetchedVersion | None = None,
    times: InstallTimes | None = None, *, error: str = "", probed: Probed | None = None,
) -> Installed:
    return Installed(
        target=manifest.ref, root=manifest.root, ok=not error, source=source,
        transfer_s=fetched.transfer_s if fetched else 0.0, verify_s=fetched.verify_s if fetched else 0.0,
        pause_s=times.pause_s if times else 0.0, install_s=times.install_s if times else 0.0,
        nbytes=fetched.document.nbytes if fetched and source != InstallSource.SAME else 0,
        error=error[:_ERROR_CHARS], probe=probed,
    )
