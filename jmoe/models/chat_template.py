"""Renders chat messages to a prompt with the model's Jinja template, as transformers does.

Template code is untrusted: the server runs `make_fork_renderer` in the forks of a `ForkServer`.
`render_with_answers` also says which text the assistant wrote, for training.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jmoe.models.folder import has_file, read_text
from jmoe.models.tokenizer_file import (
    SETTINGS,
    find_additional_chat_templates,
    read_json_if_present,
    special_token_texts,
)
from jmoe.types import Json, JsonObject

DEFAULT, TOOL_USE = "default", "tool_use"
TEMPLATE_FILE = "chat_template.jinja"
# Names of a message's reasoning. Most templates read the first, gpt-oss's the second.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

# Noncharacters of Unicode, which stand around the text of `{% generation %}` while it is rendered.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")

# the question that returns `ChatTemplate.content_form`, `renders_developer_role` and `call_form`
FORMS = b""
_TEXT, _REFUSED = b"=", b"!"  # first byte of a fork's answer


class CallForm(NamedTuple):
    """The form in which a template reads an assistant's message with tool calls.

    has_objects: arguments are JSON objects, not their text. has_content: a message without content
    has an empty string as content, not none at all.
    """

    has_objects: bool
    has_content: bool


DEFAULT_CALL_FORM = CallForm(has_objects=True, has_content=True)


class RenderedAnswers(NamedTuple):
    """A rendered conversation. spans: (start, end) of the assistant's text, in characters."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """A model's chat templates by name. A request with tools uses the template `tool_use` if there
    is one.

    Templates are untrusted model files: they run in Jinja's sandbox and receive plain JSON values
    only.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        source: str,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile the templates.

        Raises ValueError for a syntax error, or if no template is named "default".

        templates: name -> Jinja source.
        special_tokens: further template variables, e.g. `bos_token`.
        source: origin of the templates in error messages, e.g. the folder.
        now: returns the time that a template writes by `strftime_now`.
        """
        if DEFAULT not in templates:
            raise ValueError(
                f"{source}: chat templates {sorted(templates)}: one must be named {DEFAULT!r}"
            )
        self.special_tokens, self._source = dict(special_tokens), source
        self._texts, self._now = dict(templates), now
        self._templates = self._compile(_GenerationTag)

    def _compile(self, generation_tag: type[_GenerationTag]) -> dict[str, Template]:
        """Return the compiled templates by name. Raises ValueError for a syntax error."""
        environment, compiled = _jinja_environment(generation_tag, self._now), {}
        for name, text in self._texts.items():
            try:
                compiled[name] = environment.from_string(text)
            except TemplateSyntaxError as error:
                raise ValueError(
                    f"{self._template_label(name)}: line {error.lineno}: {error.message}"
                ) from error
        return compiled

    @cached_property
    def _marking_templates(self) -> dict[str, Template]:
        """The templates with `_BEGIN` and `_END` around the text of `{% generation %}`."""
        return self._compile(_MarkingGenerationTag)

    @cached_property
    def marks_answers(self) -> bool:
        """Whether each template has `{% generation %}` around the assistant's text."""
        return all(_GENERATION.search(text) for text in self._texts.values())

    @cached_property
    def content_form(self) -> Literal["string", "parts"] | None:
        """The form in which the template expects a message's content: "string" or "parts"; None if
        it shows neither.

        Found by rendering probe messages. Templates of multimodal models iterate over parts; given
        a string, they would iterate over its characters.
        """
        probe = "jmoe probes its content"
        if self._renders_probe(probe, probe):
            return "string"
        return "parts" if self._renders_probe(probe, [{"type": "text", "text": probe}]) else None

    @cached_property
    def call_form(self) -> CallForm:
        """The form in which the template expects tool calls of earlier messages; the default if it
        shows none of them.

        Found by rendering probe calls: some templates write an object of arguments as JSON, others
        append their text, and DeepSeek's tells calls by a message without content.
        """
        forms = (
            CallForm(objects, content) for objects in (True, False) for content in (True, False)
        )
        return next(filter(self._renders_call, forms), DEFAULT_CALL_FORM)

    @cached_property
    def renders_developer_role(self) -> bool:
        """Whether the template writes messages of the role "developer", found by a probe: most
        drop or refuse them.
        """
        probe = "jmoe probes its roles"
        as_parts = self.content_form == "parts"
        messages: list[JsonObject] = [
            {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
            for role, text in (("developer", probe), ("user", "?"))
        ]
        with contextlib.suppress(ValueError):
            return probe in self.render(messages)
        return False

    def _renders_call(self, form: CallForm) -> bool:
        """Whether a call in this form is rendered with its arguments once quoted."""
        arguments: Json = {"probe": "jmoe"}
        name = "jmoe_probes_calls"
        function = {
            "name": name,
            "arguments": arguments if form.has_objects else json.dumps(arguments),
        }
        call = {"id": "probe0001", "type": "function", "function": function}
        answer: JsonObject = {"role": "assistant", "tool_calls": [call]}
        as_parts = self.content_form == "parts"

        def say(role: str, text: str) -> JsonObject:
            return {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}

        if form.has_content:
            answer |= say("assistant", "")
        result = {**say("tool", "1"), "tool_call_id": "probe0001", "name": name}
        with contextlib.suppress(ValueError):
            text = self.render([say("user", "?"), answer, result])
            _, called, after = text.partition(name)
            return bool(called) and "probe" in after and '\\"probe' not in after
        return False

    def _renders_probe(self, probe: str, content: Json) -> bool:
        """Whether the rendered prompt contains `probe` if `content` is a message's content."""
        system, user = ({"role": role, "content": content} for role in ("system", "user"))
        # some templates reject a conversation without a system message
        for messages in ([user], [system, user]):
            with contextlib.suppress(ValueError):
                return probe in self.render(messages)
        return False

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """Return the templates of a Hugging Face model folder, None if it has none.

        Raises ValueError for damaged files.
        """
        setup = read_templates(folder)
        return None if setup is None else cls(**setup)

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Json]] | None = None,
        documents: Sequence[Mapping[str, Json]] | None = None,
        **variables: Json,
    ) -> str:
        """Return the prompt text for a conversation in the OpenAI API's format.

        Keys of a message whose value is None are left out, because many templates would print
        "None". A message's reasoning is passed under the names that templates read.

        Raises ValueError if there are no messages, if an argument is not a JSON value, or if the
        template raises an error.

        variables: further variables of the template.
        """
        variables = {
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        return self._render(self._templates, messages, variables)

    def render_with_answers(
        self, messages: Sequence[Mapping[str, Json]], **variables: Json
    ) -> RenderedAnswers:
        """Return the text of a whole conversation, and the spans of the assistant's text in it by
        the template's `{% generation %}`; no spans if it has none.

        Raises ValueError as `render`, and for noncharacters of Unicode in the conversation, which
        mark the spans.

        variables: as for `render`.
        """
        written = json.dumps([messages, variables], ensure_ascii=False)
        if _BEGIN in written or _END in written:
            raise ValueError("messages: hold U+FDD0 or U+FDD1, no characters; remove them")
        variables = {"tools": None, "documents": None, "add_generation_prompt": False} | variables
        marked = self._render(self._marking_templates, messages, variables)
        text, spans = "", list[tuple[int, int]]()
        for piece in marked.split(_BEGIN):
            answer, ends, after = piece.partition(_END)
            if ends:
                spans.append((len(text), len(text) + len(answer)))
            text += answer + after
        return RenderedAnswers(text, spans)

    def _render(
        self,
        templates: Mapping[str, Template],
        messages: Sequence[Mapping[str, Json]],
        variables: Mapping[str, Json],
    ) -> str:
        """Return the text that one of `templates` makes of the conversation; see `render`."""
        name = TOOL_USE if variables["tools"] is not None and TOOL_USE in templates else DEFAULT
        if not messages:
            raise ValueError("messages = []: must not be empty")
        context = {
            "messages": [
                _copy_reasoning_for_templates({k: v for k, v in m.items() if v is not None})
                for m in messages
            ],
            **variables,
        }
        try:
            # A copy of plain values: methods of other objects could allow a sandbox escape.
            plain = json.loads(json.dumps(context))
        except TypeError as error:
            raise ValueError(f"{self._template_label(name)}: not JSON values: {error}") from error
        try:
            return templates[name].render({**self.special_tokens, **plain})
        except MemoryError:
            raise
        except Exception as error:  # a template can raise anything a Python expression can
            reason = (
                error.message
                if isinstance(error, TemplateError)
                else f"{type(error).__name__}: {error}"
            )
            raise ValueError(f"{self._template_label(name)}: {reason}") from error

    def _template_label(self, name: str) -> str:
        return (
            f"chat template of {self._source}"
            if name == DEFAULT
            else f"chat template {name!r} of {self._source}"
        )


def developer_as_system(messages: list[JsonObject]) -> list[JsonObject]:
    """Return messages of a chat with those of the developer as the system's.

    The system's and the developer's messages before all others are one, since many templates read
    no other.
    """
    renamed = [
        message | {"role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]
    leading = list(itertools.takewhile(lambda message: message["role"] == "system", renamed))
    if renamed == messages or len(leading) < 2:
        return renamed
    contents = [message["content"] for message in leading]
    if all(isinstance(content, str) for content in contents):
        content: Json = "\n\n".join(contents)
    else:
        content = list(itertools.chain.from_iterable(contents))
    return [leading[0] | {"content": content}, *renamed[len(leading) :]]


def read_templates(folder: Path) -> JsonObject | None:
    """Return the keyword arguments of `ChatTemplate` for a Hugging Face model folder, None if it
    has no templates.

    `chat_template.jinja` and `additional_chat_templates/NAME.jinja` take precedence over
    `chat_template` of tokenizer_config.json, which is a template or a list of `{"name": ...,
    "template": ...}`. Raises ValueError for damaged files.
    """
    config = read_json_if_present(folder / SETTINGS)
    templates = find_additional_chat_templates(folder)
    if has_file(folder / TEMPLATE_FILE):
        if DEFAULT in templates:
            raise ValueError(
                f"{templates[DEFAULT]}: {TEMPLATE_FILE} is the template {DEFAULT!r} too: remove one"
            )
        templates[DEFAULT] = folder / TEMPLATE_FILE
    texts = {name: read_text(path) for name, path in templates.items()}
    texts = texts or _templates_from_config(config.get("chat_template"), folder)
    return (
        {
            "templates": texts,
            "special_tokens": special_token_texts(config, folder),
            "source": str(folder),
        }
        if texts
        else None
    )


def make_fork_renderer(**setup: Json) -> Callable[[bytes], bytes]:
    """Return the function that answers a fork's questions (the `begin` of a `ForkServer`).

    A question is `FORMS`, or the arguments of `ChatTemplate.render` as JSON.
    `decode_rendering` decodes the answers.

    setup: arguments of `ChatTemplate`.
    """
    template = ChatTemplate(**setup)

    def answer_question(question: bytes) -> bytes:
        if question == FORMS:
            forms = template.content_form, template.renders_developer_role, *template.call_form
            return _TEXT + json.dumps(forms).encode()
        try:
            return _TEXT + template.render(**json.loads(question)).encode("utf-8", "surrogatepass")
        except ValueError as error:
            cause = error.__cause__ or error
            said = cause.message if isinstance(cause, TemplateError) else None
            return _REFUSED + json.dumps([str(error), said]).encode()

    return answer_question


def decode_rendering(answer: bytes) -> str:
    """Return the text in a fork's answer. Raises `RenderingError` if the fork reports an error."""
    kind, text = answer[:1], answer[1:]
    if kind == _REFUSED:
        raise RenderingError(*json.loads(text))
    return text.decode("utf-8", "surrogatepass")


class RenderingError(ValueError):
    """The template could not be rendered.

    said: the message of an error that the template raised itself, None for any other failure.
    """

    def __init__(self, message: str, said: str | None) -> None:
        super().__init__(message)
        self.said = said


class _GenerationTag(Extension):
    """Parses `{% generation %}`, which stands around the assistant's text, as a plain block."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return self.make_block(body).set_lineno(line)

    def make_block(self, body: list[nodes.Node]) -> nodes.Node:
        """Return the node that renders the tag's content."""
        return nodes.Scope(body)


class _MarkingGenerationTag(_GenerationTag):
    """Writes `_BEGIN` before and `_END` after the text of `{% generation %}`."""

    def make_block(self, body: list[nodes.Node]) -> nodes.Node:
        return nodes.CallBlock(self.call_method("mark"), [], [], body)

    @staticmethod
    def mark(caller: Callable[[], str]) -> str:
        """Return the text of the tag's content between the marks."""
        return _BEGIN + caller() + _END


class _SandboxedNamespace(Namespace):
    """Jinja's `namespace`, but attributes with a leading underscore are an error.

    Python looks up special methods by such names, so they could be a way out of the sandbox.
    """

    def __init__(*args: object, **attributes: object) -> None:
        self, *rest = args  # so that `namespace(self=...)` works, as with Jinja's own
        values = dict(*rest, **attributes)
        for name in values:
            _refuse_underscore_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_underscore_name(name)
        super().__setitem__(name, value)


def _refuse_underscore_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not have an attribute {name!r}")


def _jinja_environment(
    generation_tag: type[_GenerationTag], now: Callable[[], datetime]
) -> ImmutableSandboxedEnvironment:
    """Return a sandboxed Jinja environment with the extensions and functions of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation_tag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: now().strftime(form),
        "namespace": _SandboxedNamespace,
    }
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return unescaped JSON; Jinja's own `tojson` escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _copy_reasoning_for_templates(message: JsonObject) -> JsonObject:
    """Return the message with its reasoning, from the first of `REASONING_FIELDS` that it has,
    copied to `thinking` and `reasoning_content`, which templates read; unchanged if it has none.
    """
    reasoning = next((message[field] for field in REASONING_FIELDS if field in message), None)
    return (
        message
        if reasoning is None
        else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def _templates_from_config(entry: Json, folder: Path) -> dict[str, str]:
    """Return the templates in `chat_template` of tokenizer_config.json, by name.

    entry: None, one template, or a list of named templates. Raises ValueError for anything else.
    """
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {DEFAULT: entry}
    if _is_list_of_named_templates(entry):
        names = [one["name"] for one in entry]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"{folder / SETTINGS}: chat_template has several templates of name {twice!r}:"
                " keep one"
            )
        return {one["name"]: one["template"] for one in entry}
    raise ValueError(
        f"{folder / SETTINGS}: chat_template must be a string or a list of {{name, template}}"
    )


def _is_list_of_named_templates(entry: Json) -> bool:
    return isinstance(entry, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("name"), str)
        and isinstance(one.get("template"), str)
        for one in entry
    )
