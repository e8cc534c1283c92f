"""The end of a preparation: what concerns all units, in the order of the units, so that the files
are the same whatever process did which unit.

`held_out.bin` and `held_out.txt` have the form that `python -m jmoe.data` gives them; the manifest
comes last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from jmoe.data.record_shards import MANIFEST
from jmoe.data.samples import parse_preference, parse_sample
from jmoe.data.shards import (
    ShardWriter,
    sample_lengths_path,
    writing_sample_shard,
    writing_shard,
)
from jmoe.data.tokenizer import encode_pieces
from jmoe.data.tokenizing_job import HELD_OUT, HELD_OUT_TEXT
from jmoe.data.unit_writer import sample_encoder_of, tokenizer_of
from jmoe.data.work_units import FORMAT, Job, Unit
from jmoe.types import JsonObject

BAD_DOCUMENTS = "bad_documents.jsonl"
COUNTS = ("documents", "held_out_documents", "empty_documents", "bad_documents")


def is_finished(job: Job, units: Sequence[Unit]) -> bool:
    """Return whether the manifest has been written and every unit's shard is still there."""
    return MANIFEST in job.out.entries() and len(job.read_results(units)) == len(units)


def finish_folder(job: Job, units: Sequence[Unit]) -> JsonObject:
    """Write the held-out documents, the list of bad ones and the manifest; return the manifest.

    Raises ValueError if nothing is left to train on, or no sample is held out.
    """
    results = job.read_results(units)
    done = [results[unit] for unit in units]
    bad = [entry for result in done for entry in result["bad"]]
    content = "".join(json.dumps(entry) + "\n" for entry in bad).encode()
    job.out.write(BAD_DOCUMENTS, content)
    shards = [result["shard"] for result in done if result["shard"]]
    if not shards:
        first = f"; the first: {bad[0]['file']}: {bad[0]['problem']}" if bad else ""
        raise ValueError(
            f"data.path = {job.config.path}: holds no document to train on; {len(bad)} are bad"
            f" ({job.out}/{BAD_DOCUMENTS}){first}"
        )
    held_out = [text for result in done for text in result["held_out"]]
    header = _write_held_out(job, held_out)
    manifest: JsonObject = {
        "format": FORMAT,
        "fingerprint": _manifest_fingerprint(shards, header),
        "tokenizer": tokenizer_of(job).fingerprint,
        "tokens": sum(shard["count"] for shard in shards),
        **{name: sum(result[name] for result in done) for name in COUNTS},
        "held_out": header,
        "shards": [
            {"documents": result["documents"], **result["shard"]}
            for result in done
            if result["shard"]
        ],
    }
    job.out.make_durable()
    job.out.write(MANIFEST, json.dumps(manifest, indent=1).encode())
    return manifest


def _manifest_fingerprint(shards: Sequence[JsonObject], held_out: JsonObject | None) -> str:
    """Return the hash of all ids, by the hashes of the shards."""
    parts = [shard["sha256"] for shard in shards] + [held_out["sha256"] if held_out else ""]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _write_held_out(job: Job, documents: Sequence[str]) -> JsonObject | None:
    """Write the held-out documents: texts, or lines of samples. Return the header of their shard;
    None without any, in which case a run holds out the end of the largest shard.
    """
    names = [HELD_OUT]
    if job.has_samples:
        write = _write_held_out_samples
        content = "".join(line if line.endswith("\n") else f"{line}\n" for line in documents)
        names.append(sample_lengths_path(Path(HELD_OUT)).name)
    elif documents:
        write = _write_held_out_text
        content = "".join(documents)
    else:
        return None
    with job.out.staging(names) as folder:
        written = write(job, documents, folder / HELD_OUT)
    job.out.write(HELD_OUT_TEXT, content.encode())
    assert written.header is not None
    return dataclasses.asdict(written.header)


def _write_held_out_text(job: Job, documents: Sequence[str], path: Path) -> ShardWriter:
    tokenizer = tokenizer_of(job)
    with writing_shard(
        path,
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        tokenizer=tokenizer.fingerprint,
        split="held_out",
        control="tokens" if tokenizer.encodes_control_tokens else "text",
    ) as shard:
        for ids, size in encode_pieces(tokenizer, ((text, True) for text in documents)):
            shard.append(ids, text_bytes=size)
    return shard


def _write_held_out_samples(job: Job, documents: Sequence[str], path: Path) -> ShardWriter:
    encoder = sample_encoder_of(job)
    config = job.config
    assert config.field is not None
    records = [json.loads(line) for line in documents]
    samples = encoder.encode(
        [
            parse_preference(record) if config.preferences else parse_sample(record, config.field)
            for record in records
        ]
    )
    if not samples:
        raise ValueError(
            f"data.held_out_fraction = {job.config.held_out_fraction}: holds none of the samples"
            " out; raise it, or --held-out-bytes"
        )
    with writing_sample_shard(
        path,
        vocab_size=encoder.tokenizer.vocab_size,
        eot=encoder.tokenizer.eot,
        tokenizer=encoder.tokenizer.fingerprint,
        split="held_out",
        preferences=config.preferences,
    ) as shard:
        for sample in samples:
            assert not isinstance(sample, ValueError), "the unit's worker encoded it"
            for own in sample.sequences:
                shard.append(own.ids, own.trained, text_bytes=own.text_bytes)
    return shard.ids
