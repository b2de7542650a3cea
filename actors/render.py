"""Messages to token ids and ids to text: the actor's only user of a tokenizer besides the engine's stop strings.

What the model said is never tokenized again: a conversation grows by the ids that it sampled and by the ids of what the
environment says in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from streamrl.environment import ChatMessage
from streamrl.errors import TaskError

_ANSWER = "streamrlanswer"  # stands for the model's turn when the template is asked what follows one


def load_tokenizer(model_dir: str | Path) -> Any:
    """The tokenizer in a model's folder. Nothing is fetched and no code from the folder is run."""
    return AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)


class Renderer:
    """Turns messages into ids with a model's tokenizer.

    Args:
        tokenizer: of transformers.
        apply_chat_template: use the tokenizer's chat template, if it has one; else contents are joined by newlines.
        system_prompt: a system message put before every conversation that does not begin with one.
    """

    def __init__(self, tokenizer: Any, *, apply_chat_template: bool = True, system_prompt: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._chat = apply_chat_template and bool(getattr(tokenizer, "chat_template", None))
        self._system_prompt = system_prompt

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The opening of an episode, up to where the model is to speak."""
        if self._system_prompt is not None and (not messages or messages[0].role != "system"):
            messages = [ChatMessage("system", self._system_prompt), *messages]
        if self._chat:
            return self._encode(self._template(messages))
        text = "\n".join(message.content for message in messages)
        ids = list(self._tokenizer(text, add_special_tokens=True)["input_ids"])
        eos = self._tokenizer.eos_token_id
        # Some tokenizers also close the text; the model is to go on from here.
        return ids[:-1] if eos is not None and len(ids) > 1 and ids[-1] == eos else ids

    def render_more(self, messages: Sequence[ChatMessage], *, last_token: int | None = None) -> list[int]:
        """What stands between the model's last token and its next turn.

        Args:
            messages: what the environment said.
            last_token: the last id the model sampled. Where the template ends a turn with a token and the model was cut
                short before it (by length or by a stop string), that token is put first. None: the model said it.
        Raises:
            TaskError: the template rewrites what the model said, so that there is no "in between".
        """
        if not self._chat:
            return self._encode("\n".join(message.content for message in messages))
        opening = [ChatMessage("user", "?"), ChatMessage("assistant", _ANSWER)]
        _, found, after = self._template([*opening, *messages]).partition(_ANSWER)
        if not found:
            raise TaskError("this chat template does not repeat the model's answer as it was: use single-turn tasks")
        ids = self._encode(after)
        said = self._tokenizer.eos_token_id if last_token is None else last_token
        return ids[1:] if ids and ids[0] == said else ids

    def text(self, token_ids: Sequence[int]) -> str:
        """What a reader sees: special tokens left out, spaces as they are."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _template(self, messages: Sequence[ChatMessage]) -> str:
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        return self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
