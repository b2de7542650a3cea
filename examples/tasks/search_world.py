"""Questions about a small synthetic world of people, cities and rivers, answered by searching its documents.

Names are made of random syllables, so no model knows the answers from its training:

    streamrl launch experiment=search_questions env.path=examples/tasks/search_world.py policy.model_path=...
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from envs.tasks.search_questions import INSTRUCTION, NAME, STOP, SearchEnv, checked_results, information
from envs.tasks.strings import is_test
from envs.tools.search import Library
from streamrl.environment import ChatMessage, Env, Record, SingleTurnTask
from streamrl.errors import TaskError

STARTS = ("Ba", "Ce", "Do", "Fi", "Gu", "Ha", "Jo", "Ka", "Lu", "Me", "No", "Pe", "Ra", "Si", "To", "Vu", "We", "Za")
MIDDLES = ("lo", "ri", "ma", "ne", "du", "ka", "vi", "so", "ti", "ge")
ENDS = {
    "person": ("n", "ra", "l", "sa"), "family": ("ck", "berg", "son", "vitz"),
    "city": ("burg", "stad", "wick", "polis"), "river": ("ne", "ro", "ss", "va"), "sea": ("n", "c", "r", "th"),
}  # fmt: skip
PEOPLE_OF_A_CITY, CITIES_OF_A_RIVER, RIVERS_OF_A_SEA = 5, 2, 3
TEST_SHARE = 5
"""The test split gets one person in this many."""


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


class SearchQuestions(SingleTurnTask):
    """Questions about a synthetic world; `<search>` finds its documents, `<answer>` ends the episode.

    Reward and score are exact match of the answer, apart from case, articles and punctuation. Set env.max_turns to at
    least max_hops + 1.

    Args:
        num_people: in the world; as many questions for each number of hops.
        min_hops, max_hops: facts that a question needs, from 1 to 3.
        num_results: documents that a search finds.
        format_reward: added for an answer in its tags, right or wrong.
        instruction: stands before each question.
        num_train, num_test: records per split.
        seed: another seed is another world.
    """

    name, stop = NAME, STOP

    def __init__(
        self, *, num_people: int = 500, min_hops: int = 1, max_hops: int = 2, num_results: int = 3,
        format_reward: float = 0.0, instruction: str = INSTRUCTION, num_train: int = 1_000_000, num_test: int = 200,
        seed: int = 0,
    ) -> None:
        if not 20 <= num_people <= 20_000:
            raise TaskError(f"num_people={num_people} must lie between 20 and 20000.")
        if not 1 <= min_hops <= max_hops <= 3:
            raise TaskError(f"1 <= min_hops <= max_hops <= 3 must hold, got {min_hops} and {max_hops}.")
        self.num_train, self.num_test, self._seed = num_train, num_test, seed
        self._world, self._hops, self._instruction = World(num_people, seed), (min_hops, max_hops), instruction
        self._library = Library(self._world.documents, checked_results(num_results))
        self._format_reward = format_reward

    def record(self, split: str, index: int) -> Record:
        rng = random.Random(f"{self._seed}/{split}/{index}")
        while True:
            person, num_hops = rng.randrange(len(self._world.people)), rng.randint(*self._hops)
            # A person's questions of every number of hops are on the same side: they share facts.
            if is_test(self._world.people[person], TEST_SHARE) == (split != "train"):
                question = self._world.question(person, num_hops)
                return {"question": question.text, "answer": question.answer, "person": person, "hops": num_hops}

    def env(self) -> Env:
        return SearchEnv(
            lambda record: [ChatMessage("user", self._instruction + record["question"])],
            lambda record: [record["answer"]], self._library, self._format_reward,
        )

    def target(self, record: Record) -> str:
        """The answer itself: who knows it need not search."""
        return f"<answer>{record['answer']}</answer>"

    def target_turns(self, record: Record) -> Sequence[str]:
        """Return a perfect episode: a search for each hop, what it finds, and the answer."""
        turns: list[str] = []
        for words in self._world.question(record["person"], record["hops"]).searches:
            turns += [f"<search>{words}</search>", information(self._library.best(words))]
        return [*turns, self.target(record)]
