"""A sequence classifier with one label scores conversations, many in one forward pass."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from envs.data.chat_template import Tools, rendered, template_forms, template_text, text_with_calls
from streamrl.environment import ChatMessage
from streamrl.errors import StreamrlError, in_one_line
from streamrl.weights.model_folder import check_folder

torch.backends.cuda.enable_cudnn_sdp(False)  # see streamrl.architectures.attention

Conversation = Sequence[Mapping[str, Any]]
MAX_BATCH = 32
"""Conversations of one forward pass."""
MAX_KNOWN = 1 << 16
"""Scores that are remembered."""


class RewardScorer:
    """A reward model on one device.

    Args:
        path: a Hugging Face checkpoint of a sequence classifier with its tokenizer.
        device: as torch names it.

    Raises:
        StreamrlError: no such checkpoint, another number of labels than one, or no trained output layer.
    """

    def __init__(self, path: str, device: str) -> None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
        if Path(path).is_dir():
            check_folder(path, said=f"reward.model.path={path}")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            self._model, found = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=dtype, output_loading_info=True, trust_remote_code=False
            )
        except Exception as error:  # of any reader: a .bin file may hold anything
            raise StreamrlError(
                f"reward.model.path={path} cannot be loaded, give a checkpoint with its tokenizer: {in_one_line(error)}"
            ) from error
        config = self._model.config
        if config.num_labels != 1:
            raise StreamrlError(
                f"reward.model.path={path} has {config.num_labels} labels: give a model with one, the score."
            )
        if found["missing_keys"]:
            raise StreamrlError(
                f"reward.model.path={path} lacks {', '.join(sorted(found['missing_keys']))[:120]}: it is not a trained "
                "reward model; give a checkpoint that was saved as a sequence classifier."
            )
        self._device = torch.device(device)
        self._model.to(self._device).eval()
        self._tokenizer.truncation_side = "left"  # the answer stands at the end
        self._tokenizer.padding_side = "right"  # the score is read at the last token that is no padding
        # The model finds the last token by the id in its config, so batches must be padded with that one.
        text = config.get_text_config()
        known = (getattr(text, "pad_token_id", None), self._tokenizer.pad_token_id, self._tokenizer.eos_token_id)
        config.pad_token_id = text.pad_token_id = next((one for one in known if one is not None), 0)
        self._tokenizer.pad_token = self._tokenizer.convert_ids_to_tokens(text.pad_token_id)
        positions = getattr(text, "max_position_embeddings", None) or 1 << 20
        self._max_tokens = min(int(self._tokenizer.model_max_length), positions)
        self._known: dict[bytes, float] = {}

    @torch.inference_mode()
    def score(self, conversations: Sequence[Conversation], tools: Sequence[Tools] = ()) -> list[float]:
        """A score for each conversation; longer ones than the model reads lose their beginning.

        Bits depend on the rest of a pass: equal texts are scored once, or groups of equal answers would spread.

        Args:
            tools: of each conversation, for the chat template; nothing where none has any.
        """
        texts = [self._text(*one) for one in zip(conversations, tools or [()] * len(conversations), strict=True)]
        keys = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._known}
        found = dict(zip(new, self._scores(list(new.values())), strict=True)) if new else {}
        scores = [found[key] if key in found else self._known[key] for key in keys]
        self._known |= found
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return scores

    def _scores(self, texts: list[str]) -> list[float]:
        batch = self._tokenizer(
            texts, return_tensors="pt", padding=True, truncation=True, max_length=self._max_tokens,
            add_special_tokens=not self._tokenizer.chat_template,
        ).to(self._device)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return self._model(**inputs).logits[:, 0].float().tolist()

    def _text(self, messages: Conversation, tools: Tools) -> str:
        whole = [
            ChatMessage(fields.pop("role"), fields.pop("content"), fields) for fields in map(dict, messages)
        ]
        if self._tokenizer.chat_template:
            return rendered(self._tokenizer, template_forms(whole, template_text(self._tokenizer)), tools)
        return "\n\n".join(f"{message.role}: {text_with_calls(message)}" for message in whole)


class BatchingScorer:
    """Conversations that wait while a forward pass runs go into the next one together."""

    def __init__(self, scorer: RewardScorer) -> None:
        self._scorer = scorer
        self._waiting: queue.SimpleQueue[tuple[Conversation, Tools, Future[float]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="scorer", daemon=True).start()

    def ask(self, messages: Conversation, tools: Tools = ()) -> Future[float]:
        """The score of one conversation, or whatever the model raised for its batch."""
        answer: Future[float] = Future()
        self._waiting.put((messages, tools, answer))
        return answer

    def _work(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < MAX_BATCH and not self._waiting.empty():
                batch.append(self._waiting.get())
            try:
                scores = self._scorer.score(*zip(*((messages, tools) for messages, tools, _ in batch), strict=True))
            except Exception as error:  # a template or the device: its callers hear it, the process goes on
                for *_, answer in batch:
                    answer.set_exception(error)
                continue
            for (*_, answer), score in zip(batch, scores, strict=True):
                answer.set_result(score)
