"""Messages to token ids and ids to text.

The model's own tokens are never tokenized again: a conversation grows by the ids that it sampled and by those of the
environment's messages in between.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from actors.engines.base import end_of_sequence_ids
from envs.data.chat_template import (
    Tools,
    plain_text,
    rendered,
    shows_tools,
    template_forms,
    template_text,
    writes_calls,
)
from envs.family_forms import family_of
from envs.thoughts import OPENED, TAIL, heard, reopened
from envs.tools.parsing import parse_written
from envs.tools.taught import UNREAD, unread_call
from envs.tools.turns import one_by_one, split_turns
from streamrl.environment import SYSTEM_ROLES, ChatMessage, InputText
from streamrl.errors import TaskError
from streamrl.messages import Member
from streamrl.messages.codec import unpack_ids

log = logging.getLogger("streamrl.actor")

SHORT_TOKEN_CHARS = 8
"""Characters per token of a piece that is counted alone: texts have fewer."""
_CUTS = 16
_LARGE = 1 << 15  # characters
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # of sentencepiece
_ANSWER = "streamrlanswer"  # stands for the model's turn when the template is asked what follows one


def load_tokenizer(model_dir: str | Path) -> Any:
    """The tokenizer in a model's folder; nothing is downloaded and no code from the folder is run."""
    return AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)


