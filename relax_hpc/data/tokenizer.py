"""Tokenizer of the model folder, chat template and end tokens. Loads transformers lazily."""

import json
import typing
from pathlib import Path
from typing import Any

from relax_hpc.errors import ConfigError, require_extra

Messages = list[dict[str, str]]
"""Chat messages: `role` and `content`."""


class Tokenizer(typing.Protocol):
    """What relax_hpc uses of a transformers tokenizer."""

    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the model's own start token if it has one."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids."""

    def apply_chat_template(self, conversation: Messages, **options: Any) -> Any:
        """Render messages and, if asked, tokenize them."""


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of a model folder; never from the network.

    Raises:
        ConfigError: no such folder, or no tokenizer in it.
        MissingExtraError: transformers is not installed.
    """
    if not Path(path).is_dir():
        raise ConfigError(f"model.path={path!r}: no such folder (a Hugging Face model folder)")
    try:
        from transformers import AutoTokenizer
    except ImportError as err:
        raise require_extra("transformers", "train", err) from err
    try:
        return typing.cast("Tokenizer", AutoTokenizer.from_pretrained(path, local_files_only=True))
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"model.path={path!r}: no tokenizer can be loaded from it ({err}); "
            "it needs tokenizer.json and tokenizer_config.json"
        ) from err


def prompt_token_ids(
    tokenizer: Tokenizer, prompt: str | Messages, apply_chat_template: bool
) -> list[int]:
    """Tokenize one prompt.

    With the chat template: a string becomes one user message, and the assistant's turn is opened.
    The template writes the start token itself, so none is added a second time.
    Without: the contents of the messages, joined by newlines, as plain text.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if not apply_chat_template:
        return list(tokenizer.encode(prompt_text(prompt)))
    if not tokenizer.chat_template:
        raise ConfigError(
            "data.apply_chat_template=true: the model's tokenizer has no chat template "
            "(a base model?); use an instruct model or set it to false"
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    ids = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    return [int(token) for token in ids]


def prompt_text(prompt: str | Messages) -> str:
    """Contents of the messages, joined by newlines."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message["content"] for message in prompt)


def stop_token_ids(path: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """All tokens that end a response: of generation_config.json, config.json and the tokenizer.

    Chat models name several (`<|im_end|>`, `<|endoftext|>`); an engine that knows only one of them
    generates past the end. Sorted, without duplicates.
    """
    found: set[int] = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if not file.is_file():
            continue
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found.update(int(token) for token in values if token is not None)
    return tuple(sorted(found))
