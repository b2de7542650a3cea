"""python -m streamrl.supervise.torchrun WORDS: torchrun with these words, for a launcher that may be killed meanwhile.

Its import takes seconds, in which there are no ranks yet that would watch the launcher: until then this process ends by
itself. Afterwards it must outlive the launcher, because the ranks, which end in order, meet at its store.
"""

from __future__ import annotations

from streamrl import parent_watch


def main() -> None:
    """Import torchrun, hand the pipe on to the ranks, and become it."""
    parent_watch.end_with_parent()
    from torch.distributed.run import main as torchrun

    parent_watch.renew()
    parent_watch.watch(lambda: None)
    torchrun()


if __name__ == "__main__":
    main()
