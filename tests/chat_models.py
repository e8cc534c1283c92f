"""Small chat models' folders: a byte-level tokenizer with control tokens, and a chat template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# a control token that only tokenizer_config.json lists
LISTED = "<|tool|>"
VOCAB_SIZE = 256 + len(CONTROL) + 1
CHATML = (
    "{%- if tools %}<|tool|>{{ tools | tojson }}\n{% endif %}"
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_chat_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """Write a tokenizer whose tokens are bytes, and a chat template; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            str(VOCAB_SIZE - 1): {"content": LISTED, "special": True, "normalized": False}
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def say(*contents: str, **fields: object) -> dict[str, object]:
    """Return a record of a conversation that the user begins."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": messages, **fields}


def write_jsonl(path: Path, records: object) -> Path:
    """Write records as JSONL; return the path."""
    assert isinstance(records, list)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
