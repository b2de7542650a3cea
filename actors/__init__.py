"""Actors: processes that lease prompts, generate episodes and send them to the hub."""

EXIT_CONFIG, EXIT_WRONG_RUN, EXIT_ENGINE_HUNG, EXIT_RESTART = 2, 6, 9, 11
"""Exit codes: a setting is impossible, which no restart fixes; another run has the address; the engine must not go on;
the run came back with other settings."""
