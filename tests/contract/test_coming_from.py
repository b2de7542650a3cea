"""docs/coming_from.md: our column names settings that exist, and typing their name suggests one of ours."""

import re
from pathlib import Path

import pytest

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


def test_there_are_tables_for_seven_libraries():
    assert len(re.findall(r"^## ", PAGE, re.M)) == 7 and len(rows()) > 200


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


WITHOUT = """
no_stop_trim use_liger_kernel tokenizer_name virtual_pipeline_model_parallel_size use_distributed_optimizer start_wd
end_wd wd_incr_style init_lr recompute_method recompute_num_layers exploration_weight grid_size
enable_mixed_precision enable_cpu_offload memory_threshold gc_threshold profile_interval adaptation_factor log_models
log_artifacts log_system_metrics auto_log model_registry_uri repetition_penalty normalize_rewards length_max gamma_min
gamma_max min_top_p max_top_p explore_eps_max explore_percentage random_start_steps load_in_4bit reward_transform_fn
cost_per_tool_call tool_call_success_bonus tool_call_error_penalty sample_file_format metrics_aggregation_config
use_infer_server infer_cohost_mode enable_memory_saver enable_custom_logit_processor api_key default_timeout
retry_attempts retry_delay offload_param ray_dir master_address master_port enable_profiling dynamic_batching
skip_threshold enable_sequence_parallelism sequence_parallelism_mode include_stop_str_in_output lora.dropout
""".split()
"""Options of RL2, its fork, rl4llm and ColossalAI that have no counterpart."""


def test_a_name_without_a_counterpart_suggests_nothing():
    said = {name: nearest_setting(name) for name in WITHOUT}
    assert {name: text for name, text in said.items() if text != "see `streamrl settings` for every key."} == {}


@pytest.mark.parametrize(("name", "says"), [
    ("pp_size", "learner.mesh"), ("tf_config.expert_model_parallel_size", "learner.mesh"), ("zero-stage", "FSDP2"),
    ("logging.log_level", "STREAMRL_LOG"), ("min_batch_size", "max_tokens_per_device"), ("local_rank", "torchrun"),
])
def test_a_name_whose_thing_is_done_otherwise_is_told_how(name, says):
    assert says in nearest_setting(name)
