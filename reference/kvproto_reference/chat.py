"""A user's turn in the form that a chat model was trained on."""

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import EngineError

TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "tokenizer_config.json"


class ChatTemplate:
    """The template that comes with a checkpoint, in a separate file or in the settings of its tokenizer."""

    def __init__(self, folder: Path) -> None:
        """Raises EngineError if the folder has no template, or an invalid one."""
        alone, settings = folder / TEMPLATE_FILE, folder / SETTINGS_FILE
        fields: dict[str, Any] = {}
        try:
            if settings.is_file():
                fields = json.loads(settings.read_text())
            text = alone.read_text() if alone.is_file() else fields.get("chat_template")
            if not isinstance(text, str):
                raise EngineError(f"checkpoint folder {folder} has no chat template: leave --chat out")
            self._template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(text)
        except (OSError, ValueError, TemplateError) as error:
            raise EngineError(f"the chat template in {folder} cannot be read: {error}") from error
        # templates write these; some files hold them as objects
        words = {key: fields.get(key) for key in ("bos_token", "eos_token")}
        self._words = {key: word["content"] if isinstance(word, dict) else word for key, word in words.items()}

    def prompt(self, said: str) -> str:
        """A conversation with one turn of the user's, up to where the answer begins."""
        return self.conversation([{"role": "user", "content": said}])

    def conversation(self, turns: list[dict[str, str]]) -> str:
        """A conversation of any turns, up to where the next answer begins; raises EngineError."""
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._words)
        except TemplateError as error:
            raise EngineError(f"the chat template refuses the conversation: {error}") from error
