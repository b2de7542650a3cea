from rl4llm.core.base_env import BaseMDPEnv, EnvState


class CustomEnv(BaseMDPEnv):
    def _run_interaction_loop(self, env_state: EnvState, llm, sampling_params, **kwargs) -> EnvState:
        return env_state
