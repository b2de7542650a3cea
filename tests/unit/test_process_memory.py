"""Frozen objects, and freed memory that stays with the process."""

from __future__ import annotations

import gc
import os
import platform
import resource
import subprocess
import sys

import pytest

from streamrl.process_memory import uncollected


def test_what_was_made_inside_is_frozen_and_collection_resumes():
    gc.unfreeze()
    try:
        with uncollected():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= 1000
        assert not any(one is kept for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_an_error_inside_leaves_the_collector_on_and_one_that_was_off_stays_off():
    try:
        with pytest.raises(RuntimeError), uncollected():
            raise RuntimeError
        assert gc.isenabled()
        gc.disable()
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.timeout(120)
def test_an_actor_freezes_its_libraries():
    """Before it knows a hub: it fails at a key that does not exist, after its imports."""
    program = (
        "import gc, sys, actors.__main__ as actor\n"
        "sys.argv = ['actors', 'connect=tcp://127.0.0.1:9', 'actors.key=missing.toml']\n"
        "code = actor.main()\n"
        "print(code, gc.isenabled(), gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    code, enabled, frozen = done.stdout.split()[-3:]
    assert (code, enabled) == ("2", "True"), done.stderr[-2000:]
    assert int(frozen) > 100_000


FAULTS = """
import resource
import threading
from streamrl.process_memory import keep_freed_memory
was_set = {call}


def allocate(times):
    for _ in range(times):
        for size in (64, 12):
            block = b"x" * (size << 20)
            del block


allocate(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread = threading.Thread(target=allocate, args=(4,))
thread.start()
thread.join()
print(was_set, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(call: str, **environment: str) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(call=call)], capture_output=True, text=True, check=True,
        env=clean | environment,
    )
    was_set, count = done.stdout.split()
    return was_set, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left as they are")
@pytest.mark.timeout(120)
def test_freed_blocks_are_reused_without_page_faults_unless_the_user_has_set_the_allocator():
    pages = 4 * (76 << 20) // resource.getpagesize()
    assert page_faults("None")[1] > pages // 2  # what the C library does by itself
    was_set, count = page_faults("keep_freed_memory()")
    assert was_set == "True" and count < pages // 100
    assert page_faults("keep_freed_memory()", MALLOC_ARENA_MAX="4")[0] == "False"
    assert page_faults("keep_freed_memory()", GLIBC_TUNABLES="glibc.malloc.arena_max=4")[0] == "False"
