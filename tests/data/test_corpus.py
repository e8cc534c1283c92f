"""From text to tokens: shards, tokenizer, split and cache, on real files and with real
processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from text_corpus import REPOSITORY, config, finish, start, write_shard, write_texts
from tokenizers import Tokenizer, models

from jmoe.config import DataConfig
from jmoe.data import corpus as corpus_module
from jmoe.data import loader, text_checks, text_files, text_pieces, tokenizing_job
from jmoe.data.__main__ import main
from jmoe.data.corpus import Corpus, PreparationRole, prepare_corpus
from jmoe.data.loader import unigram_bits_per_byte, xz_bits_per_byte
from jmoe.data.shards import (
    TEMPORARY,
    open_shard,
    remove_stale_temporaries,
    replace_content_durably,
    writing_shard,
)
from jmoe.data.tokenizer import load_tokenizer, train_bpe
from tests.fuse import Lack, fuse


def quiet(what: str, done: int, total: int) -> None:
    """A `Report` for nobody."""


def decode(corpus: Corpus, ids: Iterable[int]) -> str:
    assert corpus.tokenizer is not None
    return corpus.tokenizer.decode(
        [int(i) for i in ids if i != corpus.eot], skip_special_tokens=False
    )


def train_text(corpus: Corpus, source: int = 0) -> str:
    ids = np.concatenate(corpus.sources[source].shards)
    return decode(corpus, ids)


# Token shards


@pytest.mark.parametrize("ahead_s", [0, 7200, -7200])
def test_what_killed_writers_left_goes_by_the_clock_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """A host whose clock is ahead must not remove what another host writes now."""
    old, new = (tmp_path / f".{name}{TEMPORARY}" for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (new.stat().st_atime, new.stat().st_mtime - 5400))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s)
    remove_stale_temporaries(tmp_path)
    assert list(tmp_path.iterdir()) == [new]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_shard_round_trip(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    ids = [1, vocab_size - 1, 5, 0]
    shard = open_shard(write_shard(tmp_path / "a.bin", ids, vocab_size))
    header = shard.header
    assert (header.dtype, header.count, header.vocab_size, header.text_bytes) == (
        dtype,
        5,
        vocab_size,
        7,
    )
    assert shard.ids.tolist() == [0, *ids]
    shard.blocks.check_ids(0, 5)
    shard.blocks.check_all(header)
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o022, 0o002])
def test_the_umask_says_who_may_read_text_and_tokens(tmp_path: Path, umask: int) -> None:
    """Private text stays private, and a cache can be shared."""
    before = os.umask(umask)
    try:
        write_shard(tmp_path / "a.bin", [1, 2])
        replace_content_durably(tmp_path / "held_out.txt", b"x")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~umask}


@pytest.mark.parametrize("lack", ["shared_mappings", "modes"])
def test_a_shard_on_fuse(tmp_path: Path, lack: Lack) -> None:
    """With direct_io, as some network disks are mounted; and where files have no modes."""
    with fuse(tmp_path / "disk", tmp_path / "mount", lack) as mount:
        shard = open_shard(write_shard(mount / "a.bin", list(range(1, 250)) * 100))
        assert shard.ids[1:].tolist() == list(range(1, 250)) * 100
        shard.blocks.check_all(shard.header)
        assert not shard.ids.flags.writeable


def test_a_shard_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    """As one whose disk fails: the mapping would end the process with SIGBUS, without a word."""
    path = write_shard(tmp_path / "a.bin", list(range(1, 250)) * 4000)
    code = """if True:
        import os, sys
        from pathlib import Path
        from jmoe.data.shards import open_shard
        shard = open_shard(Path(sys.argv[1]))
        os.truncate(sys.argv[1], 100_000)
        shard.blocks.check_ids(0, 1000)
        for check in (
            lambda: shard.blocks.check_ids(900_000, 900_100),
            lambda: shard.blocks.check_all(shard.header),
        ):
            try:
                check()
            except OSError as error:
                print(error)
    """
    done = finish(start(code, path))
    assert done.count("cannot be read: the disk or its server fails, or the file was cut") == 2
    assert done.count(str(path)) == 2


def test_failed_shard_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(OverflowError),
        writing_shard(
            tmp_path / "a.bin", vocab_size=300, eot=0, tokenizer="t", split="train"
        ) as writer,
    ):
        writer.append([70000], text_bytes=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda b: b[:-2],
            "is truncated: 4106 bytes, but its header says 4 tokens, i.e. 4108 bytes",
        ),
        (
            lambda b: b[:4096] + b"\x05" + b[4097:],
            "this token shard is damaged: its content is not what was written",
        ),
        (lambda b: b[:-1] + bytes([b[-1] ^ 1]), "the sums at its end are not what was written"),
        (lambda b: b[:100], "truncated inside its header"),
        (lambda b: b + b"xx", "foreign data at its end"),
        (lambda b: b"\x93NUMPY" + b[6:], "not a token shard"),
        (lambda b: b"", "not a token shard"),
        (lambda b: b.replace(b'"count"', b'"cuont"'), "lacks count"),
        (lambda b: b.replace(b"uint16", b"uint99"), "dtype = 'uint99'"),
        (lambda b: b[:12] + b"!" + b[13:], "is no JSON"),
    ],
)
def test_damaged_shard(tmp_path: Path, damage: object, message: str) -> None:
    path = write_shard(tmp_path / "a.bin", [1, 2, 0])
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ValueError, match=message) as error:
        prepare_corpus(config(path), 300, tmp_path / "cache")
    assert str(path) in str(error.value)


def flip(path: Path, token: int, count: int = 300) -> None:
    """Set so many tokens from this one on to others that the vocabulary has."""
    with path.open("r+b") as file:
        file.seek(4096 + 2 * token)
        data = np.frombuffer(file.read(2 * count), np.uint16)
        file.seek(4096 + 2 * token)
        file.write((data ^ 1).tobytes())


def test_a_large_shard_is_checked_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows before and after the damage are as they were; one over it is an error that names
    file and bytes.
    """
    monkeypatch.setattr(corpus_module, "HASHED_BYTES", 1000)
    ids = np.random.default_rng(0).integers(1, 300, 200_000)
    path = write_shard(tmp_path / "a.bin", ids.tolist(), text_bytes=10**6)
    flip(path, 100_000)
    windows = loader._TokenWindows(
        prepare_corpus(config(path), 300, tmp_path / "cache").sources[0], 100, 300
    )
    for index in (0, 500, 1500):
        assert windows[index].tolist() == [0, *ids.tolist()][100 * index : 100 * index + 101]
    with pytest.raises(
        ValueError,
        match=r"a\.bin: this token shard is damaged in bytes 196608 to 262144 of its ids",
    ):
        windows[1001]
    flip(path, 199_900, 50)  # of the held-out part
    with pytest.raises(ValueError, match=r"a\.bin: this token shard is damaged in bytes"):
        prepare_corpus(config(path), 300, tmp_path / "cache")


