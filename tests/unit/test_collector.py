"""Objects allocated inside are frozen, and collection resumes afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from streamrl.collector import uncollected


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
