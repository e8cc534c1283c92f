"""Messages -> prompt text by the model's own Jinja template, rendered as transformers renders
it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jmoe.models.folder import has_file, read_text
from jmoe.models.tokenizer_file import SETTINGS, read_settings, special_tokens

DEFAULT, TOOL_USE = "default", "tool_use"
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
# What a message's reasoning is called; templates read the first, those of gpt-oss the second.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

CONTENT_FORM = b""  # asks a fork for `ChatTemplate.content_form`
_TEXT, _REFUSED = b"=", b"!"  # how an answer of a fork begins


class ChatTemplate:
    """A model's chat templates, by name; `tool_use` is for requests with tools where there is one.

    The templates come with the model and are untrusted: they run in Jinja's sandbox and see plain
    JSON values only.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], source: str
    ) -> None:
        """Compile `templates` (name -> Jinja source). source: where they are from, for errors,
        which are `ValueError`.

        special_tokens: `bos_token` and so on, as variables of the template.
        """
        if DEFAULT not in templates:
            raise ValueError(
                f"{source}: chat templates {sorted(templates)}: one must be named {DEFAULT!r}"
            )
        self.special_tokens, self._source = dict(special_tokens), source
        environment = _environment()
        self._templates = {}
        for name, text in templates.items():
            try:
                self._templates[name] = environment.from_string(text)
            except TemplateSyntaxError as error:
                raise ValueError(
                    f"{self._called(name)}: line {error.lineno}: {error.message}"
                ) from error

    @cached_property
    def content_form(self) -> Literal["string", "parts"] | None:
        """The form in which the template shows a message's content, found by a probe; None if it
        shows neither.

        Templates of models that also see images loop over parts; of a string they would get
        characters.
        """
        probe = "jmoe probes its content"
        if self._shows(probe, probe):
            return "string"
        return "parts" if self._shows(probe, [{"type": "text", "text": probe}]) else None

    def _shows(self, probe: str, content: Any) -> bool:
        """Whether the probe is part of what the template makes of a conversation with this
        content.
        """
        system, user = ({"role": role, "content": content} for role in ("system", "user"))
        # some refuse a conversation without a system message
        for messages in ([user], [system, user]):
            with contextlib.suppress(ValueError):
                return probe in self.render(messages)
        return False

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """Return a Hugging Face folder's templates, None if it has none; `ValueError` for files
        that are damaged.
        """
        setup = read_templates(folder)
        return None if setup is None else cls(**setup)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt for a conversation in the OpenAI API's form; further variables go to
        the template.

        A message's keys whose value is None are left out: many templates would print them.
        Everything must be plain JSON values. `ValueError` if it is not, or with what the template
        itself refuses, or where it fails.
        """
        name = TOOL_USE if tools is not None and TOOL_USE in self._templates else DEFAULT
        if not messages:
            raise ValueError("messages = []: must not be empty")
        context = {
            "messages": [
                _with_reasoning({k: v for k, v in m.items() if v is not None}) for m in messages
            ],
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            # A copy without objects: whatever has methods could be a way out of the sandbox.
            plain = json.loads(json.dumps(context))
        except TypeError as error:
            raise ValueError(f"{self._called(name)}: not JSON values: {error}") from error
        try:
            return self._templates[name].render({**self.special_tokens, **plain})
        except MemoryError:
            raise
        except Exception as error:  # a template can raise anything a Python expression can
            reason = (
                error.message
                if isinstance(error, TemplateError)
                else f"{type(error).__name__}: {error}"
            )
            raise ValueError(f"{self._called(name)}: {reason}") from error

    def _called(self, name: str) -> str:
        return (
            f"chat template of {self._source}"
            if name == DEFAULT
            else f"chat template {name!r} of {self._source}"
        )


def read_templates(folder: Path) -> dict[str, Any] | None:
    """Return the arguments of `ChatTemplate` for a Hugging Face folder, None if it has no
    templates.

    `chat_template.jinja` and `additional_chat_templates/NAME.jinja` replace `chat_template` of
    tokenizer_config.json: a template, or a list of `{"name": ..., "template": ...}`. `ValueError`
    for files that are damaged.
    """
    config = read_settings(folder / SETTINGS)
    additional = folder / TEMPLATE_FOLDER
    if os.path.lexists(additional) and not additional.is_dir():
        raise ValueError(f"{additional}: must be a folder of templates, or not be there")
    templates = {path.stem: path for path in sorted(additional.glob("*.jinja")) if has_file(path)}
    if has_file(folder / TEMPLATE_FILE):
        templates[DEFAULT] = folder / TEMPLATE_FILE
    texts = {name: read_text(path) for name, path in templates.items()}
    texts = texts or _templates_of(config.get("chat_template"), folder)
    return (
        {
            "templates": texts,
            "special_tokens": special_tokens(config, folder),
            "source": str(folder),
        }
        if texts
        else None
    )


def begin_rendering(**setup: Any) -> Callable[[bytes], bytes]:
    """Return what a fork answers: to `CONTENT_FORM`, or arguments of `ChatTemplate.render` as
    JSON; see `rendered`.
    """
    template = ChatTemplate(**setup)

    def answer(question: bytes) -> bytes:
        if question == CONTENT_FORM:
            return _TEXT + (template.content_form or "").encode()
        try:
            return _TEXT + template.render(**json.loads(question)).encode("utf-8", "surrogatepass")
        except ValueError as error:
            cause = error.__cause__ or error
            said = cause.message if isinstance(cause, TemplateError) else None
            return _REFUSED + json.dumps([str(error), said]).encode()

    return answer


def rendered(answer: bytes) -> str:
    """Return the prompt that a fork answered with; `RefusedError` where it could not render one."""
    kind, text = answer[:1], answer[1:]
    if kind == _REFUSED:
        raise RefusedError(*json.loads(text))
    return text.decode("utf-8", "surrogatepass")


class RefusedError(ValueError):
    """A template did not render. said: what it says itself, None where it failed."""

    def __init__(self, message: str, said: str | None) -> None:
        super().__init__(message)
        self.said = said


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is only a block."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ).set_lineno(line)


class _Namespace(Namespace):
    """Jinja's `namespace` without attributes by which Python looks up how an object behaves."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *rest = args  # so that `namespace(self=...)` works, as with Jinja's own
        values = dict(*rest, **attributes)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not have an attribute {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the Jinja dialect of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": _Namespace,
    }
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under the names that templates read."""
    reasoning = next((message[field] for field in REASONING_FIELDS if field in message), None)
    return (
        message
        if reasoning is None
        else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def _templates_of(entry: Any, folder: Path) -> dict[str, str]:
    """Return `chat_template` of tokenizer_config.json: absent, a template, or a list of named
    ones.
    """
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {DEFAULT: entry}
    if _named_templates(entry):
        return {one["name"]: one["template"] for one in entry}
    raise ValueError(
        f"{folder / SETTINGS}: chat_template must be a string or a list of {{name, template}}"
    )


def _named_templates(entry: Any) -> bool:
    return isinstance(entry, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("name"), str)
        and isinstance(one.get("template"), str)
        for one in entry
    )
