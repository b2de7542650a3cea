"""What is done with each command of the pages: the rules of commands.toml."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.docs.extract import Item

TABLE = Path(__file__).with_name("commands.toml")


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of commands.toml, which explains the fields."""

    match: str
    page: str = ""
    skip: str = ""
    append: str = ""
    terminal: str = ""
    timeout_s: float = 300
    learns: bool = False
    no_gain: str = ""

    def fits(self, item: Item) -> bool:
        return self.page in item.page and re.search(self.match, item.text) is not None


TRAINS = re.compile(r"^make quickstart$|^streamrl (launch|learner) |-m learner |\.train\(")
"""Commands and blocks of Python that train."""


def misses_its_gain(item: Item, rule: Rule) -> str:
    """What is wrong with the rule of a command: one that trains is run to a better score, or the rule says why not."""
    trains = TRAINS.search(item.text) is not None and not rule.skip
    if trains and rule.learns == bool(rule.no_gain):
        return f"{item.where}: `{item.text[:100]}` trains: its rule needs either learns or no_gain"
    return "" if trains or not rule.learns else f"{item.where}: `{item.text[:100]}` does not train"


def read_rules(path: Path = TABLE) -> list[Rule]:
    return [Rule(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["rule"]]


def rule_for(item: Item, rules: list[Rule]) -> Rule:
    """The first rule that fits. Raises LookupError: there is none."""
    for rule in rules:
        if rule.fits(item):
            return rule
    raise LookupError(f"{item.where}: `{item.text[:100]}` has no rule: say in tests/docs/commands.toml how it is run")


def full_text(item: Item, rule: Rule) -> str:
    """The command with what makes it short."""
    text = re.sub(r"\s+\.\.\.$", "", item.text)
    return f"{text} {rule.append}".strip()
