"""Tokens of samples: the served format, and the tokens to learn by the template's spans or by
growing prefixes.
"""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers, processors

from jmoe.config import DataConfig
from jmoe.config.train import TrainOn
from jmoe.data.sample_encoder import EncodedSample, SampleEncoder, make_sample_encoder
from jmoe.data.samples import parse_sample
from jmoe.data.tokenizer import load_tokenizer
from jmoe.models.chat_template import ChatTemplate
from jmoe.models.tokenizer_file import open_tokenizer
from tests.chat_models import CHATML, LISTED, MARKED_CHATML, VOCAB_SIZE, say, write_chat_tokenizer

MASKS = Path(__file__).parents[1] / "fixtures" / "answer_masks.json"
# leaves out the reasoning of all answers but the last, as Qwen3 and DeepSeek do
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encoder_of(folder: Path, template: str | None, train_on: TrainOn = "answers") -> SampleEncoder:
    write_chat_tokenizer(folder, template)
    tokenizer = load_tokenizer(folder / "tokenizer.json", VOCAB_SIZE, encode_control=True)
    return make_sample_encoder(DataConfig(path=("x",), train_on=train_on), tokenizer)


def encode(encoder: SampleEncoder, record: Any) -> EncodedSample:
    (sample,) = encoder.encode([parse_sample(record, "text")])
    assert isinstance(sample, EncodedSample), sample
    return sample


def error_of(encoder: SampleEncoder, record: Any) -> str:
    (error,) = encoder.encode([parse_sample(record, "text")])
    assert isinstance(error, ValueError)
    return str(error)


def learned(encoder: SampleEncoder, sample: EncodedSample) -> list[str]:
    """The runs of text to learn."""
    tokenizer, runs, before = encoder.tokenizer.tokenizer, [[]], False
    for token, trained in zip(sample.ids.tolist(), sample.trained.tolist(), strict=True):
        if trained:
            runs[-1].append(token)
        elif before:
            runs.append([])
        before = trained
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


TURNS = say("hi", "héllo", "and <|im_end|>?", "fine 漢")


@pytest.mark.parametrize("template", [CHATML, MARKED_CHATML])
def test_answers_with_their_end_are_learned(tmp_path: Path, template: str) -> None:
    """Also by a template without `{% generation %}`; the newline after the end token is not: the
    server stops at the token.
    """
    encoder = encoder_of(tmp_path, template)
    assert learned(encoder, encode(encoder, TURNS)) == ["héllo<|im_end|>", "fine 漢<|im_end|>"]
    weighted = {"messages": [dict(m) for m in TURNS["messages"]]}
    weighted["messages"][1]["weight"] = 0
    assert learned(encoder, encode(encoder, weighted)) == ["fine 漢<|im_end|>"]
    last = encoder_of(tmp_path, template, "last_answer")
    unanswered = {"messages": [*TURNS["messages"], {"role": "user", "content": "more"}]}
    assert learned(last, encode(last, unanswered)) == ["fine 漢<|im_end|>"]
    everything = encoder_of(tmp_path, template, "all")
    assert encode(everything, TURNS).trained.all()


def test_tokens_are_those_that_the_server_reads(tmp_path: Path) -> None:
    """Row A4: text that spells a control token is that token in the text of the template, in a
    message, and where only tokenizer_config.json lists it.
    """
    encoder = encoder_of(tmp_path, CHATML)
    record = say("<|im_start|> x", "y", tools=[{"name": "f"}])
    served = open_tokenizer(tmp_path / "tokenizer.json")
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    text = template.render(record["messages"], add_generation_prompt=False, tools=record["tools"])  # type: ignore[arg-type]
    expected = served.encode(text, add_special_tokens=False).ids
    assert encode(encoder, record).ids.tolist() == expected
    assert expected.count(served.token_to_id("<|im_start|>")) == 3
    assert expected[0] == served.token_to_id(LISTED) == VOCAB_SIZE - 1
    # what is served before the answer is what was trained before it
    prompt = template.render(record["messages"][:1], tools=record["tools"])  # type: ignore[arg-type,index]
    before = served.encode(prompt, add_special_tokens=False).ids
    sample = encode(encoder, record)
    assert sample.trained.tolist().index(True) == len(before)
    assert sample.ids[: len(before)].tolist() == before


@pytest.mark.parametrize("name", sorted(json.loads(MASKS.read_text())))
def test_equals_transformers(tmp_path: Path, name: str) -> None:
    """`apply_chat_template(return_assistant_tokens_mask=True)`; see `make_answer_masks.py`."""
    expected = json.loads(MASKS.read_text())[name]
    encoder = encoder_of(tmp_path, MARKED_CHATML)
    sample = encode(encoder, {"messages": expected["messages"]})
    assert sample.ids.tolist() == expected["input_ids"]
    assert sample.trained.astype(int).tolist() == expected["assistant_masks"]


