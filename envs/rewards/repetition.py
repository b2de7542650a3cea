"""Does a text repeat itself?"""

from __future__ import annotations

import re
from collections import Counter

NGRAMS = range(8, 17)
MAX_NGRAM_REPEATS, MAX_SENTENCE_REPEATS, SENTENCE_WORDS = 6, 4, 8


def repeats_itself(text: str) -> bool:
    """An n-gram of 8 to 16 words occurs 6 times or more, or a sentence of more than 8 words 4 times or more."""
    words = text.split()
    for size in NGRAMS:
        grams = Counter(zip(*(words[start:] for start in range(size)), strict=False))
        if grams and max(grams.values()) >= MAX_NGRAM_REPEATS:
            return True
    sentences = Counter(part.strip() for part in re.split(r"[.!?\n]", text) if len(part.split()) > SENTENCE_WORDS)
    return bool(sentences) and max(sentences.values()) >= MAX_SENTENCE_REPEATS