def load_end_ids(model_dir: str | Path, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a turn of the model in a folder, as its engine has them."""
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    written = (Path(model_dir) / "generation_config.json").exists()
    generation = GenerationConfig.from_pretrained(model_dir, local_files_only=True) if written else None
    return end_of_sequence_ids(config.get_text_config(), generation, tokenizer)


class Renderer:
    """Turns messages into ids with a tokenizer of transformers.

    The tokenizer is its own: users' code gets `users_tokenizer`, whose limits and padding change no prompt.

    Args:
        end_ids: tokens that end a turn of the model, apart from the tokenizer's own; they need not be special tokens.
        apply_chat_template: use the tokenizer's chat template, if it has one; else contents are joined by newlines.
        system_prompt: a system message put before every conversation that does not begin with one.
        chat_template: Jinja text in place of the tokenizer's own template.
        tool_prompt: joins the system message of a conversation with tools, if the template does not show them.
    """

    def __init__(
        self, tokenizer: Any, *, apply_chat_template: bool = True, system_prompt: str | None = None,
        chat_template: str | None = None, tool_prompt: str = "", end_ids: Collection[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._given_template = chat_template  # the tokenizer may also serve a set of other settings
        template = template_text(tokenizer) if chat_template is None else chat_template
        self.template = template if apply_chat_template else ""
        self.chat = bool(self.template)
        self.writes_calls = writes_calls(self.template)
        self._end_ids = frozenset(end_ids) | end_of_sequence_ids(tokenizer)
        self._family, self._encode = family_of(tokenizer, _decoder(tokenizer)), _encoder(tokenizer)
        self._system_prompt = system_prompt
        self._tool_prompt, self._told = tool_prompt, False

    @cached_property
    def users_tokenizer(self) -> Any:
        """A copy of the tokenizer, with the chat template of the run."""
        copied = copy.deepcopy(self.tokenizer)
        if self._given_template is not None:
            copied.chat_template = self._given_template
        return copied

    def render(self, messages: Sequence[ChatMessage] | InputText, tools: Tools = ()) -> list[int]:
        """The prompt of an episode's first turn; the template shows the JSON schemas of its tools.

        An `InputText` in place of messages is the whole prompt: it gets no template and no special tokens.
        """
        return self.encode_input(self.input_text(messages, tools), whole=isinstance(messages, InputText))

    def encode_input(self, text: str, *, whole: bool) -> list[int]:
        """The ids of an `input_text`; `whole`: it was given as an `InputText`."""
        if self.chat or whole:
            return self.encode(text)
        ids = self._encode(text, True)
        eos = self.tokenizer.eos_token_id
        # Some tokenizers also append an end of sequence, after which the model would not continue.
        return ids[:-1] if eos is not None and len(ids) > 1 and ids[-1] == eos else ids

    def input_text(self, messages: Sequence[ChatMessage] | InputText, tools: Tools = ()) -> str:
        """The text that `render` encodes."""
        if isinstance(messages, InputText):
            return messages
        if self._system_prompt is not None and (not messages or messages[0].role not in SYSTEM_ROLES):
            messages = [ChatMessage("system", self._system_prompt), *messages]
        if tools and self._tool_prompt and not self._shows_tools(messages):
            messages = _with_system_text(messages, self._tool_prompt)
            tools = ()
        return self._template(messages, tools) if self.chat else "\n".join(map(plain_text, messages))

    def _shows_tools(self, messages: Sequence[ChatMessage]) -> bool:
        return self.chat and shows_tools(self.tokenizer, messages, self._given_template)

    def tell_unread(self, tools: Tools) -> None:
        """Say once if calls of such tools, as the template writes them, are not read by those who ask over `chat`."""
        first = tools[0] if tools else None
        if self.chat and not self._told and isinstance(first, Mapping) and isinstance(first.get("function"), Mapping):
            self._told = True
            text = unread_call(self.tokenizer, first, partial(parse_written, tools=tools), self._given_template)
            if text:
                log.warning("%s", UNREAD.format(text, "the endpoint", "let the agent read them in the text"))

    def follow(self, text: str, *, last_token: int) -> list[int]:
        """Text that follows the model's words as ids, encoded alone: no template, no special tokens.

        The model's words are known without the end of its turn and without special tokens. If the turn ended with one
        of these (`last_token`) and the text, which cannot tell, writes it again, it stands once, also where the
        template writes a space or other special tokens before it, or another end than the model chose (Llama 3.1's
        <|eom_id|>, gpt-oss's <|return|>). One that the model did not reach comes with the text.
        """
        if last_token not in self._end_ids and last_token not in self.tokenizer.all_special_ids:
            return self.encode(text)
        ids, end = self.encode(text), self.whole_text([last_token])
        if ids and ids[0] == last_token:
            return ids[1:]
        before = ""
        if last_token in self._end_ids:
            others = "|".join(map(re.escape, self._special))
            before = rf"\s*(?:{others})*?"
        again = re.match(before + re.escape(end), text)
        if again is None and before and self._closing:
            again = re.match(rf"\s*{re.escape(self._closing)}", text)
        if not end or again is None:
            return ids
        return self.encode(text[again.end() :])

    def may_follow(self, text: str, *, last_token: int) -> bool:
        """Tell whether this part of a rendered conversation can stand after the end of the model's turn as sampled.

        Where the template writes a special token after every turn, more of the same message has none before it.
        """
        return last_token not in self._end_ids or not self._closes_turns or self._begins_with_special(text)

    @cached_property
    def _closes_turns(self) -> bool:
        try:
            return self.chat and self._begins_with_special(self.more_text([ChatMessage("user", "?")]))
        except Exception:  # a template raises what it likes
            return False

    @cached_property
    def _closing(self) -> str:
        """The special token with which the template closes a message of either side; empty if it has none."""
        try:
            own = {} if self._given_template is None else {"chat_template": self._given_template}
            asked = rendered(self.tokenizer, [{"role": "user", "content": "?"}], **own)
            texts = [asked.rpartition("?")[2].lstrip(), self.more_text([ChatMessage("user", "?")]).lstrip()]
        except Exception:  # a template raises what it likes
            return ""
        return next((one for one in self._special if one and all(text.startswith(one) for text in texts)), "")

    def _begins_with_special(self, text: str) -> bool:
        return text.lstrip().startswith(self._special)

    @cached_property
    def _special(self) -> tuple[str, ...]:
        """Texts of special tokens, and of those that end a turn."""
        added = self.tokenizer.added_tokens_decoder.items()
        special = [token.content for number, token in added if token.special or number in self._end_ids]
        return tuple({*special, *self.tokenizer.all_special_tokens})

    def more_text(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> str:
        """The environment's messages as text, between the end of the model's turn and its next one.

        A template that shows `tools` beside the last message of a user is not asked to show them again.

        Raises:
            TaskError: the template does not repeat the model's answer, so that there is no "between".
        """
        if not self.chat:
            return "\n".join(map(plain_text, messages))
        turn = [ChatMessage("user", "?"), ChatMessage("assistant", _ANSWER), *messages]
        chosen = tools if self._chosen_by_tools else ()
        try:
            whole = self._template(turn, chosen)
        except (TaskError, TypeError):
            calls = [_call_of(one) for one in messages if one.role == "tool"]
            for some in (calls, calls[:1]) if calls else ():  # gpt-oss' template writes one call a message
                with suppress(TaskError, TemplateError, TypeError):
                    return self._after_calls(some, messages, chosen)
            whole = self._template(turn, tools)  # Hermes 2's goes through the tools, also where none are given
        _, found, after = whole.partition(_ANSWER)
        if not found:
            raise TaskError(
                "this chat template does not repeat the model's answer as it was: set env.history=auto, so that a "
                "trajectory may consist of several sequences, or use single-turn tasks"
            )
        return after

    @property
    def _chosen_by_tools(self) -> bool:
        """Whether a conversation with tools has a template of its own."""
        return self._given_template is None and isinstance(self.tokenizer.chat_template, dict)

    def _after_calls(
        self, calls: Sequence[Mapping[str, Any]], messages: Sequence[ChatMessage], tools: Tools
    ) -> str:
        """The text after a turn of the model, in a template that writes results only after calls."""
        opening = [ChatMessage("user", "?"), ChatMessage("assistant", "", {"tool_calls": list(calls)})]
        own = {} if self._given_template is None else {"chat_template": self._given_template}
        before = rendered(self.tokenizer, template_forms(opening, self.template), tools, **own)
        whole = self._template([*opening, *messages], tools)
        shared = os.path.commonprefix([before, whole]).rstrip()
        while shared.endswith(self._ends):  # the model's turn may lack its end
            shared = shared[: -max(len(end) for end in self._ends if shared.endswith(end))].rstrip()
        return whole[len(shared) :]

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.whole_text([one]) for one in self._end_ids)))

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode a turn as `seen`, with thoughts and calls in the forms that rewards and tools read."""
        return self._family.text(self._unended(token_ids))

    def seen(self, token_ids: Sequence[int]) -> str:
        """Decode a turn without its end, spaces as they are.

        Special tokens are left out, apart from those that mark thoughts and calls.
        """
        return self._family.seen(self._unended(token_ids))

    def _unended(self, token_ids: Sequence[int]) -> list[int]:
        ended = len(token_ids) > 0 and int(token_ids[-1]) in self._end_ids
        return list(token_ids[:-1] if ended else token_ids)

    def whole_text(self, token_ids: Sequence[int]) -> str:
        """Decode these tokens, special ones included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def said(self, member: Member) -> str:
        """The text of model and environment after the first prompt, marked if it continues a thought."""
        read, ids = (unpack_ids(raw).tolist() for raw in (member.prompt_ids, member.token_ids))
        return heard(self.text(ids), self.whole_text(read[-TAIL:]))

    def _template(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> str:
        """A conversation that ends with words of the assistant is one for the model to continue.

        Thoughts and calls in its words become fields where the model has tokens of its own for these, or where the
        template refuses the conversation otherwise, as some do with the result of a call that is not one of its fields.
        """
        if self._opens_thoughts or self._family.own_thought:
            messages = [
                replace(one, content=self._family.repeated(reopened(one.content))) if one.role == "assistant" else one
                for one in messages
            ]
        failure: TaskError | None = None
        for reading in self._readings(messages, tools):
            try:
                return self._written(reading, tools)
            except TaskError as error:
                failure = failure or error
        assert failure is not None, "there is a reading"
        raise failure

    def _readings(self, messages: Sequence[ChatMessage], tools: Tools) -> Iterator[Sequence[ChatMessage]]:
        """The conversation in the forms that templates may want, each once."""
        own = self._family.rewrites and not self._family.own_thought
        if not own:
            yield messages
        parts = split_turns(messages, tools, keeps_words=not own or self._keeps_words)
        if own or parts != list(messages):
            yield parts
        if (apart := one_by_one(parts)) != parts:
            yield apart

    @cached_property
    def _opens_thoughts(self) -> bool:
        """Whether the model is asked with a thought already open: its turn then begins inside."""
        try:
            return self._written([ChatMessage("user", "?")], ()).rstrip().endswith(OPENED)
        except Exception:  # a template raises what it likes
            return False

    @cached_property
    def _keeps_words(self) -> bool:
        """Whether words beside a call stand before its result: Gemma 4's template takes them for the answer to that."""
        result = ChatMessage("tool", f"{_ANSWER}7", {"name": "f", "tool_call_id": "call00001"})
        said = ChatMessage("assistant", _ANSWER, {"tool_calls": [_call_of(result)]})
        try:
            whole = self._written([ChatMessage("user", "?"), said, result], ())
        except Exception:  # a template raises what it likes
            return True
        return 0 <= whole.find(_ANSWER) < whole.find(f"{_ANSWER}7")

    def _written(self, messages: Sequence[ChatMessage], tools: Tools) -> str:
        begun = bool(messages) and messages[-1].role == "assistant"
        own = {} if self._given_template is None else {"chat_template": self._given_template}
        forms = template_forms(messages, self.template)
        try:
            return rendered(
                self.tokenizer, forms, tools,
                add_generation_prompt=not begun,
                continue_final_message=begun, **own,
            )
        except TemplateError as error:
            used = any(one.role == "tool" for one in messages)
            hint = ", of env.tools with env.tool_use.role=user" if used else ""
            roles = ", ".join(one.role for one in messages[-8:])
            raise TaskError(
                f"the chat template refuses messages of {roles} ({error}): change their roles{hint}, or give another "
                "template with data.chat_template"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Text as ids, without special tokens around it."""
        return self._encode(text, False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token's text: of byte-level vocabularies they may be a part of a character."""
        return self._token_bytes(token_id)

    @cached_property
    def _token_bytes(self) -> Callable[[int], bytes]:
        return token_bytes(self.tokenizer)

    def surely_over(self, text: str, limit: int) -> bool:
        """Whether a text has more tokens than this, found without tokenizing much more than so many."""
        piece = SHORT_TOKEN_CHARS * max(limit, 1)
        if len(text) <= piece:
            return False
        if len(text) > limit * self.longest_token:
            return True
        count = 0
        for start in range(0, len(text), piece):
            count += len(self.encode(text[start : start + piece]))
            if count > limit + limit // 4 + _CUTS:  # a cut may add a token on either side of it
                return True
        return False

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()))


class SharedPrompts:
    """The prompts of one group: what its members are asked is nearly always the same, and then rendered once."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._known: dict[object, tuple[tuple[int, ...], str]] = {}

    def render(self, messages: Sequence[ChatMessage] | InputText, tools: Tools = ()) -> tuple[tuple[int, ...], str]:
        """The ids that `Renderer.render` gives, and the text that they are of."""
        opening = messages if isinstance(messages, InputText) else tuple(messages)
        try:
            key = opening, json.dumps(list(tools))
            known = self._known.get(key)
        except (TypeError, ValueError):  # a user's message or tool may hold anything
            return self._rendered(messages, tools)
        if known is None:
            known = self._known[key] = self._rendered(messages, tools)
        return known

    def _rendered(self, messages: Sequence[ChatMessage] | InputText, tools: Tools) -> tuple[tuple[int, ...], str]:
        text = self._renderer.input_text(messages, tools)
        return tuple(self._renderer.encode_input(text, whole=isinstance(messages, InputText))), text


def _encoder(tokenizer: Any) -> Callable[[str, bool], list[int]]:
    """The tokenizer's `input_ids` of a text, with or without special tokens around it."""
    if not _is_plain(tokenizer, "__call__", "_encode_plus"):
        return lambda text, special: list(tokenizer(text, add_special_tokens=special)["input_ids"])
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # whatever the file says
    backend.no_padding()
    encode = backend.encode
    batch = backend.encode_batch_fast  # it has no offsets, which take a hundred bytes a character

    def encoded(text: str, special: bool) -> list[int]:
        # A batch gives the interpreter's lock away, and then waits 5 ms where another thread is busy.
        if len(text) > _LARGE:
            return batch([text], add_special_tokens=special)[0].ids
        return encode(text, add_special_tokens=special).ids

    return encoded


def _is_plain(tokenizer: Any, *methods: str) -> bool:
    """Whether these methods are those of the library's own class, and end in its backend."""
    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    return isinstance(tokenizer, plain) and all(getattr(kind, name) is getattr(plain, name) for name in methods)


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """The tokenizer's `decode` without special tokens, spaces as they are."""
    if _is_plain(tokenizer, "decode", "_decode"):
        # What it ends in; the way there takes several times as long.
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _call_of(result: ChatMessage) -> dict[str, Any]:
    """A call that this may be the result of."""
    function = {"name": result.fields.get("name") or "unknown", "arguments": {}}
    return {"id": result.fields.get("tool_call_id"), "type": "function", "function": function}


def _with_system_text(messages: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    """The text at the end of the system message, or as one of its own."""
    if messages and messages[0].role in SYSTEM_ROLES:
        return [replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [ChatMessage("system", text), *messages]


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """A function from an id to the bytes that it stands for, of which a text shows parts of characters as replacements.

    Ids of a padded vocabulary, which the tokenizer does not have, have none.
    """
    decoders = set(_decoders(getattr(tokenizer, "backend_tokenizer", None)))
    whole = {number: added.content for number, added in tokenizer.added_tokens_decoder.items()}

    def found(token_id: int) -> bytes:
        if token_id in whole:
            return whole[token_id].encode()
        token = tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if "ByteLevel" in decoders and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        if "ByteFallback" in decoders and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if "Metaspace" in decoders or "Replace" in decoders:
            return token.replace(_SPACE, " ").encode()
        return tokenizer.decode([token_id]).encode()

    return found


def _decoders(backend: Any) -> Iterator[str]:
    """The types of a tokenizer's decoder, of a sequence those of all its parts."""
    if backend is None or backend.decoder is None:
        return
    left = [json.loads(backend.decoder.__getstate__())]
    while left:
        one = left.pop()
        yield one["type"]
        left += one.get("decoders", ())


def _byte_level() -> dict[str, int]:
    """Characters of a byte-level vocabulary: printable bytes stand for themselves, the others for those from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_level()