def test_plain_texts_end_with_the_end_of_text(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, None)
    sample = encode(encoder, {"prompt": "ask ", "completion": "tell"})
    assert learned(encoder, sample) == ["tell<|endoftext|>"]
    whole = encode(encoder, {"text": "all of it"})
    assert whole.trained.all() and whole.ids[-1] == encoder.tokenizer.eot
    everything = encoder_of(tmp_path, None, "all")
    assert encode(everything, {"prompt": "ask ", "completion": "tell"}).trained.all()


def change_settings(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_plain_texts_begin_as_served(tmp_path: Path) -> None:
    """With the tokenizer's BOS, as `/v1/completions` reads a prompt; a chat has its template's."""
    without = encode(encoder_of(tmp_path, CHATML), TURNS)
    bos = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    change_settings(tmp_path, bos_token="<|im_start|>", **bos)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json", VOCAB_SIZE, encode_control=True)
    encoder = make_sample_encoder(DataConfig(path=("x",)), tokenizer)
    served = open_tokenizer(tmp_path / "tokenizer.json")
    sample = encode(encoder, {"prompt": "ask ", "completion": "tell"})
    assert sample.ids.tolist() == [*served.encode("ask tell").ids, tokenizer.eot]
    assert sample.ids[0] == served.token_to_id("<|im_start|>")
    assert learned(encoder, sample) == ["tell<|endoftext|>"]
    assert encode(encoder, {"text": "all"}).trained.tolist() == [False, True, True, True, True]
    assert encode(encoder, TURNS).ids.tolist() == without.ids.tolist()


@pytest.mark.parametrize("first", [[], ["<|im_start|>"]])
def test_an_end_that_the_tokenizer_appends_is_no_beginning(
    tmp_path: Path, first: list[str]
) -> None:
    folder = write_chat_tokenizer(tmp_path)
    served = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = "<|endoftext|>"
    served.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", end],
        special_tokens=[(text, served.token_to_id(text)) for text in (*first, end)],
    )
    served.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder / "tokenizer.json", VOCAB_SIZE, encode_control=True)
    encoder = make_sample_encoder(DataConfig(path=("x",)), tokenizer)
    sample = encode(encoder, {"text": "all of it"})
    assert sample.ids.tolist() == served.encode("all of it").ids


def test_a_role_whose_token_covers_the_space_of_the_answer(tmp_path: Path) -> None:
    """An added token with rstrip, as Phi-3's, is the prompt's, and not learned with the answer."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}<|tool|>{{ m.content }}<|im_end|>"
    template += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|tool|>{% endif %}"
    encoder_of(tmp_path, template)
    token = {"content": LISTED, "special": True, "normalized": False, "rstrip": True}
    change_settings(tmp_path, added_tokens_decoder={str(VOCAB_SIZE - 1): token})
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json", VOCAB_SIZE, encode_control=True)
    encoder = make_sample_encoder(DataConfig(path=("x",)), tokenizer)
    assert learned(encoder, encode(encoder, say("q", "  hi"))) == ["hi<|im_end|>"]


def test_all_samples_have_one_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the preparation, also after midnight."""
    day = iter(range(1, 9))

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Clock":
            return cls(2026, 1, next(day))

    monkeypatch.setattr("jmoe.models.chat_template.datetime", Clock)
    monkeypatch.setattr("jmoe.data.sample_encoder.datetime", Clock)
    encoder = encoder_of(tmp_path, "{{ strftime_now('%d') }}" + CHATML)
    texts = [encode(encoder, TURNS) for _ in range(2)]
    assert texts[0].ids.tolist() == texts[1].ids.tolist()