def test_a_shard_without_sums_of_blocks_is_checked_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of older versions have none."""
    path = write_shard(tmp_path / "a.bin", list(range(1, 290)), text_bytes=1000)
    content = path.read_bytes()[:-4]
    sums = json.loads(content[12 : 12 + int.from_bytes(content[8:12], "little")])["block_sums"]
    path.write_bytes(content.replace(f', "block_sums": "{sums}"'.encode(), b" " * (len(sums) + 18)))
    monkeypatch.setattr(corpus_module, "HASHED_BYTES", 0)
    prepare_corpus(config(path), 300, tmp_path / "cache")
    flip(path, 20, 3)
    with pytest.raises(ValueError, match=r"a\.bin: this token shard is damaged: its content"):
        prepare_corpus(config(path), 300, tmp_path / "cache")


def test_damaged_tokens_of_a_run_are_prepared_again(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = prepare_corpus(config(texts), 400, tmp_path)
    whole = [(tmp_path / name).read_bytes() for name in ("train-00000.bin", "held_out.bin")]
    for name in ("train-00000.bin", "held_out.bin"):
        flip(tmp_path / name, 50, 20)
        again = prepare_corpus(config(texts), 400, tmp_path)
        assert again.fingerprint == before.fingerprint
        assert (
            f"{tmp_path}: the prepared text is damaged, it is prepared again"
            in capsys.readouterr().out
        )
        assert [
            (tmp_path / name).read_bytes() for name in ("train-00000.bin", "held_out.bin")
        ] == whole


# Tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a  b\t\n\r\n  c ",
        "déjà vu 漢字 \U0001f600\u2028",
        "\ufeffx\x00\x7f",
        "x<|endoftext|>y",
        "\u0301 ٣ ﬁ İ",
    ],
)
def test_bpe_is_lossless(corpus: Corpus, text: str) -> None:
    assert corpus.tokenizer is not None
    ids = corpus.tokenizer.encode(text, add_special_tokens=False).ids
    assert corpus.eot == 0
    assert 0 not in ids
    assert decode(corpus, ids) == text


def test_bpe_is_deterministic_and_of_the_given_size(texts: Path) -> None:
    lines = [path.read_text() for path in sorted(texts.rglob("*.txt"))]
    first, second = train_bpe(lines, 300), train_bpe(lines, 300)
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 300
    with pytest.raises(ValueError, match=r"model.vocab_size = 256: must be at least 257"):
        train_bpe(lines, 256)


def test_tokenizer_mistakes(tmp_path: Path, texts: Path) -> None:
    def check(path: Path, vocab_size: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            prepare_corpus(config(texts, tokenizer=str(path)), vocab_size, tmp_path / "cache")

    path = tmp_path / "tokenizer.json"
    check(path, 300, r"data.tokenizer = '.*tokenizer.json': no such file")
    path.write_text("{}")
    check(path, 300, "not a readable tokenizer.json")
    tokenizer = train_bpe(["abc abc"], 300)
    tokenizer.save(str(path))
    check(path, 250, r"vocabulary of \d+ tokens exceeds model.vocab_size = 250")
    path.write_text(path.read_text().replace("<|endoftext|>", "<unknown>"))
    check(path, 300, r"has no end-of-text token; looked for <\|endoftext\|>")


LETTERS = {character: number for number, character in enumerate("abcdefghijklmnopqrstuvwxyz .")}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            models.BPE(vocab=LETTERS | {"</s>": 28}, merges=[]),
            "has no token for 'é', which would be left out of the text",
        ),
        (
            models.WordLevel({"text": 0, "</s>": 1}),
            "Missing .UNK. token .*; give it one for unknown text",
        ),
        (
            models.Unigram([("</s>", 0.0), ("t", -1.0)]),
            "unknown token but .*; give it one for unknown text",
        ),
    ],
    ids=["BPE", "WordLevel", "Unigram"],
)
def test_a_tokenizer_without_a_token_for_unknown_text(
    tmp_path: Path, model: models.Model, message: str
) -> None:
    """Such a BPE leaves out what it does not know: the run would learn, and measure, another
    text.
    """
    (tmp_path / "a.txt").write_text("some text. caf\u00e9\n" * 100)
    Tokenizer(model).save(str(tmp_path / "t.json"))
    options = DataConfig(path=(str(tmp_path / "a.txt"),), tokenizer=str(tmp_path / "t.json"))
    with pytest.raises(
        ValueError, match=rf"data.tokenizer = '{re.escape(str(tmp_path / 't.json'))}': .*{message}"
    ):
        prepare_corpus(options, 512, tmp_path / "cache")


def test_truncation_in_a_tokenizer_file_does_not_cut_documents(tmp_path: Path, texts: Path) -> None:
    tokenizer = train_bpe(["abc abc"], 300)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert (
        len(load_tokenizer(tmp_path / "tokenizer.json", 300).tokenizer.encode("z" * 50).ids) == 50
    )


# Finding and splitting


def test_folder_file_and_glob(tmp_path: Path, texts: Path) -> None:
    def names(pattern: object) -> list[str]:
        return [
            file.name
            for file in text_files.find_text_input(str(pattern), None, "text", quiet).files
        ]

    assert names(texts) == sorted(p.relative_to(texts).as_posix() for p in texts.rglob("*.txt"))
    assert names(texts / "part0" / "doc00.txt") == ["doc00.txt"]
    assert names(texts / "**" / "doc0*.txt")[0] == "part0/doc00.txt"
    (tmp_path / ".hidden").mkdir()
    for name in (".hidden/a.txt", ".b.txt", "image.png", "named.log"):
        (tmp_path / name).write_text("text")
    with pytest.raises(ValueError, match=r"data.path = .*: this folder holds no text"):
        names(tmp_path)
    assert names(tmp_path / "named.log") == ["named.log"]
    with pytest.raises(ValueError, match="no such file or folder, and no file matches"):
        names(tmp_path / "absent*")


def test_one_file_under_two_paths_is_refused(tmp_path: Path, texts: Path) -> None:
    with pytest.raises(ValueError, match=r"doc00.txt is in both .* would be trained on"):
        prepare_corpus(config(texts, texts / "part0" / "doc00.txt"), 300, tmp_path)


def test_one_file_under_two_names_is_refused(tmp_path: Path, texts: Path) -> None:
    """One of the two would be held out, the other trained on."""
    folder = tmp_path / "linked"
    shutil.copytree(texts, folder)
    (folder / "again.txt").symlink_to(folder / "part0" / "doc00.txt")
    with pytest.raises(
        ValueError,
        match=(
            r"data.path: .*(doc00.txt is .*again|again.txt is .*doc00).txt, by a link; its held-out"
            r" part"
        ),
    ):
        prepare_corpus(config(folder), 512, tmp_path / "cache")


@pytest.mark.parametrize("named", [True, False], ids=["file", "in a folder"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "must be a file, and is a pipe, a socket or a device; leave it out"),
        (
            lambda path: path.symlink_to("/dev/zero"),
            "must be a file, and is a pipe, a socket or a device",
        ),
        (lambda path: path.symlink_to("nowhere"), "o such file"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links|no such file"),
    ],
    ids=["pipe", "device", "dangling", "loop"],
)
def test_what_is_no_file_is_named(
    tmp_path: Path, make: Callable[[Path], None], message: str, named: bool
) -> None:
    """Reading a pipe that nobody writes to never ends, nor does reading /dev/zero."""
    (tmp_path / "good.txt").write_text("some text\n" * 100)
    bad = tmp_path / "bad.txt"
    make(bad)
    with pytest.raises(ValueError, match=rf"data.path = '{re.escape(str(bad))}': .*{message}"):
        prepare_corpus(config(bad if named else tmp_path), 512, tmp_path / "cache")


def test_a_name_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("some text\n" * 100)
    with pytest.raises(
        ValueError, match=r"data.path = '.*udcff.txt': must have a name in UTF-8; rename it"
    ):
        prepare_corpus(config(tmp_path), 512, tmp_path / "cache")


def test_files_are_either_trained_on_or_held_out(corpus: Corpus, texts: Path) -> None:
    held, train = corpus.held_out_bytes.decode(), train_text(corpus)
    files = {p.relative_to(texts).as_posix(): p.read_text() for p in texts.rglob("*.txt")}
    assert train == "".join(files[name] for name in sorted(files) if files[name] not in held)
    assert len(held) + len(train) == sum(map(len, files.values()))
    total = sum(p.stat().st_size for p in texts.rglob("*.txt"))
    assert 0.025 * total <= len(corpus.held_out_bytes) <= 0.05 * total
    ids = corpus.held_out_tokens
    assert ids.dtype == np.int32
    assert ids[0] == ids[-1] == corpus.eot
    assert decode(corpus, ids) == held


def test_split_depends_on_names_not_on_the_place(
    tmp_path: Path, texts: Path, corpus: Corpus
) -> None:
    moved = shutil.copytree(texts, tmp_path / "elsewhere")
    again = prepare_corpus(config(moved), 400, tmp_path / "cache")
    assert again.fingerprint == corpus.fingerprint
    assert prepare_corpus(config(moved), 390, tmp_path / "cache2").fingerprint != corpus.fingerprint
    next(moved.rglob("*.txt")).write_text("another text")
    assert prepare_corpus(config(moved), 400, tmp_path / "cache").fingerprint != corpus.fingerprint


def test_text_of_equal_size_and_time_is_prepared_anew(tmp_path: Path, texts: Path) -> None:
    """Where images, Nix or `rsync -a` have set all times alike."""
    copy = shutil.copytree(texts, tmp_path / "texts")
    before = prepare_corpus(config(copy), 400, tmp_path / "cache")
    path = max(copy.rglob("*.txt"), key=lambda path: path.stat().st_size)
    times, text = path.stat(), path.read_text()
    path.write_text(text.translate(str.maketrans("etaoin", "taoine")))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size and path.stat().st_mtime_ns == times.st_mtime_ns
    after = prepare_corpus(config(copy), 400, tmp_path / "cache")
    assert path.read_text() in train_text(after) + after.held_out_bytes.decode()
    assert after.fingerprint != before.fingerprint
    path.write_text(text)
    with pytest.raises(
        TimeoutError, match=r"it is there, but was made from other inputs .* \(names, sizes, text\)"
    ):
        prepare_corpus(
            config(copy), 400, tmp_path / "cache", PreparationRole(is_main=False, wait_s=0.1)
        )


def test_held_out_bytes_is_a_cap(tmp_path: Path, texts: Path) -> None:
    capped = prepare_corpus(config(texts, held_out_bytes=1000), 300, tmp_path)
    assert 500 <= len(capped.held_out_bytes) <= 1000


def test_single_file_is_split_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {i} é\r\n" for i in range(400)), newline="")
    one = prepare_corpus(config(path), 300, tmp_path / "cache")
    content = path.read_bytes().decode()
    assert train_text(one) + one.held_out_bytes.decode() == content
    assert one.held_out_bytes.startswith(b"line ")
    assert 0.03 * len(content) < len(one.held_out_bytes) <= 0.05 * path.stat().st_size


@pytest.mark.parametrize("size", [300, 3_000_000])
def test_text_without_lines_is_split_between_characters(tmp_path: Path, size: int) -> None:
    path = tmp_path / "one.txt"
    path.write_text("漢" * (size // 3))
    one = prepare_corpus(config(path), 260, tmp_path / "cache")
    assert train_text(one) + one.held_out_bytes.decode() == path.read_text()


def test_jsonl(tmp_path: Path) -> None:
    documents = [f"doc {i} é\n" * (1 + i % 3) for i in range(100)]
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"id": i, "body": d}) + "\n\n" for i, d in enumerate(documents)) + "\n\n"
    )
    one = prepare_corpus(config(path, field="body"), 300, tmp_path / "cache")
    assert train_text(one) + one.held_out_bytes.decode() == "".join(documents)
    separators = np.count_nonzero(one.sources[0].shards[0] == 0) + np.count_nonzero(
        one.held_out_tokens == 0
    )
    assert separators == 100 + 2
    assert one.held_out_bytes.startswith(b"doc ")


RECORDS = [{"id": i, "body": f"doc {i} é\n" * (1 + i % 3)} for i in range(100)]


@pytest.mark.parametrize(
    ("name", "indent", "encoding"), [("a.json", None, "utf-8"), ("a.json", 2, "utf-16")]
)
def test_a_json_array_is_read_as_its_records_are_as_jsonl(
    tmp_path: Path, name: str, indent: int | None, encoding: str
) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "lines.json").write_text(lines)
    array = tmp_path / name
    array.write_bytes(
        ("\n" + json.dumps(RECORDS, indent=indent, ensure_ascii=False)).encode(encoding)
    )
    settings = {"field": "body", "encoding": (encoding,)}
    expected = prepare_corpus(config(tmp_path / "a.jsonl", field="body"), 300, tmp_path / "cache")
    for path, how in ((array, settings), (tmp_path / "lines.json", {"field": "body"})):
        read = prepare_corpus(config(path, **how), 300, tmp_path / "other")
        for text in (train_text, lambda corpus: corpus.held_out_bytes.decode()):
            whole = text(read) + text(expected)
            assert len(whole) > 100 and not set('{}[]"') & set(whole)
        assert train_text(read) + read.held_out_bytes.decode() == "".join(
            str(r["body"]) for r in RECORDS
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "x"}, {"ask": "y"}]', r"record 2: data.field = 'text': not in this record, which has: ask"),
        ('["good"]', r"a.json: record 1: data.field = 'text': not in this record, which has: a str, not an object"),
        ('[{"text": 3}]', r"a.json: record 1: data.field = 'text': is a int, not text"),
        ('[{"text": "\\ud800"}]', r"a.json: record 1: data.field = 'text': half a surrogate pair"),
        ('[{"text": "good"},\n oops]', r"a.json: not a JSON array: Expecting value at line 2, column 2"),
        ("[" * 100_000, r"a.json: not a JSON array: nested too deeply to be read"),
        ('{\n "data": [{"text": "good"}]\n}', r"a.json: is JSON, neither an array of records nor one rec"),
    ],
)  # fmt: skip
def test_mistakes_in_json(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        prepare_corpus(config(tmp_path / "a.json"), 300, tmp_path / "cache")
    assert "1 problem(s) in 1 file(s)" in str(error.value) and "--data.encoding" not in str(
        error.value
    )
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("field", ["messages", "conversations"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_conversations_need_the_model_s_tokenizer(tmp_path: Path, name: str, field: str) -> None:
    record = {field: [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    text = json.dumps(record) if name == "a.jsonl" else json.dumps([record])
    (tmp_path / name).write_text(text)
    words = r"data.tokenizer = None: must be the tokenizer.json of the model .* --init-from MODEL"
    with pytest.raises(ValueError, match=words):
        prepare_corpus(config(tmp_path / name), 300, tmp_path / "cache")


def test_a_conversation_among_texts_is_named(tmp_path: Path) -> None:
    lines = [{"text": "some words"}, {"messages": [{"role": "user", "content": "x"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = "a.jsonl:2: data.field = 'text': not in this line, which has: messages; it is a sample"
    with pytest.raises(ValueError, match=words):
        prepare_corpus(config(tmp_path / "a.jsonl"), 300, tmp_path / "cache")


def test_a_folder_without_text_says_what_it_has(tmp_path: Path) -> None:
    for name in ("a.rar", "b.rar", "c.json"):
        (tmp_path / name).write_text("x")
    with pytest.raises(
        ValueError, match=r"this folder holds no text .*; it has 2 \*.rar, 1 \*.json"
    ):
        prepare_corpus(config(tmp_path), 300, tmp_path / "cache")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', r"a.jsonl:51: not JSON"),
        (
            b'{"body": "x", "id": 3}',
            r"a.jsonl:51: data.field = 'text': not in this line, which has: body, id",
        ),
        (b'["x"]', r"a.jsonl:51: data.field = 'text': not in this line, which has: a list"),
        (b'{"text": 3}', r"a.jsonl:51: data.field = 'text': is a int, not text"),
        (b'{"text": "\\ud800"}', r"a.jsonl:51: data.field = 'text': half a surrogate pair"),
        (b'{"text": "\xff"}', r"a.jsonl:51: not UTF-8 at byte 10 of the line"),
        (b"[" * 100_000, r"a.jsonl:51: nested too deeply to be read"),
    ],
)
def test_broken_jsonl_names_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    good = b'{"text": "some text of no importance"}\n'
    path.write_bytes(good * 50 + line + b"\n" + good * 50)
    with pytest.raises(ValueError, match=message):
        prepare_corpus(config(path), 300, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("offset", [10, (1 << 20) + 5, 3 << 19])
def test_text_that_is_not_utf8_names_file_and_byte(tmp_path: Path, offset: int) -> None:
    content = bytearray(("é" * 20 + "\n").encode() * 60000)
    content[offset] = 0xFF
    path = tmp_path / "latin.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"latin.txt: not UTF-8 at byte (\d+)") as error:
        prepare_corpus(config(path), 300, tmp_path / "cache")
    named = int(str(error.value).split("at byte ")[1].split(":")[0])
    assert named in (offset, offset - 1)  # the character that the broken byte belongs to


def test_everything_that_cannot_be_read_is_named_at_once_and_nothing_is_written(
    tmp_path: Path, texts: Path
) -> None:
    """Also what was prepared before stays as it was."""
    mixed, cache = shutil.copytree(texts, tmp_path / "mixed"), tmp_path / "cache"
    prepare_corpus(config(mixed), 300, cache)
    before = {path: path.read_bytes() for path in cache.iterdir()}
    (mixed / "a.txt").write_bytes("naïve café".encode("latin-1"))
    (mixed / "b.md").write_bytes("déjà".encode("cp1252"))
    (mixed / "c.jsonl").write_bytes(
        b'{"text": "good"}\n{"text": 3}\n\n{"body": "x"}\n{"text": "\xff"}\n'
    )
    (mixed / "end.txt").write_bytes("ends amid a character: é".encode()[:-1])
    with pytest.raises(
        ValueError, match=r"data.path: 6 problem\(s\) in 24 file\(s\) of text; nothing was writ"
    ) as error:
        prepare_corpus(config(mixed), 300, cache)
    lines = str(error.value).splitlines()
    assert lines[1:] == [
        f"{mixed / 'a.txt'}: not UTF-8 at byte 2: invalid continuation byte",
        f"{mixed / 'b.md'}: not UTF-8 at byte 1: invalid continuation byte",
        f"{mixed / 'c.jsonl'}:2: data.field = 'text': is a int, not text",
        f"{mixed / 'c.jsonl'}:4: data.field = 'text': not in this line, which has: body",
        f"{mixed / 'c.jsonl'}:5: not UTF-8 at byte 10 of the line: invalid start byte",
        f"{mixed / 'end.txt'}: not UTF-8 at byte 23: unexpected end of data",
        (
            "--data.encoding utf-8 latin-1 reads each file in the first of these encodings that"
            " fits it"
        ),
    ]
    assert {path: path.read_bytes() for path in cache.iterdir()} == before


def test_long_lists_of_problems_are_cut(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 3000)
    with pytest.raises(
        ValueError, match=r"data.path: 1000 or more problem\(s\) in 1 file\(s\)"
    ) as error:
        prepare_corpus(config(tmp_path), 300, tmp_path / "cache")
    lines = str(error.value).splitlines()
    assert len(lines) == 22
    assert lines[20].startswith(f"{tmp_path / 'a.jsonl'}:20: ") and lines[21] == "... and 980 more"


@pytest.mark.parametrize(
    "encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-8-sig", "shift_jis", "gb18030"]
)
def test_encodings(tmp_path: Path, encoding: str) -> None:
    """The same text as that of the same files in UTF-8; where it is split depends on the bytes
    in each.
    """
    words = (
        "漢字かな"
        if encoding in ("utf-16", "utf-16-le", "utf-8-sig", "shift_jis", "gb18030")
        else "déjà vu ÿ"
    )
    text = "".join(f"line {i} {words}\n" for i in range(400))
    lines = "".join(
        json.dumps({"text": f"document {i} {words}\n"}, ensure_ascii=False) + "\n"
        for i in range(50)
    )
    for folder, name in (("utf8", "utf-8"), ("other", encoding)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_bytes(text.encode(name))
        (tmp_path / folder / "b.jsonl").write_bytes(lines.encode(name))
    expected = prepare_corpus(config(tmp_path / "utf8"), 300, tmp_path / "cache")
    read = prepare_corpus(
        config(tmp_path / "other", encoding=(encoding,)), 300, tmp_path / "cache2"
    )
    documents, again = (
        sorted((train_text(one) + one.held_out_bytes.decode()).splitlines())
        for one in (expected, read)
    )
    assert len(documents) == 450 and again == documents


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, encoding: str) -> None:
    """Of text, JSONL and a JSON array: the same tokens as of the files without one, on both sides
    of the split, and nothing of a file that has nothing else.
    """
    lines = "".join(json.dumps({"text": f"document {i} é\n"}) + "\n" for i in range(50))
    contents = {
        "a.txt": "".join(f"line {i} é\n" for i in range(400)),
        "b.jsonl": lines,
        "c.jsonl": json.dumps([{"text": f"record {i}\n"} for i in range(50)]),
        "empty.txt": "",
    }
    contents["c.json"] = contents.pop("c.jsonl")
    for folder, mark in (("without", ""), ("with", "\ufeff")):
        (tmp_path / folder).mkdir()
        for name, text in contents.items():
            (tmp_path / folder / name).write_bytes((mark + text).encode(encoding))
    found = []
    for folder in ("without", "with"):
        paths = [tmp_path / folder, tmp_path / folder / "c.json"]
        settings = config(*paths, encoding=(encoding,), held_out_fraction=0.3)
        found.append(prepare_corpus(settings, 300, tmp_path / f"cache {folder}"))
    for tokens in (lambda c: c.held_out_tokens, lambda c: np.concatenate(c.sources[0].shards)):
        np.testing.assert_array_equal(tokens(found[0]), tokens(found[1]))
    assert train_text(found[1], 1) == train_text(found[0], 1)
    assert "\ufeff" not in train_text(found[1]) + found[1].held_out_bytes.decode()


def test_an_error_of_the_disk_names_the_file(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a file is opened, and amid a large one; reading a process's memory at 0 is such an
    error.
    """
    mixed = shutil.copytree(texts, tmp_path / "mixed")
    (mixed / "bad.txt").symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=r"Input/output error: '.*/mixed/bad\.txt'"):
        prepare_corpus(config(mixed), 300, tmp_path / "cache")
    (tmp_path / "bad.bin").symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=r"Input/output error: '.*/bad\.bin'"):
        open_shard(tmp_path / "bad.bin")
    (tmp_path / "bad.json").symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=r"Input/output error: '.*/bad\.json'"):
        load_tokenizer(tmp_path / "bad.json", 300)
    # what opens is read on: a file whose first bytes alone are readable
    monkeypatch.setattr(text_checks, "binary_format_advice", lambda path: None)
    with pytest.raises(OSError, match=r"Input/output error: '.*/mixed/bad\.txt'"):
        prepare_corpus(config(mixed), 300, tmp_path / "cache")


