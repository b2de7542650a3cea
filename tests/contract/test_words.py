"""The project uses the field's standard terms: a list of words that have one, and where they must not stand."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STANDARD_TERMS = {
    r"wedged": "hung",
    r"wound by|keeps? winding": "extend the deadline",
    r"bury|buries|buried": "kill, reap",
    r"for ever": "forever, without limit",
    r"anew": "again, a new ...",
    r"household": "process group",
    r"keeps? house|housekeeping": "cleanup",
    r"veterans?": "survived a restart",
    r"whoever": "the actor that, any process that",
    r"nobody": "no actor, no process",
    r"farewell": "shutdown message",
    r"politely": "gracefully",
    r"gangs?": "process group",
    r"plants?": "actor runtime",
    r"knock(s|ed|ing)?": "retry, connect",
    r"breath(e|es|ed|ing)": "send a heartbeat",
    r"strangers?": "unregistered peer",
    r"without a word": "without a shutdown message",
    r"signs? of life": "heartbeat, message",
    r"in vain": "without an answer",
    r"not spoken": "unsupported",
    r"careless(ly)?": "with injected errors",
    r"school|taught": "warm start, trained",
    r"verdicts?": "accept result",
    r"lifelines?": "parent watch",
    r"rehears(al|als|e|ed|es)": "dry run",
    r"upkeep": "weight updater",
    r"rosters?": "membership",
    r"worn out": "exhausted",
    r"held up": "blocked",
    r"let(s|ting)? go": "cancel, release",
    r"the last word": "the final state",
    r"whole_batch|batch_facts": "plan_tensors",
    r"(?:one|three|half a|\d+) (?!in )[a-z]+ an? (?:step|row|token|line|rank|bucket|answer|version|name|figure)": "per",
    r"serves? on": "keep serving",
    r"mend(?:s|ed|ing)?": "fix",
    r"may not lose": "must not lose",
    r"also if": "even if",
    r"come to like": "become more likely",
    r"behaviours?|colours?|neighbours?|centred?|learnt|towards": "American spelling",
    r"\w+(normalis|regularis|summaris|initialis|optimis|minimis|maximis|tokenis|serialis|organis|recognis)\w*": "-ize",
}


@cache
def committed_files() -> dict[str, str]:
    """Name and text of every Python and Markdown file that git tracks, but for results and this list itself."""
    done = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.yaml", "Makefile", ":!docs/results", ":!bench/results",
         ":!tests/oracles"],  # names of other libraries
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
    )
    names = [name for name in done.stdout.split() if name != "tests/contract/test_words.py"]
    return {name: (ROOT / name).read_text() for name in names}


@pytest.mark.parametrize("word", STANDARD_TERMS)
def test_a_word_with_a_standard_term_is_not_used(word):
    # Identifiers are searched too, word by word: `keep_house` and `test_nobody_waits` count.
    pattern = re.compile(rf"(?<![A-Za-z])(?:{word.replace(' ', '[ _]')})(?![A-Za-z])", re.IGNORECASE)
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in committed_files().items() if pattern.search(text)  # no line of most files needs a look
        for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)
    ]
    assert not found, f"write {STANDARD_TERMS[word]!r} instead:\n" + "\n".join(found)
