"""docs/coming_from.md: our column names settings that exist, and typing their name suggests one of ours."""

import re
from pathlib import Path

import pytest

from learner.setup.preflight import check_losses
from streamrl.config.catalog import nearest_setting
from streamrl.config.load import load_config
from streamrl.config.overrides import check_names
from streamrl.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
SETTING = r"[a-z_]+(?:\.[a-z0-9_]+)*(?:=\S+)?"


def rows() -> list[tuple[list[str], list[str], str]]:
    """(their names, our settings, remark) of every row of the tables."""
    found = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 and "`" in cells[0]:
            ours, *remark = re.split(r": |, (?=and |or |on )| (?=with |of |in |for )", cells[1], maxsplit=1)
            found.append((re.findall(r"`([^`]+)`", cells[0]), re.findall(r"`([^`]+)`", ours), "".join(remark)))
    return found


def test_there_are_tables_for_eight_libraries():
    assert len(re.findall(r"^## ", PAGE, re.M)) == 8 and len(rows()) > 200


@pytest.mark.parametrize("command", re.findall(r"`((?:launch|sft|dpo|train-reward-model) [^`]+)`", PAGE))
def test_the_command_for_a_script_of_theirs_composes_and_its_loss_trains(command: str):
    _, *words = command.split()
    check_losses(load_config(words if "experiment=" in command else ["policy.model_path=somewhere", *words]))


def test_our_column_holds_settings_only():
    assert [ours for _, settings, _ in rows() for ours in settings if not re.fullmatch(SETTING, ours)] == []


def refused(ours: str) -> str:
    """Why a setting of our column is none, or does not take the value that it is shown with."""
    try:
        if "=" in ours:
            load_config(["policy.model_path=somewhere", ours])
        else:
            check_names([f"{ours}=0"])
    except ConfigError as error:
        return str(error)
    return ""


def test_every_setting_of_ours_exists_and_takes_its_value():
    ours = sorted({one for _, settings, _ in rows() for one in settings})
    assert {one: why for one in ours if (why := refused(one))} == {}


def test_the_settings_in_the_prose_and_the_remarks_exist():
    words = [word for span in re.findall(r"`([^`]+)`", PAGE) for word in span.split() if "." in word or "=" in word]
    ours = [word for word in words if re.match(r"(policy|rollout|loss|kl|advantage|staleness|algorithm)[.=]", word)]
    theirs = {name for names, _, _ in rows() for name in names}
    assert len(ours) > 40
    for word in set(ours) - theirs:
        check_names([word if "=" in word else f"{word}=0"])


def test_typing_their_name_suggests_one_of_ours():
    offenders = {}
    for names, settings, _ in rows():
        keys = {ours.partition("=")[0] for ours in settings}
        for name in names if settings else ():
            said = nearest_setting(name.lstrip("-"))
            suggestion = re.search(r"`(.+)`", said)
            if suggestion is None or suggestion[1] not in keys | {key.rpartition(".")[0] for key in keys}:
                offenders[name] = said
    assert offenders == {}
