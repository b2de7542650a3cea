"""The tests that `make test` leaves to `make test-all`, each with the reason; `python -m tests.slow` names their files.

By file below `tests/`: the whole file, or some of its tests, or a case of one. What is not listed is in `make test`:
tests of every package and every algorithm, and runs of real processes of each kind
(`tests/contract/test_slow_tests.py`). A test of more than eight seconds belongs here, unless nothing else in `make
test` shows the like.
"""

SLOW: dict[str, str | dict[str, str]] = {
    "chaos/test_chaos.py": {
        "test_no_guarantee_breaks_under_faults_of_every_sort": "eight seconds of faults, and a learner",
        "test_the_checker_notices_what_is_missing": "three runs with faults",
    },
    "chaos/test_fuzz.py": {
        "test_mutated_frames_of_all_directions_are_refused_or_accepted_and_never_crash": "45 seconds of fuzzing",
        "test_a_hub_answers_an_honest_actor_whatever_comes_to_its_ports": "15 seconds of fuzzing",
    },
    "conform/test_conform.py": {
        "test_a_fault_fails_under_the_name_of_its_requirement": "waits of many faulty actors",
        "test_a_foreign_actor_without_our_code_passes_as_a_process": "waits for every requirement",
    },
    "contract/test_failed_again.py": {
        "test_what_passes_alone_is_named_and_what_fails_again_fails": "pytest starts three times",
        "test_a_file_that_cannot_be_read_takes_no_second_chance_from_others": "pytest starts twice",
    },
    "contract/test_site.py": dict.fromkeys((
        "test_the_site_builds_without_a_broken_link",
        "test_the_pages_that_are_made_from_the_code_are_in_the_site_and_not_in_git",
        "test_the_site_has_a_search_index_over_its_pages",
        "test_links_lead_to_files_so_that_the_pages_can_be_opened_without_a_server",
        "test_no_page_loads_anything_from_another_host",
    ), "builds the whole site"),
    "docs/test_examples.py": {
        "test_an_example_is_complete[8_preferences]": "its data take ten seconds; the others are in `make test`",
    },
    "docs/test_notebook.py": {
        "test_every_cell_runs": "a run of two steps in a notebook",
        "test_ten_lines_with_a_function_and_a_list_train": "a run of 62 steps in a notebook",
    },
    "flow/test_adaptive_staleness.py": "five launched runs; unit/learner/test_staleness_control.py has the control",
    "flow/test_agents.py": "six launched runs; unit/actors/test_agents.py and test_agent_forms.py have the sessions",
    "flow/test_api.py": "two launched runs; test_python_training.py is in `make test`",
    "flow/test_critic.py": "two launched runs; unit/learner has the critic",
    "flow/test_damaged_runs.py": "a launched run, and ten readers at every damage of its files",
    "flow/test_diagnosis.py": "a run of 32 steps that are slow on purpose",
    "flow/test_elastic_actors.py": "a run that waits for actors to come and go",
    "flow/test_equal_rewards.py": "two launched runs",
    "flow/test_failing_rewards.py": "three launched runs, one with a reward that hangs",
    "flow/test_fork_server.py": "forks of a program; every flow test starts its processes so",
    "flow/test_full_disk.py": "a launched run on a disk that is full for six seconds, and resumed",
    "flow/test_hostile_policy.py": "three launched runs",
    "flow/test_hub_death.py": {
        "test_a_killed_hub_is_treated_like_a_killed_learner_under_launch": "a launched run, restarted",
    },
    "flow/test_killed_launcher.py": "eight launched runs, killed at moments of their start",
    "flow/test_kl_runs.py": "three launched runs of two ranks",
    "flow/test_launch.py": {
        "test_a_dead_actor_is_restarted": "a run of 150 steps",
        "test_ctrl_c_at_any_moment_leaves_nothing_behind_and_says_how_to_resume[at start]":
            "a launched run; another moment is in `make test`",
        "test_ctrl_c_at_any_moment_leaves_nothing_behind_and_says_how_to_resume[while actors load]":
            "a launched run; another moment is in `make test`",
    },
    "flow/test_log_commands.py": "two launched runs, and seven commands for each",
    "flow/test_lora_commands.py": "a launched run, and ten commands that load its model",
    "flow/test_lora_runs.py": "a run that learns in 14 steps of large batches, and a resumed one",
    "flow/test_lost_ranks.py": "a launched run of two ranks, restarted twice",
    "flow/test_lying_actors.py": "five runs of 60 steps with three actors each",
    "flow/test_own_algorithm.py": {
        "test_the_example_trains": "a launched run",
    },
    "flow/test_preferences_example.py": "two minutes: SFT, a reward model, a launched run and DPO",
    "flow/test_presets_of_others.py": "thirteen runs; contract/test_coming_from.py composes the commands",
    "flow/test_python_training.py": {
        "test_an_exception_in_a_callback_stops_the_run_and_reaches_the_caller": "a launched run",
    },
    "flow/test_ranks_and_sweeps.py": "a run of two ranks, one on two machines, and four jobs of a sweep",
    "flow/test_relay.py": "runs through relays; unit/weights/test_relay.py has the relay",
    "flow/test_resume.py": {
        "test_a_killed_learner_resumes_and_its_actors_reconnect_by_themselves": "36 slow steps",
        "test_a_learner_told_to_stop_saves_first_and_its_successor_repeats_nothing": "30 slow steps",
        "test_a_second_learner_on_a_living_run_is_refused": "two learners; unit/learner/test_checkpoint has the lock",
        "test_an_actor_that_outlived_its_learner_joins_another_run_at_the_same_address": "two runs, one learner killed",
    },
    "flow/test_mesh_runs.py": "launched runs of four ranks, resumed twice; unit/learner/test_mesh.py has the layouts",
    "flow/test_openenv.py": "a launched run beside a server; unit/envs/adapters/test_openenv.py has our side",
    "flow/test_search.py": "three launched runs",
    "flow/test_supervised.py": {
        "test_a_stopped_and_a_killed_run_go_on_to_the_same_bits": "five runs one after the other",
        "test_two_ranks_train_what_one_does": "two runs, one of two ranks; unit/learner/test_two_ranks.py has ranks",
    },
    "flow/test_turns.py": {
        "test_a_process_killed_in_any_state_costs_nothing": "three launched runs in which five processes are killed",
    },
    "flow/test_two_launches.py": "a launched run, and commands beside it",
    "flow/test_verbs.py": "a launched run that is scaled, drained, stopped and resumed",
    "flow/test_verifiers.py": "a launched run, and evaluations of it; unit/actors/test_verifiers.py has our side",
    "flow/test_verify.py": "a launched run, its bundle edited in a dozen ways, and batches of it trained again",
    "flow/test_vllm_actors.py": "runs with real vLLM engines, which start three times each",
    "gpu/test_vllm.py": "a real vLLM engine starts; unit/engines/test_vllm_engine.py has the same on a CPU",
    "package/test_distributions.py": "builds both distributions, and installs one",
    "slurm/test_jobs.py": {
        "test_a_submitted_run_is_trained_by_both_jobs_to_its_end": "a whole run in two jobs",
    },
    "unit/actors/test_evaluate.py": {
        "test_versions_of_a_run_talk_differently_and_are_evaluated": "five commands, each of which loads a model",
        "test_the_commands_run_from_any_folder": "three commands, each of which loads a model",
    },
    "unit/actors/test_reward_model.py": {
        "test_an_actor_scores_with_a_process_that_is_replaced_when_it_dies_and_ends_with_the_task":
            "a process with a reward model, killed and started again",
    },
    "unit/actors/test_serve.py": {
        "test_a_version_of_a_run_is_served_in_every_form_under_its_key": "a run, and a process that serves it",
    },
    "unit/actors/test_tools_with_a_chat_model.py": "a real model generates on a CPU",
    "unit/architectures/test_architectures.py": {
        "test_the_other_families_do_what_the_page_says_too": "one family of each kind is in `make test`",
    },
    "unit/bench/test_agents.py": "120 trajectories of agents that die; flow/test_agents.py has agents, too",
    "unit/bench/test_commands.py": "imports every benchmark",
    "unit/bench/test_gpu_dry_run.py": {
        "test_every_section_does_its_work_with_small_shapes_on_a_cpu": "every GPU benchmark",
    },
    "unit/bench/test_interrupts.py": "300 killed processes",
    "unit/bench/test_simulate.py": "two simulated hours of a run",
    "unit/bench/test_staleness_experiment.py": "every arm of an experiment, trained",
    "unit/bench/test_staleness_real.py": "settings of every arm of an experiment",
    "unit/engines/test_vllm_adapters.py": dict.fromkeys((
        "test_running_sequences_switch_to_the_new_adapter_and_a_killed_core_comes_back_with_it",
        "test_with_finish_running_sequences_keep_their_adapter_while_others_use_the_new_one",
    ), "vLLM starts once more"),
    "unit/engines/test_vllm_engine.py": dict.fromkeys((
        "test_a_load_that_cannot_be_undone_costs_the_running_sequences_and_a_core_but_not_the_old_version",
        "test_a_killed_core_fails_its_sequences_and_its_successor_serves_the_former_version_first",
        "test_a_core_that_dies_while_it_scores_has_a_successor_that_is_asked_again",
        "test_a_core_that_dies_while_an_install_waits_for_it_is_replaced_and_the_old_version_serves",
        "test_closing_ends_those_who_wait_and_leaves_no_process_and_no_folder",
    ), "vLLM starts once more"),
    "unit/engines/test_vllm_sleep.py": dict.fromkeys((
        "test_a_step_that_fails_ends_the_engine_with_the_cause",
        "test_a_core_that_is_killed_in_its_sleep_ends_the_engine_when_it_is_to_wake",
        "test_with_adapters_the_base_is_kept_on_the_host_and_wakes_without_another_start",
    ), "vLLM starts once more"),
    "unit/engines/test_vllm_models.py": {
        "test_every_version_of_a_tied_mixture_is_served_as_the_learner_computes_it": "vLLM starts with a mixture",
        "test_each_rank_takes_its_part_of_every_version": "vLLM starts with two ranks",
    },
    "unit/envs/test_hostile_answers.py": {
        "test_no_data_set_runs_an_answer_stalls_on_it_or_pays_for_it": "every hostile answer to every data set",
        "test_no_reward_stalls_on_an_answer_in_any_form": "the form that each reward reads first is in `make test`",
        **dict.fromkeys((
            "test_no_reward_runs_an_answer_stalls_on_it_or_pays_for_it[math]",
            "test_no_reward_runs_an_answer_stalls_on_it_or_pays_for_it[think_answer_tags]",
        ), "workers are replaced at every stall; [boxed] asks the same workers in `make test`"),
    },
    "unit/hub/context/test_broadcaster_process.py": {
        "test_a_broadcaster_process_that_is_stopped_is_ended_and_its_successor_is_offered":
            "a process that stands still until its deadline; flow/test_device_transports.py replaces one, too",
    },
    "unit/hub/ledger/test_lag_bound.py": {
        "test_no_trained_token_is_older_than_the_bound_on_many_walks": "fewer walks are in `make test`",
        **dict.fromkeys((
            f"test_moving_the_lead_throws_nothing_away_and_keeps_every_group_inside_the_bound_of_its_grant[{case}-20]"
            for case in ("drop-2-1", "reweight-2-1", "wait-0-1", "drop-2-3")
        ), "fewer walks are in `make test`"),
    },
    "unit/hub/ledger/test_ledger_machine.py": {
        "test_every_promise_holds_on_long_random_walks_that_reach_every_kind_of_trouble[many]":
            "400 walks; 60 are in `make test`",
        "test_every_promise_holds_under_any_schedule_and_batches_come_when_everybody_behaves[many]":
            "100 schedules; 40 are in `make test`",
    },
    "unit/learner/test_checkpoint_forms.py": {
        "test_two_ranks_read_and_refuse_the_same": "two ranks read every form; one sharded rank is in `make test`",
    },
    "unit/learner/test_attention_kinds.py": {
        "test_compiled_layers_under_fsdp2_give_the_same": "torch.compile traces the layers for half a minute",
    },
    "unit/learner/test_fit.py": {
        "test_a_real_ranks_resident_memory_is_within_a_tenth_of_the_estimate": "six trainings of one and two ranks",
        "test_the_command_proposes_settings_that_are_read_and_says_when_none_fit": "counts a dozen steps",
        "test_every_means_that_saves_or_takes_memory_is_counted": "seven counted steps",
        "test_two_depths_tell_what_counting_every_layer_does": "steps of models with twelve layers",
    },
    "unit/learner/test_checkpoint.py": {
        "test_a_learner_killed_half_way_leaves_the_checkpoint_before_it": "learners killed at several places",
    },
    "unit/learner/test_loading.py": {
        "test_no_rank_holds_the_model_while_it_loads": "a large model, loaded by two ranks",
        "test_attention_is_computed_without_plans_of_cudnn": "a process of its own that imports the learner",
    },
    "unit/learner/test_tiny_model.py": {
        "test_the_error_phase_brings_a_good_model_down_to_what_was_asked_for": "a warm start of two phases",
    },
    "unit/learner/test_four_ranks.py": "four ranks in each layout beside one process",
    "unit/learner/test_two_ranks.py": "two ranks with FSDP2 beside one process; two ranks publish in `make test`",
    "unit/metrics/test_real_trackers.py": {
        "test_wandb_writes_a_record_that_can_be_synced": "wandb starts a process of its own",
    },
    "unit/sweep/test_sweep.py": {
        "test_ctrl_c_stops_every_run_and_names_the_command_that_goes_on": "four runs of a sweep, stopped",
        "test_a_search_prunes_what_is_behind_and_says_so": "a search of several runs",
    },
    "unit/transport/test_log_processes.py": {
        "test_a_hub_cannot_reach_the_terminal_behind_a_log[actor]": "an actor's process; a relay is in `make test`",
    },
    "unit/test_other_systems.py": "a launched run; unit/test_processes.py has what replaces /proc",
    "unit/test_process_memory.py": {
        "test_an_actor_freezes_its_libraries": "an actor's process",
    },
    "unit/weights/test_broadcast.py": {
        "test_a_member_process_killed_in_the_middle_of_a_broadcast_costs_a_deadline_and_a_new_epoch":
            "four processes, and a deadline; members in threads are in `make test`",
    },
    "unit/weights/test_publisher.py": {
        "test_every_rank_writes_its_own_rows_from_little_memory_and_no_weights_are_gathered":
            "a large model on two ranks; a small one is published by two in `make test`",
    },
}


def is_slow(file: str, test: str = "", case: str = "") -> bool:
    """Whether a whole file is slow, or a test of it or a case of that test, by the names that pytest shows."""
    listed = SLOW.get(file, {})
    return isinstance(listed, str) or test in listed or case in listed


if __name__ == "__main__":
    print(*(f"tests/{file}" for file in SLOW))
