"""Answers in OpenAI's forms, whole and as events of a stream."""

from __future__ import annotations

import codecs
import secrets
import time
from typing import Any

from ..demo.prompts import Prompt
from ..engine.logprobs import LogProbs
from ..tokenizer import Tokenizer
from .service import Told


class Form:
    """One answer, of a completion or of a chat, from tokens as they come."""

    def __init__(self, model: str, chat: bool, tokenizer: Tokenizer, prompt: Prompt, most: int) -> None:
        self._chat, self._tokenizer, self._prompt, self._most = chat, tokenizer, prompt, most
        kind = "chatcmpl" if chat else "cmpl"
        self._head = {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._tokens: list[int] = []
        self._told, self._text, self._offset = 0, "", 0
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = prompt.sampling.stop
        self._kept = max((len(words) for words in self._stop), default=1) - 1
        """Characters with which one of the words of `stop` may begin."""
        self._held, self._stopped = "", False
        self._found: list[LogProbs] = []

    def take(self, some: Told, last: bool = False) -> str:
        """The text that more tokens add, in whole characters, without what may be one of the words of `stop`."""
        self._tokens += some[0]
        self._found += some[1]
        if self._stopped:
            return ""
        data = self._tokenizer.decode(self._tokens)
        self._held, self._told = self._held + self._bytes.decode(data[self._told :], last), len(data)
        end = len(self._held) if last else max(len(self._held) - self._kept, 0)
        if starts := [at for words in self._stop if (at := self._held.find(words)) >= 0]:
            self._stopped, end = True, min(starts)
        text, self._held = self._held[:end], "" if self._stopped else self._held[end:]
        self._text += text
        return text

    @property
    def ended(self) -> str:
        """The reason that it is over."""
        return "length" if len(self._tokens) >= self._most and not self._stopped else "stop"

    def rest(self) -> str:
        """The text that was held back."""
        return self.take(([], []), True)

    def chunk(self, text: str, some: Told = ([], []), ended: str | None = None) -> dict[str, Any]:
        """One event of a stream."""
        said = {"delta": {"content": text}} if self._chat else {"text": text}
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        choice = {"index": 0, **said, **self._logprobs(some[1]), "finish_reason": ended}
        return self._head | {"object": kind, "choices": [choice]}

    def whole(self) -> dict[str, Any]:
        """The answer as a whole."""
        self.rest()
        said = {"message": {"role": "assistant", "content": self._text}} if self._chat else {"text": self._text}
        used = {"prompt_tokens": len(self._prompt.tokens), "completion_tokens": len(self._tokens)}
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [{"index": 0, **said, **self._logprobs(self._found), "finish_reason": self.ended}]
        return self._head | {"object": kind, "choices": choices, "usage": used}

    def _logprobs(self, found: list[LogProbs]) -> dict[str, Any]:
        """The field of a choice, if log probabilities were asked for."""
        if not found:
            return {}
        if self._chat:
            content = [self._likely(*own) | {"top_logprobs": [self._likely(*e) for e in top]} for own, *top in found]
            return {"logprobs": {"content": content}}
        texts = [self._text_of(own[0]) for own, *_ in found]
        starts = [self._offset + sum(map(len, texts[:n])) for n in range(len(texts))]
        self._offset += sum(map(len, texts))
        return {
            "logprobs": {
                "tokens": texts,
                "token_logprobs": [own[1] for own, *_ in found],
                "top_logprobs": [{self._text_of(token): p for token, p in reversed(top)} for _, *top in found],
                "text_offset": starts,
            }
        }

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token]).decode("utf-8", "replace")

    def _likely(self, token: int, logprob: float) -> dict[str, Any]:
        data = list(self._tokenizer.decode([token]))
        return {"token": self._text_of(token), "logprob": logprob, "bytes": data}
