"""The choice of a model's formats."""

import pytest
from tokenizers import AddedToken

from jmoe.data.tokenizer import train_bpe
from jmoe.inference.harmony import ChannelStream
from jmoe.inference.output_events import ToolCallBegin
from jmoe.serving.output_parsers.formats import AUTO, HARMONY, NONE, OPENAI, THINK
from jmoe.serving.output_parsers.kimi import ARGUMENTS, BEGIN, CALL_BEGIN, CALL_END, END
from jmoe.serving.output_parsers.output_format import OutputFormat
from jmoe.serving.output_parsers.parser import ParserSettings
from tests.scripted_model import harmony_tokenizer

PLAIN = train_bpe(["text"], 300)


def test_the_template_or_an_option_chooses() -> None:
    found = OutputFormat.choose(PLAIN, "<tool_call> <think>", AUTO, AUTO)
    assert (found.tool_format, found.reasoning_format, found.tags) == ("hermes", "qwen3", THINK)
    assert str(found).startswith("tool calls: hermes, reasoning: qwen3")
    named = OutputFormat.choose(PLAIN, "<tool_call> <think>", "mistral", NONE)
    assert (named.tool_format, named.reasoning_format, named.tags) == ("mistral", NONE, None)
    without = OutputFormat.choose(PLAIN, "<|channel|>commentary", AUTO, AUTO)
    assert (without.tool_format, without.reasoning_format) == (NONE, NONE), "it lacks the tokens"


def test_variables_of_a_template() -> None:
    """Neither a longer name nor a key of a message is the variable."""
    text = "{% if enable_thinking and tools %}{{ message.thinking }}{{ message['thinking'] }}"
    found = OutputFormat.choose(PLAIN, text, AUTO, AUTO)
    assert found.reads_variable("enable_thinking") and found.reads_variable("tools")
    assert not found.reads_variable("thinking")


def test_channels() -> None:
    """The tokens say it, whatever the template is."""
    found = OutputFormat.choose(harmony_tokenizer(), "", AUTO, AUTO)
    assert (found.tool_format, found.reasoning_format, found.tags) == (OPENAI, HARMONY, None)
    stream = found.open_stream("", ParserSettings(parameters={}), 1)([], (), 0)
    assert isinstance(stream, ChannelStream)
    with pytest.raises(ValueError, match=r"tool_parser = 'hermes': must be auto or openai: "):
        OutputFormat.choose(harmony_tokenizer(), "", "hermes", AUTO)
    with pytest.raises(ValueError, match=r"reasoning_parser = 'none': must be auto or openai_"):
        OutputFormat.choose(harmony_tokenizer(), "", AUTO, NONE)
    with pytest.raises(ValueError, match=r"tool_parser = 'openai': must be another: "):
        OutputFormat.choose(PLAIN, "", OPENAI, AUTO)


def test_delimiters_that_are_special_tokens() -> None:
    """Kimi's are: a decoder would drop them, and the calls would be content."""
    tokenizer = train_bpe(["functions"], 300)
    names = (ARGUMENTS, BEGIN, CALL_BEGIN, CALL_END, END)
    tokenizer.add_special_tokens([AddedToken(name) for name in names])
    found = OutputFormat.choose(tokenizer, BEGIN, AUTO, AUTO)
    stream = found.open_stream("", ParserSettings(parameters={"f": {}}), None)([], (), 0)
    text = f"{BEGIN}{CALL_BEGIN}functions.f:0{ARGUMENTS}{{}}{CALL_END}{END}"
    events = [event for token in tokenizer.encode(text).ids for event in stream.push([token])]
    assert ToolCallBegin(0, "functions.f:0", "f") in events + stream.flush()


def test_tokens_that_end_a_reasoning() -> None:
    """Kimi's calls may begin in a reasoning; those of Hermes are part of it."""
    tokenizer = train_bpe(["functions"], 300)
    tokenizer.add_special_tokens([AddedToken(BEGIN), AddedToken("<tool_call>")])
    kimi = OutputFormat.choose(tokenizer, f"{BEGIN} <think>", AUTO, AUTO)
    assert kimi.call_token_ids == (tokenizer.token_to_id(BEGIN),)
    assert OutputFormat.choose(tokenizer, "<tool_call> <think>", AUTO, AUTO).call_token_ids == ()
    assert OutputFormat.choose(PLAIN, f"{BEGIN} <think>", AUTO, AUTO).call_token_ids == ()
