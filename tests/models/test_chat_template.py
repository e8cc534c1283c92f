"""Chat templates: what transformers renders, read from a folder in every form, and nothing that
leaves the sandbox.
"""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from jmoe.models.chat_template import (
    DEFAULT_CALL_FORM,
    CallForm,
    ChatTemplate,
    developer_as_system,
)

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "chat_templates"
CONVERSATIONS = {
    name: one
    for file in ("conversations.json", "agent_conversations.json")
    for name, one in json.loads((FIXTURES / file).read_text()).items()
}
RENDERINGS = json.loads((FIXTURES / "renderings.json").read_text())
HELLO = [{"role": "user", "content": "hello"}]


def chat_template(text: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, {"bos_token": "<s>"}, "models/some")


@pytest.mark.parametrize("conversation", sorted(CONVERSATIONS))
@pytest.mark.parametrize("family", sorted(RENDERINGS))
def test_equals_transformers(family: str, conversation: str) -> None:
    template = ChatTemplate.from_folder(FIXTURES / family)
    assert template is not None
    expected = RENDERINGS[family][conversation]
    if "error" in expected:
        with pytest.raises(ValueError) as raised:
            template.render(**CONVERSATIONS[conversation])
        assert str(raised.value).endswith(expected["error"])
        assert str(FIXTURES / family) in str(raised.value)
    else:
        text = template.render(**CONVERSATIONS[conversation])
        assert text.replace(date.today().isoformat(), "<today>") == expected["text"]


def test_input_is_left_as_it_was() -> None:
    conversation = CONVERSATIONS["tools"]
    before = json.dumps(conversation)
    template = ChatTemplate.from_folder(FIXTURES / "gpt_oss")
    assert template is not None
    template.render(**conversation)
    assert json.dumps(conversation) == before


def test_folder_without_template(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "chat_template": null}')
    assert ChatTemplate.from_folder(tmp_path) is None


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("{", "tokenizer_config.json: not readable JSON"),
        ("[]", "tokenizer_config.json: must be a JSON object"),
        ('{"chat_template": 1}', "chat_template must be a string or a list of {name, template}"),
        (
            '{"chat_template": [{"name": "default"}]}',
            "chat_template must be a string or a list of {name, template}",
        ),
        (
            '{"chat_template": [{"name": "rag", "template": ""}]}',
            r"\['rag'\]: one must be named 'default'",
        ),
        (
            '{"chat_template": [{"name": "default", "template": "a"},'
            ' {"name": "default", "template": "b"}]}',
            "chat_template has several templates of name 'default': keep one",
        ),
        ('{"chat_template": "\\n{% if %}"}', "chat template of .*: line 2: Expected an expression"),
        (
            '{"chat_template": "{% for x in y %}"}',
            "chat template of .*: line 1: Unexpected end of template",
        ),
    ],
)
def test_damaged_folder_is_refused(tmp_path: Path, config: str, complaint: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=complaint):
        ChatTemplate.from_folder(tmp_path)


