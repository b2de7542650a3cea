"""Whether the Hugging Face hub answers: its libraries repeat their requests for half a minute before they give up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT_S = 5.0


def hub_answers() -> bool:
    """Whether the hub gives any answer within LIMIT_S; it is not asked where HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    session, answers = get_session(), queue.SimpleQueue[bool]()

    def ask() -> None:
        try:
            session.head(constants.ENDPOINT, timeout=LIMIT_S)
            answers.put(True)
        except Exception:  # of the HTTP library, the name service, or a proxy: it cannot be reached
            answers.put(False)

    threading.Thread(target=ask, name="hub-answers", daemon=True).start()  # a name service may block for longer
    try:
        return answers.get(timeout=LIMIT_S)
    except queue.Empty:
        return False


@contextmanager
def from_the_cache() -> Iterator[None]:
    """Inside, the hub's libraries look into their cache alone."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