def test_a_template_that_forgets(tmp_path: Path) -> None:
    record = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            {"role": "user", "content": "p"},
            {"role": "assistant", "content": "b", "reasoning_content": "s"},
        ]
    }
    encoder = encoder_of(tmp_path, FORGETFUL)
    assert error_of(encoder, record) == (
        "messages[1]: the chat template renders this answer, or what is before it, otherwise once"
        " later messages follow (many leave out old reasoning); --data.train-on last_answer learns"
        " the last answer of each conversation"
    )
    last = encoder_of(tmp_path, FORGETFUL, "last_answer")
    assert learned(last, encode(last, record)) == ["<think>s</think>b<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "record", "said"),
    [
        (None, TURNS, "the tokenizer's folder has no chat template; give data.chat_template, or"),
        (CHATML, say("only a question"), "messages: has no answer to learn"),
        (
            CHATML,
            {"messages": [{"role": "assistant", "content": "hi"}]},
            "messages[0]: an answer before any question cannot be learned; give it weight 0",
        ),
        ("{{ raise_exception('roles') }}", TURNS, "roles"),
        ("no message", TURNS, "has no token to learn"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<think>{% endif %}",
            say("q", "a"),
            "messages[1]: the chat template begins this answer otherwise than its prompt ends",
        ),
        (
            MARKED_CHATML,
            {"messages": [{"role": "user", "content": "\ufdd0"}, *TURNS["messages"]]},  # type: ignore[misc]
            "messages: hold U+FDD0 or U+FDD1, no characters; remove them",
        ),
        ("{% generation %}{% endgeneration %}x", TURNS, "has no token to learn"),
    ],
)
def test_what_cannot_be_learned_says_why(
    tmp_path: Path, template: str | None, record: Any, said: str
) -> None:
    assert said in error_of(encoder_of(tmp_path, template), record)


SPACED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}Answer: {% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer: {% endif %}"
)


def join_bytes(folder: Path, *pairs: str) -> None:
    """Give the tokenizer of bytes a token for each pair of its symbols, in place of a byte that no
    UTF-8 text has.
    """
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    model, symbols = stored["model"], pre_tokenizers.ByteLevel(add_prefix_space=False)
    for pair, unused in zip(pairs, "\xf8\xf9\xfa", strict=False):
        ((symbol, _),) = symbols.pre_tokenize_str(pair)
        model["vocab"][symbol] = model["vocab"].pop(unused)
        model["merges"].append(list(symbol))
    file.write_text(json.dumps(stored))


@pytest.mark.parametrize("template", [SPACED, re.sub(r"{% (end)?generation %}", "", SPACED)])
def test_a_prompt_whose_last_token_would_join_the_answer(tmp_path: Path, template: str) -> None:
    """A prompt that ends with a space, or with a line's end before an answer that begins with one,
    has other tokens alone than before the answer.
    """
    write_chat_tokenizer(tmp_path, template)
    join_bytes(tmp_path, " t", "\n\n")

    def make(template: str) -> SampleEncoder:
        (tmp_path / "chat_template.jinja").write_text(template)
        tokenizer = load_tokenizer(tmp_path / "tokenizer.json", VOCAB_SIZE, encode_control=True)
        return make_sample_encoder(DataConfig(path=("x",)), tokenizer)

    said = "messages[{}]: the prompt that the chat template makes for this answer ends with {!r},"
    spaced = make(template)
    assert error_of(spaced, say("hi", "the")).startswith(said.format(1, "Answer: "))
    assert learned(spaced, encode(spaced, say("hi", "a"))) == ["a<|im_end|>"]  # nothing to join
    second = error_of(spaced, say("hi", "a", "ho", "the"))
    assert second.startswith(said.format(3, "Answer: "))
    lines = make(template.replace("Answer: ", "Answer:\n"))
    assert error_of(lines, say("hi", "\n\nthe")).startswith(said.format(1, "Answer:\n"))
    # a prompt without the space: the trained tokens are the served ones
    unspaced = make(template.replace("%}Answer: {% endif", "%}Answer:{% endif"))
    assert learned(unspaced, encode(unspaced, say("hi", "the"))) == [" the<|im_end|>"]


def test_a_template_of_parts_gets_parts(tmp_path: Path) -> None:
    """As from the server; given a string it would render nothing of it."""
    parts = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    plain = encode(encoder_of(tmp_path, CHATML), TURNS)
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + parts + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encoder = encoder_of(tmp_path, template)
    assert encode(encoder, TURNS).ids.tolist() == plain.ids.tolist()
    assert learned(encoder, encode(encoder, TURNS)) == ["héllo<|im_end|>", "fine 漢<|im_end|>"]


def test_a_template_of_its_own(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path, CHATML)
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json", VOCAB_SIZE, encode_control=True)
    config = DataConfig(path=("x",), chat_template=str(tmp_path / "mine.jinja"), train_on="all")
    encoder = make_sample_encoder(config, tokenizer)
    sample = encode(encoder, say("q", "a"))
    assert Tokenizer.decode(tokenizer.tokenizer, sample.ids.tolist()) == "[q][a]"
    missing = DataConfig(path=("x",), chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ValueError, match=r"data.chat_template = '.*none.jinja': no such file"):
        make_sample_encoder(missing, tokenizer)