def test_each_file_is_read_in_the_first_encoding_that_fits(tmp_path: Path, texts: Path) -> None:
    mixed = shutil.copytree(texts, tmp_path / "mixed")
    (mixed / "zz.txt").write_bytes("naïve café\n".encode("latin-1") * 20)
    both = prepare_corpus(config(mixed, encoding=("utf-8", "latin-1")), 300, tmp_path / "cache")
    text = train_text(both) + both.held_out_bytes.decode()
    assert text.count("naïve café\n") == 20 and "漢字" in text and "Ã" not in text
    with pytest.raises(ValueError, match="not UTF-8 at byte 2"):  # another encoding is another job
        prepare_corpus(config(mixed), 300, tmp_path / "cache")
    for wrong in (("latin-7b",), ("base64",), ()):
        with pytest.raises(
            ValueError, match=r"data.encoding = .*: (must be a text encoding|needs at least one)"
        ):
            config(mixed, encoding=wrong)


def test_files_read_and_skipped_are_counted(tmp_path: Path, texts: Path) -> None:
    mixed = shutil.copytree(texts, tmp_path / "mixed")
    for name in ("a.png", "b.png", "Makefile"):
        (mixed / name).write_text("x")
    assert (
        prepare_corpus(config(texts), 300, tmp_path / "cache").describe_input_files()
        == "20 file(s) read"
    )
    read = prepare_corpus(config(mixed), 300, tmp_path / "cache2")
    assert (
        read.describe_input_files()
        == "20 file(s) read, 3 skipped that are no text (2 *.png, 1 Makefile)"
    )


