"""Samples as shards and as rows: every sample once, apart from the others, cut or dropped as asked,
resumed to the row.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_corpus import config, write_shard

from jmoe.config import DataConfig
from jmoe.data import __main__ as command
from jmoe.data.chat_files import replace_chat_files
from jmoe.data.corpus import Corpus, prepare_corpus
from jmoe.data.loader import train_batches
from jmoe.data.sample_rows import SampleRows, SourceRows, held_out_rows
from jmoe.data.shards import TRAINED, open_sample_lengths, open_shard
from jmoe.models.chat_template import ChatTemplate
from tests.chat_models import CHATML, VOCAB_SIZE, say, write_chat_tokenizer, write_jsonl

RNG = np.random.default_rng(5)
RECORDS = [
    say(f"question {i} " + "x" * int(RNG.integers(40)), f"answer {i} " + "y" * (i % 23))
    for i in range(90)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_tokenizer(tmp_path_factory.mktemp("model"))


def prepare(model: Path, path: Path, cache: Path, **settings: Any) -> tuple[Corpus, DataConfig]:
    settings = {"tokenizer": str(model / "tokenizer.json"), "held_out_bytes": 1500} | settings
    own = config(path, **settings)
    return prepare_corpus(own, VOCAB_SIZE, cache), own


@pytest.fixture(scope="module")
def chats(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Corpus, Path]:
    folder = tmp_path_factory.mktemp("chats")
    path = write_jsonl(folder / "chats.jsonl", RECORDS)
    return prepare(model, path, folder / "cache")[0], path


def samples_of(rows: list[SampleRows]) -> list[tuple[list[int], list[float]]]:
    """The (tokens, weights of targets) of all samples in rows."""
    samples = []
    for row in rows:
        for number in range(1, int(row.documents.max(initial=0)) + 1):
            (inputs,) = np.nonzero(row.documents == number)
            assert np.array_equal(inputs, np.arange(inputs[0], inputs[-1] + 1))
            end = inputs[-1] + 2
            tokens = row.tokens[inputs[0] : end].tolist()
            samples.append((tokens, row.weights[inputs[0] : end - 1].tolist()))
        # nothing is learned outside of samples
        assert not row.weights[row.documents == 0].any()
    return samples


def stored_samples(corpus: Corpus) -> list[tuple[list[int], list[float]]]:
    source = corpus.sources[0]
    assert source.lengths is not None
    samples = np.split(source.shards[0], np.cumsum(source.lengths[0])[:-1])
    return [
        ((ids & (TRAINED - 1)).tolist(), (ids[1:] >= TRAINED).astype(float).tolist())
        for ids in samples
    ]


def rows_of(corpus: Corpus, length: int, **settings: Any) -> tuple[list[SampleRows], SourceRows]:
    rows = SourceRows(corpus.sources[0], length, corpus, DataConfig(path=("x",), **settings))
    return [rows[i] for i in range(len(rows))], rows


@pytest.mark.parametrize("packed", [True, False])
def test_every_sample_is_in_one_row(chats: tuple[Corpus, Path], packed: bool) -> None:
    corpus, _ = chats
    stored = stored_samples(corpus)
    rows, source = rows_of(corpus, 255, pack_samples=packed)
    assert samples_of(rows) == stored and len(stored) == corpus.sources[0].num_samples
    assert len(rows) == len(stored) if not packed else len(rows) < len(stored) / 2
    counts = source.counts
    assert (counts.samples, counts.rows, counts.long) == (len(stored), len(rows), 0)
    assert counts.tokens == corpus.num_train_tokens
    begin = "<|im_start|>user\nquestion 0 "
    assert corpus.tokenizer is not None
    first = corpus.tokenizer.decode(stored[0][0], skip_special_tokens=False)
    assert first.startswith(begin) and first.endswith(
        "<|im_start|>assistant\nanswer 0 <|im_end|>\n"
    )


def test_long_samples_are_cut_or_dropped(chats: tuple[Corpus, Path]) -> None:
    corpus, _ = chats
    stored = stored_samples(corpus)
    length = 54
    long = [s for s in stored if len(s[0]) > length + 1]
    cut = [(tokens[: length + 1], weights[:length]) for tokens, weights in stored]
    learned = [(tokens, weights) for tokens, weights in cut if any(weights)]
    assert 0 < len(long) < len(stored) and len(learned) < len(cut)
    rows, source = rows_of(corpus, length)
    assert samples_of(rows) == learned
    words = source.counts.describe(length, DataConfig())
    unlearned = len(stored) - len(learned)
    assert words.endswith(
        f"% filled; {len(long)} were longer and are cut, {unlearned} of them dropped, as no token"
        " to learn is left"
    )
    drop = DataConfig(path=("x",), long_samples="drop")
    rows, source = rows_of(corpus, length, long_samples="drop")
    assert samples_of(rows) == [s for s in stored if len(s[0]) <= length + 1]
    assert source.counts.describe(length, drop).endswith(
        f"% filled; {len(long)} were longer and are dropped"
    )


def test_batches_resume_to_the_row(chats: tuple[Corpus, Path]) -> None:
    corpus, _ = chats
    shape = {"batch_size": 4, "sequence_length": 255, "seed": 3, "config": DataConfig(path=("x",))}
    batches = train_batches(corpus, **shape)  # type: ignore[arg-type]
    taken = [next(batches) for _ in range(9)]
    state = batches.get_state()
    rest = [next(batches) for _ in range(9)]
    again = train_batches(corpus, **shape)  # type: ignore[arg-type]
    again.set_state(json.loads(json.dumps(state)))
    for one in rest:
        for a, b in zip(next(again), one, strict=True):
            np.testing.assert_array_equal(a, b)
    halves = [train_batches(corpus, **shape, process_index=i, process_count=2) for i in range(2)]  # type: ignore[arg-type]
    for one in taken:
        for a, b in zip(zip(*map(next, halves), strict=True), one, strict=True):
            np.testing.assert_array_equal(np.concatenate(a), b)


def test_held_out_samples_are_evaluated_once(chats: tuple[Corpus, Path]) -> None:
    corpus, _ = chats
    batches = list(held_out_rows(corpus, 255, 4, DataConfig(path=("x",))))
    assert all(batch.tokens.shape == (4, 256) for batch in batches)
    rows = [SampleRows(*row) for batch in batches for row in zip(*batch, strict=True)]
    held_out = samples_of(rows)
    trained = {tuple(tokens) for tokens, _ in stored_samples(corpus)}
    assert len(held_out) + len(trained) == len(RECORDS)
    assert not trained & {tuple(tokens) for tokens, _ in held_out}
    with pytest.raises(ValueError, match="no held-out sample has a token to learn within so many"):
        next(held_out_rows(corpus, 8, 4, DataConfig(path=("x",))))


@pytest.mark.parametrize("weight", [None, 1.0])
def test_rows_without_a_token_to_learn(chats: tuple[Corpus, Path], weight: float | None) -> None:
    """Where every sample is cut within its prompt, a longer row is what helps."""
    corpus, _ = chats
    source = dataclasses.replace(corpus.sources[0], weight=weight)
    number = len(stored_samples(corpus))
    said = (
        f"batch_size = 2: the data has only 0 samples in 0 rows of .*; {number} were longer and are"
        f" cut, {number} of them dropped, as no token to learn is left; give more .* a larger seq"
    )
    if weight is not None:
        said = f"data.path = '{source.name}': no sample has a token to learn within sequence_length"
    with pytest.raises(ValueError, match=said):
        train_batches(
            dataclasses.replace(corpus, sources=[source]),
            batch_size=2,
            sequence_length=4,
            seed=0,
            config=DataConfig(path=("x",)),
        )


def test_shards_of_samples_train_as_their_records(
    chats: tuple[Corpus, Path], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, path = chats
    out = tmp_path / "shards"
    arguments = [path, "--out", out, "--tokenizer", model / "tokenizer.json"]
    assert command.main([*map(str, arguments), "--held-out-bytes", "1500"]) == 0
    assert f"{corpus.num_train_tokens} tokens to train on" in capsys.readouterr().out
    shards = prepare_corpus(config(out), VOCAB_SIZE, tmp_path / "cache")
    assert shards.fingerprint == corpus.fingerprint
    assert stored_samples(shards) == stored_samples(corpus)
    assert not (tmp_path / "cache").exists()
    (out / "train-00000.lengths").rename(tmp_path / "lengths")
    with pytest.raises(ValueError, match=r"train-00000.bin: lacks train-00000.lengths beside it"):
        prepare_corpus(config(out), VOCAB_SIZE, tmp_path / "cache")
    shutil.copy(out / "held_out.lengths", out / "train-00000.lengths")
    with pytest.raises(ValueError, match=r"train-00000.lengths: belongs to another shard"):
        open_sample_lengths(out / "train-00000.bin", open_shard(out / "train-00000.bin").header)
    with pytest.raises(ValueError, match=r"data.train_on = 'all': must be 'answers' without sam"):
        prepare_corpus(config(out, train_on="all"), VOCAB_SIZE, tmp_path / "cache")


def test_another_template_or_mask_is_another_corpus(model: Path, tmp_path: Path) -> None:
    """Tokens of an earlier start are taken only for the same template and tokens to learn."""
    path = write_jsonl(tmp_path / "chats.jsonl", RECORDS[:30])
    cache = tmp_path / "cache"
    first, _ = prepare(model, path, cache)
    written = (cache / "train-00000.bin").stat().st_mtime_ns
    assert prepare(model, path, cache)[0].fingerprint == first.fingerprint
    assert (cache / "train-00000.bin").stat().st_mtime_ns == written
    everything, _ = prepare(model, path, cache, train_on="all")
    assert everything.fingerprint != first.fingerprint
    other = write_chat_tokenizer(tmp_path / "other", CHATML.replace("|im_start|>", "|im_start|> "))
    assert prepare(other, path, cache)[0].fingerprint not in (
        first.fingerprint,
        everything.fingerprint,
    )


def test_the_place_of_a_template_is_no_part_of_the_corpus(model: Path, tmp_path: Path) -> None:
    """Hosts may have it under other paths, and share the prepared tokens."""
    path = write_jsonl(tmp_path / "chats.jsonl", RECORDS[:30])
    cache, template = tmp_path / "cache", tmp_path / "mine.jinja"
    template.write_text(CHATML)
    prepare(model, path, cache, chat_template=str(template))
    written = (cache / "train-00000.bin").stat().st_mtime_ns
    moved = template.rename(tmp_path / "moved.jinja")
    prepare(model, path, cache, chat_template=str(moved))
    assert (cache / "train-00000.bin").stat().st_mtime_ns == written


def test_tokens_that_only_settings_list_are_part_of_the_corpus(tmp_path: Path) -> None:
    model = write_chat_tokenizer(tmp_path / "model")
    records = [say(f"<|tool|> {i}", "answer") for i in range(30)]
    path = write_jsonl(tmp_path / "chats.jsonl", records)
    first, _ = prepare(model, path, tmp_path / "cache")
    (model / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    second, _ = prepare(model, path, tmp_path / "cache")
    assert second.num_train_tokens > first.num_train_tokens


def test_shards_carry_the_chat_template_of_their_samples(model: Path, tmp_path: Path) -> None:
    """Into the checkpoints of runs that train on them, instead of all templates of the model."""
    path = write_jsonl(tmp_path / "chats.jsonl", RECORDS[:30])
    own = write_chat_tokenizer(tmp_path / "model")
    tools = own / "additional_chat_templates" / "tool_use.jinja"
    tools.parent.mkdir()
    tools.write_text("old")
    (tmp_path / "mine.jinja").write_text(mine := "!" + CHATML)
    out, tokenizer = tmp_path / "shards", str(own / "tokenizer.json")
    arguments = [str(path), "--out", str(out), "--tokenizer", tokenizer, "--held-out-bytes", "1500"]
    assert command.main([*arguments, "--chat-template", str(tmp_path / "mine.jinja")]) == 0
    folder = ChatTemplate.from_folder(out)
    assert folder is not None and folder.render([{"role": "user", "content": "q"}]).startswith("!")
    settings = config(out, tokenizer=tokenizer)
    corpus = prepare_corpus(settings, VOCAB_SIZE, tmp_path / "cache")
    of_model = {f"{tools.parent.name}/{tools.name}": b"old", "generation_config.json": b"{}"}
    files = replace_chat_files(of_model, settings, corpus.shard_folders)
    assert files == {
        "chat_template.jinja": mine.encode(),
        "generation_config.json": b"{}",
        "tokenizer_config.json": (own / "tokenizer_config.json").read_bytes(),
    }
    # records beside the shards, by the model's own template
    with pytest.raises(ValueError, match=r"have another chat template or tokenizer_config.json"):
        replace_chat_files({}, settings, [out, tmp_path])
    # records alone
    of_records = replace_chat_files(of_model, settings, [tmp_path])
    assert of_records["additional_chat_templates/tool_use.jinja"] == b"old"
    assert of_records["chat_template.jinja"] == CHATML.encode()


def test_bad_samples_are_all_named(model: Path, tmp_path: Path) -> None:
    """What is wrong with records, and with what the template makes of them."""
    bad = [*RECORDS[:40]]
    bad[3] = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}
    bad[7] = {"id": 7}
    path = write_jsonl(tmp_path / "chats.jsonl", bad)
    with path.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(ValueError) as error:
        prepare(model, path, tmp_path / "cache")
    said = str(error.value)
    assert "3 problem(s) in 1 file(s) of text; nothing was written" in said
    assert f"{path}:4: messages[1]: the answer is empty" in said
    assert f"{path}:8: has id; must have messages" in said
    assert f"{path}:41: not JSON" in said
    assert not (tmp_path / "cache").exists()
    unanswered = [*RECORDS[:40]]
    unanswered[5] = unanswered[39] = say("only a question")
    path = write_jsonl(tmp_path / "chats.jsonl", unanswered)
    with pytest.raises(ValueError) as error:
        prepare(model, path, tmp_path / "cache")
    said = str(error.value)
    assert "2 problem(s)" in said and not (tmp_path / "cache" / "manifest.json").exists()
    for line in (6, 40):
        assert f"{path}:{line}: messages: has no answer to learn" in said


def test_samples_beside_text(model: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [*RECORDS[:20], {"text": "a text as it is"}])
    corpus, _ = prepare(model, path, tmp_path / "cache")
    assert corpus.sources[0].num_samples + corpus.held_out_samples.num_samples == 21  # type: ignore[union-attr]
    (tmp_path / "a.txt").write_text("words\n" * 99)
    mixed = config(path, tmp_path / "a.txt", tokenizer=str(model / "tokenizer.json"))
    words = r"a.txt is text beside the samples of .*chats.jsonl; give samples alone"
    with pytest.raises(ValueError, match=words):
        prepare_corpus(mixed, VOCAB_SIZE, tmp_path / "cache")
    write_shard(tmp_path / "text.bin", list(range(50)))
    mixed = config(path, tmp_path / "text.bin", tokenizer=str(model / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"text.bin': is text beside the samples of"):
        prepare_corpus(mixed, VOCAB_SIZE, tmp_path / "cache")
    with pytest.raises(ValueError, match=r"data.train_on = 'all': must be 'answers' without samp"):
        prepare_corpus(config(tmp_path / "a.txt", train_on="all"), VOCAB_SIZE, tmp_path / "cache")
    with pytest.raises(ValueError, match=r"data.long_samples = 'drop': must be 'cut' without samp"):
        prepare_corpus(
            config(tmp_path / "a.txt", long_samples="drop"), VOCAB_SIZE, tmp_path / "cache"
        )


PAIRS = [
    {"prompt": f"question {i}", "chosen": "y" * (1 + i % 23), "rejected": "n" * (1 + i * 5 % 29)}
    for i in range(60)
]


def test_pairs_share_a_row(model: Path, tmp_path: Path) -> None:
    """Both answers of a pair are samples of one row, with the reference's log-probability at the
    first target to learn; shards hold the same.
    """
    path = write_jsonl(tmp_path / "pairs.jsonl", PAIRS)
    corpus, own = prepare(model, path, tmp_path / "cache", preferences=True)
    (reference,) = corpus.sources[0].reference_log_probs
    reference[:] = -1 - np.arange(len(reference))
    rows = SourceRows(corpus.sources[0], 99, corpus, own)
    all_rows = [rows[i] for i in range(len(rows))]
    assert samples_of(all_rows) == stored_samples(corpus) and len(reference) % 2 == 0
    assert all(row.documents.max() % 2 == 0 for row in all_rows)
    assert rows.counts.samples == len(reference) and rows.counts.rows < len(reference) / 2
    seen = []
    for i, row in enumerate(all_rows):
        places = np.flatnonzero(row.reference)
        firsts = [
            np.flatnonzero((row.documents == n) & (row.weights > 0))[0]
            for n in range(1, row.documents.max() + 1)
        ]
        assert places.tolist() == firsts
        shard, samples = rows.samples_of_row(i)
        assert shard == 0 and row.reference[places].tolist() == reference[samples].tolist()
        seen += samples.tolist()
    assert seen == list(range(len(reference)))
    out = tmp_path / "shards"
    arguments = [path, "--out", out, "--tokenizer", model / "tokenizer.json", "--preferences"]
    assert command.main([*map(str, arguments), "--held-out-bytes", "1500"]) == 0
    shards = prepare_corpus(config(out, preferences=True), VOCAB_SIZE, tmp_path / "none")
    assert shards.fingerprint == corpus.fingerprint
    with pytest.raises(ValueError, match=r"data.preferences = False: must be True with shards of"):
        prepare_corpus(config(out), VOCAB_SIZE, tmp_path / "none")


def test_long_pairs(model: Path, tmp_path: Path) -> None:
    """Each answer of a pair that is too long is cut to half a row; pairs that are equal then, or
    without a token to learn, are dropped.
    """
    records = [
        {"prompt": "q", "chosen": "a" * 50, "rejected": "b" * 50},
        {"prompt": "q", "chosen": "a" * 50 + "b", "rejected": "a" * 50 + "c"},
        {"prompt": "p" * 40, "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "b" * 30},
    ]
    path = write_jsonl(tmp_path / "pairs.jsonl", records * 20)
    corpus, own = prepare(model, path, tmp_path / "cache", preferences=True, held_out_bytes=500)
    rows = SourceRows(corpus.sources[0], 39, corpus, own)
    lengths = [len(tokens) for tokens, _ in samples_of([rows[i] for i in range(len(rows))])]
    assert {*lengths} == {20, 3, 32}
    assert lengths.count(20) == rows.counts.long - rows.counts.unlearned > 0
    with pytest.raises(ValueError, match=r"pairs.jsonl:3: chosen: the prompt has 40 tokens, more"):
        prepare(model, path, tmp_path / "other", preferences=True, max_prompt_tokens=19)


def test_bad_pairs_are_named_by_line(model: Path, tmp_path: Path) -> None:
    bad = [{"prompt": "q", "chosen": "a"}, {"prompt": "q", "chosen": "a", "rejected": "a"}]
    path = write_jsonl(tmp_path / "pairs.jsonl", PAIRS[:3] + bad)
    with pytest.raises(ValueError) as error:
        prepare(model, path, tmp_path / "cache", preferences=True)
    assert f"{path}:4: rejected: is missing" in str(error.value)
    assert f"{path}:5: chosen, rejected: are equal" in str(error.value)
    chats = write_jsonl(tmp_path / "chats.jsonl", RECORDS[:9])
    with pytest.raises(ValueError, match=r"chats.jsonl:1: chosen: is missing from a preference"):
        prepare(model, chats, tmp_path / "cache", preferences=True)
    with pytest.raises(ValueError, match=r"pairs.jsonl:1: chosen, rejected: is a preference"):
        prepare(model, path, tmp_path / "cache")
