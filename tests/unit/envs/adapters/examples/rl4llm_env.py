from rl4llm.core.base_env import BaseMDPEnv, BaseRewardFunction, ChatMessage, EnvState
from rl4llm.core.base_inference_client import InferenceClient


class Accuracy(BaseRewardFunction):
    def __init__(self):
        super().__init__("accuracy")

    def __call__(self, messages, ground_truth, **kwargs):
        return float(ground_truth in messages[-1].content)


class AskTwiceEnv(BaseMDPEnv):
    def __init__(self, note="sure?", **kwargs):
        super().__init__(tool_schemas=None, **kwargs)
        self.note = note

    def _run_interaction_loop(self, env_state: EnvState, llm: InferenceClient, sampling_params, **kwargs) -> EnvState:
        for turn in range(self.max_steps):
            active = [state for state in env_state.sample_states if not state.done]
            if not active:
                break
            outputs = llm.generate(
                prompts=self._convert_to_batch_prompts(EnvState(sample_states=active)), sampling_params=sampling_params
            )
            for state, output in zip(active, outputs, strict=True):
                state.messages.append(ChatMessage(role="assistant", content=output["text"].strip()))
                state.current_step += 1
                state.done = state.current_step == 2
                if not state.done and turn + 1 < self.max_steps:
                    state.messages.append(ChatMessage(role="user", content=self.note))
        return env_state
