"""The table of output formats, and how a chat template's text tells its model's format.

The names are those of vLLM's options `--tool-call-parser` and `--reasoning-parser`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jmoe.serving.output_parsers import deepseek, hermes, keyed, kimi, llama, mistral
from jmoe.serving.output_parsers.parser import OutputParser, ReasoningTags

AUTO, NONE, HARMONY, OPENAI = "auto", "none", "openai_gptoss", "openai"


@dataclass(frozen=True)
class ToolFormat:
    """A row of the table.

    sign: a regular expression that the chat templates of the format's models match.
    parser: None for gpt-oss, whose channels are tokens (`jmoe.inference.harmony`).
    """

    sign: str
    parser: type[OutputParser] | None


# In this order they are looked for: a template with a later sign may have been written for an
# earlier format, and not the other way round.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    OPENAI: ToolFormat(r"<\|channel\|>commentary", None),
    "kimi_k2": ToolFormat(re.escape(kimi.BEGIN), kimi.KimiParser),
    "deepseek_v3": ToolFormat(r"(?s:tool▁sep.*```json)", deepseek.DeepSeekParser),
    "deepseek_v31": ToolFormat(re.escape(deepseek.BEGIN), deepseek.DeepSeekParser),
    "mistral": ToolFormat(re.escape(mistral.BEGIN), mistral.MistralParser),
    "glm45": ToolFormat(re.escape(keyed.KEY), keyed.GlmParser),
    "qwen3_coder": ToolFormat(re.escape(keyed.FUNCTION), keyed.QwenCoderParser),
    "hermes": ToolFormat(re.escape(hermes.BEGIN), hermes.HermesParser),
    "llama3_json": ToolFormat(r"<\|python_tag\|>|function name, .?\"parameters", llama.LlamaParser),
    "llama4_json": ToolFormat(r"(?!)", llama.LlamaParser),
}

THINK = ReasoningTags("<think>", "</think>")
# gpt-oss's channels have no tags
REASONING_FORMATS: Mapping[str, ReasoningTags | None] = {
    HARMONY: None,
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "deepseek_r1": THINK,
    "deepseek_v3": THINK,
    "glm45": THINK,
    "kimi_k2": THINK,
    "qwen3": THINK,
}


def detect_tool_format(template: str) -> str:
    """Return the name of the format that the template's text shows, `NONE` if it shows none."""
    signs = ((name, one.sign) for name, one in TOOL_FORMATS.items())
    return next((name for name, sign in signs if re.search(sign, template)), NONE)


def detect_reasoning_format(template: str, tool_format: str) -> str:
    """Return the name of the format of the reasoning that the template's text shows, or `NONE`.

    tool_format: names the format of `<think>` after the family.
    """
    if "<|channel|>" in template:
        return HARMONY
    if "[THINK]" in template:
        return "mistral"
    if THINK.begin not in template and THINK.end not in template:
        return NONE
    family = {"deepseek_v31": "deepseek_v3", "deepseek_v3": "deepseek_r1", "hermes": "qwen3"}
    name = family.get(tool_format, tool_format)
    return name if REASONING_FORMATS.get(name) == THINK else "deepseek_r1"


def reasoning_tags_after_prompt(tags: ReasoningTags, prompt: str) -> ReasoningTags | None:
    """Return the tags for an output after a prompt, None if the prompt has closed the reasoning.

    prompt: its text, which ends with whatever the template begins the answer with.
    """
    end = prompt.rstrip()
    if end.endswith(tags.end):
        return None
    return ReasoningTags(tags.begin, tags.end, is_open=end.endswith(tags.begin))


def marker_texts_of_parsers(
    parsers: Iterable[type[OutputParser]], tags: ReasoningTags | None
) -> set[str]:
    """Return the special tokens whose text parsers need to see."""
    markers = {marker for parser in parsers for marker in (*parser.opens, *parser.markers)}
    return markers | ({tags.begin, tags.end} if tags is not None else set())
