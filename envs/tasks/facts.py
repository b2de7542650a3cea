"""A small synthetic world of people, cities and rivers: documents to search, and questions that only they answer.

Names are made of random syllables, so no model knows the answers from its training.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

STARTS = ("Ba", "Ce", "Do", "Fi", "Gu", "Ha", "Jo", "Ka", "Lu", "Me", "No", "Pe", "Ra", "Si", "To", "Vu", "We", "Za")
MIDDLES = ("lo", "ri", "ma", "ne", "du", "ka", "vi", "so", "ti", "ge")
ENDS = {
    "person": ("n", "ra", "l", "sa"), "family": ("ck", "berg", "son", "vitz"),
    "city": ("burg", "stad", "wick", "polis"), "river": ("ne", "ro", "ss", "va"), "sea": ("n", "c", "r", "th"),
}  # fmt: skip
PEOPLE_OF_A_CITY, CITIES_OF_A_RIVER, RIVERS_OF_A_SEA = 5, 2, 3


@dataclass(frozen=True, slots=True)
class Question:
    """One question, its answer, and what to look for, in order, to find it: one search for each hop."""

    text: str
    answer: str
    searches: tuple[str, ...]


class World:
    """People live in cities, cities lie on rivers, rivers flow into seas; all of it follows from the seed.

    Args:
        num_people: a fifth as many cities, a tenth as many rivers, a thirtieth as many seas.
        seed: another seed is another world.
    """

    def __init__(self, num_people: int, seed: int) -> None:
        rng = random.Random(f"world {seed}")
        taken: set[str] = set()
        num_cities = -(-num_people // PEOPLE_OF_A_CITY)
        num_rivers = -(-num_cities // CITIES_OF_A_RIVER)
        num_seas = -(-num_rivers // RIVERS_OF_A_SEA)
        self.people = [f"{_name(rng, 'person', None)} {_name(rng, 'family', taken)}" for _ in range(num_people)]
        self._cities, self._rivers, self._seas = (
            [_name(rng, kind, taken) for _ in range(num)]
            for kind, num in (("city", num_cities), ("river", num_rivers), ("sea", num_seas))
        )
        self._city_of = _assigned(rng, num_people, num_cities)
        self._river_of = _assigned(rng, num_cities, num_rivers)
        self._sea_of = _assigned(rng, num_rivers, num_seas)

    def documents(self) -> list[str]:
        """One for each person, city and river: a title, and a sentence with its one fact."""
        people = [f"{one}\n{one} lives in the city {self._cities[c]}." for one, c in _pairs(self.people, self._city_of)]
        cities = [f"{one}\nThe city {one} lies on the river {self._rivers[r]}."
                  for one, r in _pairs(self._cities, self._river_of)]
        rivers = [f"{one}\nThe river {one} flows into the sea {self._seas[s]}."
                  for one, s in _pairs(self._rivers, self._sea_of)]
        return [*people, *cities, *rivers]

    def question(self, person: int, num_hops: int) -> Question:
        """About this person, from 1 hop (the city) to 3 (the sea)."""
        name, city = self.people[person], self._city_of[person]
        river = self._river_of[city]
        answers = (self._cities[city], self._rivers[river], self._seas[self._sea_of[river]])
        text = (
            f"In which city does {name} live?",
            f"On which river lies the city in which {name} lives?",
            f"Into which sea flows the river of the city in which {name} lives?",
        )[num_hops - 1]
        searches = (f"person {name}", f"city {answers[0]}", f"river {answers[1]}")[:num_hops]
        return Question(text, answers[num_hops - 1], searches)


def _name(rng: random.Random, kind: str, taken: set[str] | None) -> str:
    """A name; one that is not in `taken`, and is put there."""
    while True:
        middle = "".join(rng.choice(MIDDLES) for _ in range(rng.randint(1, 3)))
        name = rng.choice(STARTS) + middle + rng.choice(ENDS[kind])
        if taken is None or name not in taken:
            if taken is not None:
                taken.add(name)
            return name


def _assigned(rng: random.Random, num: int, num_places: int) -> list[int]:
    """A place for each of `num`; every place is used."""
    places = [number % num_places for number in range(num)]
    rng.shuffle(places)
    return places


def _pairs(names: Sequence[str], places: Sequence[int]) -> list[tuple[str, int]]:
    return list(zip(names, places, strict=True))