@pytest.mark.parametrize("content", ["", "x"])
def test_too_little_text(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ValueError, match=r"data.path.*too little text"):
        prepare_corpus(config(tmp_path / "a.txt"), 300, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_vocabulary_that_is_too_small_writes_nothing(tmp_path: Path, texts: Path) -> None:
    with pytest.raises(ValueError, match=r"model.vocab_size = 256: must be at least 257"):
        prepare_corpus(config(texts), 256, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_an_absurd_vocabulary_is_refused(tmp_path: Path, texts: Path) -> None:
    """The trainer takes memory for all of it at once: it ended the process without a word about
    the field.
    """
    with pytest.raises(
        ValueError,
        match=r"model.vocab_size = 1000000000: must be at most 4,194,304 .*data.tokenizer",
    ):
        prepare_corpus(config(texts), 10**9, tmp_path / "cache")


@pytest.mark.slow
def test_standard_library(tmp_path: Path) -> None:
    names = [file.name for file in text_files.standard_library_files()]
    assert "inspect.py" in names
    assert not [
        n for n in names if {"test", "tests", "site-packages", "idle_test"} & set(n.split("/"))
    ]
    library = prepare_corpus(DataConfig(held_out_bytes=200_000), 512, tmp_path)
    assert library.num_train_tokens > 1_000_000
    assert 100_000 <= len(library.held_out_bytes) <= 200_000
    assert 1 < xz_bits_per_byte(library) < unigram_bits_per_byte(library) < 8


def test_sample_for_the_tokenizer_is_bounded_and_spread(texts: Path) -> None:
    files = text_files.find_text_input(str(texts), None, "text", quiet).files
    files = text_files.split_off_held_out(files, 0)
    assert "".join(sorted(text_pieces.pick_training_texts(files, 10**9))) == "".join(
        sorted(file.path.read_text() for file in files)
    )
    assert sum(map(len, text_pieces.pick_training_texts(files, 6000))) < 6000 + max(
        file.size_bytes for file in files
    )


# Preparing once, with many processes


PREPARE = """
import sys
from pathlib import Path
from jmoe.config import DataConfig
from jmoe.data.corpus import PreparationRole, prepare_corpus
path, cache, main = sys.argv[1:]
print(prepare_corpus(DataConfig(path=(path,)), 400, Path(cache), PreparationRole(main == "1", wait_s=240)).fingerprint)
"""


def test_tokenised_once_then_mapped(tmp_path: Path, texts: Path, corpus: Corpus) -> None:
    assert prepare_corpus(config(texts), 400, tmp_path).fingerprint == corpus.fingerprint
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert prepare_corpus(config(texts), 400, tmp_path).fingerprint == corpus.fingerprint
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before
    (tmp_path / "train-00000.bin").unlink()
    (tmp_path / "held_out.txt").write_text("damaged")
    assert prepare_corpus(config(texts), 400, tmp_path).fingerprint == corpus.fingerprint
    assert sorted(before) == sorted(p.name for p in tmp_path.iterdir())


def test_other_processes_wait_and_two_runs_do_not_disturb_each_other(
    tmp_path: Path, texts: Path, corpus: Corpus
) -> None:
    others = [start(PREPARE, texts, tmp_path, 0) for _ in range(2)]
    mains = [start(PREPARE, texts, tmp_path, 1) for _ in range(2)]
    assert {finish(process) for process in others + mains} == {corpus.fingerprint}


def test_waiting_has_a_limit_that_names_the_file(tmp_path: Path, texts: Path) -> None:
    other = PreparationRole(is_main=False, wait_s=0.1)
    limit = (
        r"manifest.json: waited 0.1 s \(distributed.start_timeout_s\) without progress of .* it is"
        r" not there"
    )
    with pytest.raises(TimeoutError, match=limit):
        prepare_corpus(config(texts), 400, tmp_path, other)
    prepare_corpus(config(texts), 400, tmp_path)
    with pytest.raises(TimeoutError, match="made from other inputs"):
        prepare_corpus(config(texts), 401, tmp_path, other)


def test_waiting_has_no_limit_while_process_0_goes_on(tmp_path: Path, texts: Path) -> None:
    """The limit counts from the last progress: many times as long goes by here."""
    asked = 0

    def progress() -> int:
        nonlocal asked
        asked += 1
        return min(asked, 20)

    with pytest.raises(TimeoutError):
        prepare_corpus(
            config(texts),
            400,
            tmp_path,
            PreparationRole(is_main=False, wait_s=0.06, progress=progress),
        )
    assert asked > 20


def test_progress_is_told_in_every_phase(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a library works on, and as bytes of what there is to do."""
    told: dict[str, list[tuple[int, int]]] = {}
    train = tokenizing_job.train_bpe

    def slow(*arguments: object) -> object:
        time.sleep(1.5)
        return train(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenizing_job, "train_bpe", slow)
    prepare_corpus(
        config(texts),
        400,
        tmp_path,
        PreparationRole(report=lambda *done: told.setdefault(done[0], []).append(done[1:])),
    )
    assert list(told) == [
        "finding files",
        "comparing the text",
        "checking the text",
        "training the tokenizer",
        "tokenising",
    ]
    size = sum(path.stat().st_size for path in texts.rglob("*.txt"))
    for phase in ("comparing the text", "checking the text", "tokenising"):
        assert told[phase] == sorted(told[phase]) and told[phase][-1] == (size, size)


def test_killed_while_it_tokenises(tmp_path: Path, texts: Path, corpus: Corpus) -> None:
    stop_inside = PREPARE.replace(
        "path, cache",
        "from jmoe.data import tokenizing_job\n"
        "def hang(*_):\n    import time\n    print('inside', flush=True)\n    time.sleep(60)\n"
        "tokenizing_job._manifest_entry = hang\npath, cache",
    )
    process = start(stop_inside, texts, tmp_path, 1)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "inside"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=240)
    assert not (tmp_path / "manifest.json").exists()
    left = [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert left
    os.utime(left[0], (time.time() - 7200,) * 2)
    assert prepare_corpus(config(texts), 400, tmp_path).fingerprint == corpus.fingerprint
    assert not left[0].exists()


# Shards written once


def test_command_line_writes_what_data_path_takes(
    tmp_path: Path, texts: Path, corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "shards"
    command = [str(texts), "--out", str(out), "--vocab-size", "400"]
    assert main(command) == 0
    assert f"{corpus.num_train_tokens} tokens to train on" in capsys.readouterr().out
    for path in (out, out / "*.bin", out / "train-00000.bin"):
        read = prepare_corpus(config(path), 400, tmp_path / "cache")
        assert read.fingerprint == corpus.fingerprint
        assert read.held_out_bytes == corpus.held_out_bytes
    assert not (tmp_path / "cache").exists()
    assert main(command) == 0
    assert main([str(texts), "--out", str(out), "--vocab-size", "300"]) == 2
    assert "already holds token shards made from other inputs" in capsys.readouterr().err
    assert main([str(out), "--out", str(tmp_path / "b"), "--vocab-size", "300"]) == 2
    assert "already token shards" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"vocab_size = 400 exceeds model.vocab_size = 399"):
        prepare_corpus(config(out), 399, tmp_path)
    (out / "held_out.txt").unlink()
    assert prepare_corpus(config(out), 400, tmp_path).held_out_bytes == corpus.held_out_bytes


def test_command_line_as_a_program(tmp_path: Path, texts: Path) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "jmoe.data",
        str(texts / "absent"),
        "--out",
        str(tmp_path),
    ]
    result = subprocess.run(
        [*command, "--vocab-size", "300"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: data.path = ")


def test_shards_beside_text_share_the_tokenizer(tmp_path: Path, texts: Path) -> None:
    shards, more = tmp_path / "shards", write_texts(tmp_path / "more", seed=1)
    assert main([str(texts), "--out", str(shards), "--vocab-size", "300"]) == 0
    both = prepare_corpus(config(shards, more, weights=(3.0, 1.0)), 300, tmp_path / "cache")
    assert both.tokenizer_path == tmp_path / "cache" / "tokenizer.json"
    assert len(both.sources) == 2
    assert decode(both, both.held_out_tokens).encode() == both.held_out_bytes
    assert not np.any((both.held_out_tokens[1:] == 0) & (both.held_out_tokens[:-1] == 0))
    other = tmp_path / "other"
    assert main([str(more), "--out", str(other), "--vocab-size", "290"]) == 0
    with pytest.raises(ValueError, match="come from different tokenizers"):
        prepare_corpus(config(shards, other), 300, tmp_path)
    with pytest.raises(ValueError, match="made with another tokenizer"):
        prepare_corpus(config(shards, tokenizer=str(other / "tokenizer.json")), 300, tmp_path)
    (shards / "tokenizer.json").unlink()
    with pytest.raises(
        ValueError, match=r"data.tokenizer = None: .* come without a tokenizer.json"
    ):
        prepare_corpus(config(shards, more), 300, tmp_path)


def test_shards_alone_are_split_and_need_no_tokenizer(tmp_path: Path) -> None:
    ids = ([*range(1, 50), 0]) * 40
    write_shard(tmp_path / "a.bin", ids, text_bytes=8000)
    write_shard(tmp_path / "b.bin", ids[:100], text_bytes=400)
    alone = prepare_corpus(config(tmp_path), 300, tmp_path / "cache")
    train, small = alone.sources[0].shards
    assert alone.held_out_tokens[0] == 0
    assert np.array_equal(np.concatenate([train, alone.held_out_tokens]), [0, *ids])
    assert 50 <= len(alone.held_out_tokens) <= 0.06 * len(ids)
    assert len(small) == 101
    assert alone.held_out_bytes == b""
    for bits in (xz_bits_per_byte, unigram_bits_per_byte):
        with pytest.raises(ValueError, match="come without a tokenizer"):
            bits(alone)


def test_options_of_text_that_no_file_would_honour_are_refused(tmp_path: Path) -> None:
    """`data.field` without records, `data.encoding` with token shards alone."""
    (tmp_path / "a.txt").write_text("words\n" * 500)
    with pytest.raises(
        ValueError,
        match=r"data\.field = 'body': must be 'text' without JSON or JSONL in data\.path",
    ):
        prepare_corpus(DataConfig(path=(str(tmp_path),), field="body"), 512, tmp_path / "cache")
    shards = tmp_path / "shards"
    shards.mkdir()
    write_shard(shards / "a.bin", list(range(400)))
    with pytest.raises(
        ValueError,
        match=r"data\.encoding = \('latin-1',\): must be \('utf-8',\) with token shards alone",
    ):
        prepare_corpus(
            DataConfig(path=(str(shards),), encoding=("latin-1",)), 512, tmp_path / "cache"
        )
    assert not (tmp_path / "cache").exists()
