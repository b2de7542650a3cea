"""What is done with each command of the pages: the rules of commands.toml."""

from __future__ import annotations

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

    def fits(self, item: Item) -> bool:
        return self.page in item.page and re.search(self.match, item.text) is not None


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
