"""The project uses the field's standard terms: words that have one, and American spelling."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

STANDARD_TERMS = {
    r"wedged": "hung",
    r"for ever": "forever, without limit",
    r"whoever": "the actor that, any process that",
    r"in vain": "without an answer",
    r"verdicts?": "accept result",
    r"lifelines?": "parent watch",
    r"rehears(al|als|e|ed|es)": "dry run",
    r"(?:one|three|half a|\d+) (?!in )[a-z]+ an? (?:step|row|token|line|rank|bucket|answer|version|name|figure)": "per",
    r"may not lose": "must not lose",
    r"also if": "even if",
    r"behaviours?|colours?|neighbours?|centred?|learnt|towards": "American spelling",
    r"\w*(normalis|regularis|summaris|initialis|optimis|minimis|maximis|tokenis|serialis|organis|recognis)\w*": "-ize",
}
"""Texts written more than once where the field says something else, and again after they had gone."""


def test_words_with_a_standard_term_are_not_used():
    # Identifiers are searched too, word by word: `test_wedged_actors` counts.
    words = {
        re.compile(rf"(?<![a-z])(?:{word.replace(' ', '[ _]')})(?![a-z])"): term
        for word, term in STANDARD_TERMS.items()
    }
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.yaml", "Makefile", ":!docs/results", ":!bench/results",
         ":!tests/oracles", ":!tests/contract/test_words.py"],  # the oracles hold names of other libraries
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
    )
    files = {name: (ROOT / name).read_text().lower() for name in listed.stdout.split() if (ROOT / name).is_file()}
    assert [
        f"{name}:{number}: {line.strip()[:100]} (write {term!r})"
        for name, text in files.items() for pattern, term in words.items() if pattern.search(text)
        for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)
    ] == []
