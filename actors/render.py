"""Messages to token ids and ids to text.

The model's own tokens are never tokenized again: a conversation grows by the ids that it sampled and by those of the
environment's messages in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from streamrl.environment import ChatMessage, InputText
from streamrl.errors import TaskError

Tools = Sequence[Mapping[str, Any]]

_ANSWER = "streamrlanswer"  # stands for the model's turn when the template is asked what follows one


def load_tokenizer(model_dir: str | Path) -> Any:
    """The tokenizer in a model's folder; nothing is downloaded and no code from the folder is run."""
    return AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)


class Renderer:
    """Turns messages into ids with a tokenizer of transformers.

    Args:
        apply_chat_template: use the tokenizer's chat template, if it has one; else contents are joined by newlines.
        system_prompt: a system message put before every conversation that does not begin with one.
        chat_template: Jinja text in place of the tokenizer's own template.
        tool_prompt: joins the system message of a conversation with tools, if the template does not show them.
    """

    def __init__(
        self, tokenizer: Any, *, apply_chat_template: bool = True, system_prompt: str | None = None,
        chat_template: str | None = None, tool_prompt: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        template = getattr(tokenizer, "chat_template", None)
        self._chat = apply_chat_template and bool(template)
        self._system_prompt = system_prompt
        # Some tokenizers hold several templates by name, among them one for tools.
        shows_tools = self._chat and ("tool_use" in template if isinstance(template, dict) else "tools" in template)
        self._tool_prompt = "" if shows_tools else tool_prompt

    def render(self, messages: Sequence[ChatMessage] | InputText, tools: Tools = ()) -> list[int]:
        """The prompt of an episode's first turn; the template shows the JSON schemas of its tools.

        An `InputText` in place of messages is the whole prompt: it gets no template and no special tokens.
        """
        text = self.input_text(messages, tools)
        if self._chat or isinstance(messages, InputText):
            return self._encode(text)
        ids = list(self._tokenizer(text, add_special_tokens=True)["input_ids"])
        eos = self._tokenizer.eos_token_id
        # Some tokenizers also append an end of sequence, after which the model would not continue.
        return ids[:-1] if eos is not None and len(ids) > 1 and ids[-1] == eos else ids

    def input_text(self, messages: Sequence[ChatMessage] | InputText, tools: Tools = ()) -> str:
        """The text that `render` encodes."""
        if isinstance(messages, InputText):
            return messages
        if self._system_prompt is not None and (not messages or messages[0].role != "system"):
            messages = [ChatMessage("system", self._system_prompt), *messages]
        if tools and self._tool_prompt:
            messages = _with_system_text(messages, self._tool_prompt)
        return self._template(messages, tools) if self._chat else "\n".join(message.content for message in messages)

    def render_text(self, text: str, *, last_token: int) -> list[int]:
        """The environment's text as ids, encoded alone: no template, no special tokens.

        The model's words reach an environment without special tokens. If the model ended its turn with one and the
        environment, which cannot see that, writes it again, it stands once.
        """
        ids = self._encode(text)
        return ids[1:] if ids and ids[0] == last_token and last_token in self._tokenizer.all_special_ids else ids

    def render_more(self, messages: Sequence[ChatMessage], *, last_token: int | None = None) -> list[int]:
        """The environment's messages as ids, between the model's last token and its next turn.

        Args:
            last_token: the last id that the model sampled. If the template ends a turn with a token that the model did
                not reach (cut by length or a stop string), that token comes first. None: the model sampled it.
        Raises:
            TaskError: the template rewrites the model's answer, so that there is no "between".
        """
        if not self._chat:
            return self._encode("\n".join(message.content for message in messages))
        opening = [ChatMessage("user", "?"), ChatMessage("assistant", _ANSWER)]
        _, found, after = self._template([*opening, *messages]).partition(_ANSWER)
        if not found:
            raise TaskError("this chat template does not repeat the model's answer as it was: use single-turn tasks")
        ids = self._encode(after)
        sampled = self._tokenizer.eos_token_id if last_token is None else last_token
        return ids[1:] if ids and ids[0] == sampled else ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Without special tokens, spaces as they are."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _template(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> str:
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        return self._tokenizer.apply_chat_template(
            conversation, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_system_text(messages: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    """The text at the end of the system message, or as one of its own."""
    if messages and messages[0].role == "system":
        return [ChatMessage("system", f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [ChatMessage("system", text), *messages]