def test_two_files_of_the_default_template_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("a")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("b")
    words = r"default\.jinja: chat_template\.jinja is the template 'default' too: remove one"
    with pytest.raises(ValueError, match=words):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ '%s' | format(self.__init__.__globals__) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__html__=1) }}",
        "{{ namespace({'_x': 1}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages.clear() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_way_out_of_the_sandbox_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^chat template of models/some: "):
        chat_template(text).render(HELLO)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''['__class__'] }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
    ],
)
def test_what_the_sandbox_hides_is_undefined(text: str) -> None:
    assert chat_template(text).render(HELLO) == ""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "{{ raise_exception('Conversation roles must alternate') }}",
            "Conversation roles must alternate",
        ),
        ("{{ messages[5].content + 'x' }}", "list object has no element 5"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_failure_says_which_template_and_why(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"^chat template of models/some: ") as raised:
        chat_template(text).render(HELLO)
    assert complaint in str(raised.value)


@pytest.mark.parametrize("value", [object(), Path("/"), b"bytes", {1, 2}])
def test_objects_never_reach_a_template(value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON values"):
        chat_template("{{ messages }}").render([{"role": "user", "content": value}])
    with pytest.raises(ValueError, match="not JSON values"):
        chat_template("{{ x }}").render(HELLO, x=value)


def test_no_messages() -> None:
    with pytest.raises(ValueError, match=r"messages = \[\]: must not be empty"):
        chat_template("x").render([])


def test_variables_replace_special_tokens() -> None:
    assert chat_template("{{ bos_token }}").render(HELLO) == "<s>"
    assert chat_template("{{ bos_token }}").render(HELLO, bos_token="<b>") == "<b>"


LOOP = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ 1 // 0 }}{%"
    " endif %}{% endfor %}"
)
FIRST_IS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('x') }}{% endif %}" + LOOP
)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (LOOP, "parts"),
        (EITHER, "string"),
        (FIRST_IS_SYSTEM, "parts"),
        ("{{ messages[0].role }}", None),
        ("", None),
    ],
)
def test_what_a_template_takes_content_as(text: str, form: str | None) -> None:
    assert chat_template(text).content_form == form


@pytest.mark.parametrize("family", sorted(RENDERINGS))
def test_templates_of_text_models_take_strings(family: str) -> None:
    template = ChatTemplate.from_folder(FIXTURES / family)
    assert template is not None and template.content_form == "string"


def test_the_dialect_ends_where_transformers_does() -> None:
    """A namespace of a dict is one; a filter that transformers lacks is refused by its name,
    when it is compiled.
    """
    assert (
        chat_template("{% set n = namespace({'a': 1}) %}{% set n.a = n.a + 1 %}{{ n.a }}").render(
            HELLO
        )
        == "2"
    )
    with pytest.raises(ValueError, match="No filter named 'fromjson'"):
        chat_template("{{ '{}' | fromjson }}")


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3", CallForm(has_objects=True, has_content=True)),
        ("glm45", CallForm(has_objects=True, has_content=True)),
        ("kimi_k2", CallForm(has_objects=True, has_content=True)),
        ("mistral", CallForm(has_objects=True, has_content=True)),
        ("gpt_oss", CallForm(has_objects=True, has_content=True)),
        ("deepseek_v3", CallForm(has_objects=True, has_content=False)),
        ("deepseek_v31", CallForm(has_objects=False, has_content=True)),
        ("olmoe", DEFAULT_CALL_FORM),
    ],
)
def test_the_form_of_tool_calls(family: str, form: CallForm) -> None:
    """Arguments as objects where they are written as JSON, as text where that is appended; no
    content where that tells a call.
    """
    template = ChatTemplate.from_folder(FIXTURES / family)
    assert template is not None and template.call_form == form


@pytest.mark.parametrize(
    ("family", "reads"), [("gpt_oss", True), ("deepseek_v3", False), ("mistral", False)]
)
def test_whether_a_template_reads_the_developer(family: str, reads: bool) -> None:
    template = ChatTemplate.from_folder(FIXTURES / family)
    assert template is not None and template.renders_developer_role == reads


def test_developer_as_system() -> None:
    """Those before all others are one message with the system's, in the form of the content."""

    def say(role: str, content: Any) -> dict[str, Any]:
        return {"role": role, "content": content}

    user = say("user", "?")
    assert developer_as_system([say("system", "A"), say("developer", "B"), user]) == [
        say("system", "A\n\nB"),
        user,
    ]
    assert developer_as_system([user, say("developer", "B")]) == [user, say("system", "B")]
    two = [say("system", "A"), say("system", "B"), user]
    assert developer_as_system(two) == two, "as they came, without the developer"
    parts = [[{"type": "text", "text": text}] for text in "AB"]
    assert developer_as_system([say("developer", parts[0]), say("developer", parts[1])]) == [
        say("system", parts[0] + parts[1])
    ]
