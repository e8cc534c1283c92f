"""A model that plays an agent: what it says depends on the state of the conversation alone.

`save_scripted_model` makes the token at a position depend on the position alone. Here the chat
template fills every prompt up to the position where the text of its scene is written, so that a
client may send whatever tools, instructions and results it likes. Clients thus see an answer that
no small model would give; the server, its template, parsers and streams are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.scripted_model import describe, save_scripted_model

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END = "<|im_end|>"
PROMPT_TOKENS = 160  # of the first scene; the others' prompts are longer
POSITIONS = 1024
OPENING = (
    "{%- set results = messages | selectattr('role', 'equalto', 'tool') | list | length %}"
    "{%- set names = tools | map(attribute='function') | map(attribute='name') | join(' ')"
    " if tools else '' %}"
    "{%- set said = messages | string %}"
)
CLOSING = (
    "{#- <tool_call> <think> #}"
    "{%- set kept = (names ~ ' ' ~ said) | urlencode %}"
    "{{ '.' * [0, size - kept | length] | max }}{{ kept[-size:] }}"
)


@dataclass(frozen=True)
class Scene:
    """What the model says where `condition`, an expression of Jinja, is the first that holds.

    A condition may use `results` (the number of tools' messages), `names` (of the tools, joined by
    spaces), `said` (all messages, as text) and the template's own variables.
    """

    condition: str
    text: str


def byte_tokenizer() -> Tokenizer:
    """A token for every byte, for the tags of calls and reasoning, and for a turn's end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END: 0} | {character: i for i, character in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END)])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def save_agent_model(folder: Path, scenes: Sequence[Scene], **sizes: int) -> None:
    """Write a model of `POSITIONS` positions, with tokenizer and chat template, that plays the
    scenes. sizes: layers and experts, as of `save_scripted_model`.
    """
    tokenizer = byte_tokenizer()
    script: list[int] = []
    branches = []
    for scene in scenes:
        size = PROMPT_TOKENS + len(script)
        branches.append(f"if {scene.condition} %}}{{% set size = {size} %}}")
        script += tokenizer.encode(scene.text + END).ids
    template = OPENING + "{% " + "{% el".join(branches) + "{% endif %}" + CLOSING
    folder.mkdir(parents=True)
    assert PROMPT_TOKENS + len(script) <= POSITIONS
    save_scripted_model(folder, tokenizer, PROMPT_TOKENS, script, POSITIONS, **sizes)
    settings = {"eos_token": END, "chat_template": template}
    describe(folder, settings, {"eos_token_id": 0, "top_k": 1})


def call_text(name: str, arguments: str) -> str:
    """A tool call as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
