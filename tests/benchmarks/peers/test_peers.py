"""What compares us with other systems: figures of both sides, programs that fail, environments."""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.peers import (
    compare_rounds,
    decoding_speeds,
    fastest_figures,
    run_for_last_object,
)
from benchmarks.peers import accelerate_decoding, nvme_training, oversized, setup
from benchmarks.peers.lora_training import rows_of
from benchmarks.peers.to_gguf import pairs_side_by_side
from benchmarks.peers.training import Contestant


def test_both_sides_of_a_row() -> None:
    """Ratios are of a round's two sides, not of two medians."""
    row = compare_rounds(
        [({"one": 8.0}, {"one": 2.0}), ({"one": 9.0}, {"one": 9.0}), ({"one": 10.0}, {"one": 5.0})],
        "peer",
    )
    assert row == {
        "one": {
            "jmoe": 9.0,
            "peer": 5.0,
            "ratio": 2.0,
            "rounds": [[8.0, 2.0], [9.0, 9.0], [10.0, 5.0]],
        }
    }
    side = {"decode_tokens_per_s": {"1": 3.0, "8": 4.0}, "long_prefill_tokens_per_s": 5.0}
    assert decoding_speeds(side) == {"one": 3.0, "eight": 4.0, "prefill_512": 5.0}


def test_a_peer_counts_by_its_faster_run_figure_by_figure() -> None:
    assert fastest_figures([{"one": 2.0, "eight": 7.0}, {"one": 3.0, "eight": 5.0}]) == {
        "one": 3.0,
        "eight": 7.0,
    }


def test_a_training_row_is_against_the_peers_faster_arrangement() -> None:
    """Ratios are round by round; the memory is that of every process."""
    common = {"last_loss": 5.0, "peak_rss_bytes": [2**30, 2**29], "versions": {"python": "3"}}
    ours, theirs = Contestant("jmoe", 2, "bfloat16", []), Contestant("DeepSpeed", 2, "bfloat16", [])
    ours.runs = [common | {"tokens_per_s": rate} for rate in (20.0, 30.0, 90.0)]
    theirs.runs = [common | {"tokens_per_s": rate} for rate in (10.0, 10.0, 60.0)]
    row = ours.row(theirs)
    assert (row["tokens_per_s"], row["ratio"], row["rounds"]) == (30.0, 2.0, [20.0, 30.0, 90.0])
    assert row["peak_rss_mib"] == [1024, 512]


def test_a_row_of_fine_tuning_is_against_the_peer_that_trains_the_same() -> None:
    """Of the same parameters, in the same dtype, round by round."""
    common = {"trained_parameters": 7, "first_loss": 6.0, "last_loss": 5.0, "versions": {}}
    common |= {"peak_rss_bytes": [2**30]}
    speeds = {
        ("adapters", "bfloat16", "jmoe"): (20.0, 30.0, 90.0),
        ("adapters", "bfloat16", "transformers + PEFT"): (10.0, 10.0, 60.0),
        ("all", "bfloat16", "jmoe"): (8.0, 8.0, 8.0),
        ("all", "bfloat16", "transformers"): (4.0, 4.0, 2.0),
    }
    runs = {key: [common | {"tokens_per_s": rate} for rate in own] for key, own in speeds.items()}
    rows = [(row["trained"], row["system"], row["ratio"]) for row in rows_of(runs)]
    assert rows == [
        ("adapters", "jmoe", 2.0),
        ("adapters", "transformers + PEFT", 1.0),
        ("all", "jmoe", 2.0),
        ("all", "transformers", 1.0),
    ]


def test_a_program_of_a_peer() -> None:
    assert run_for_last_object([sys.executable, "-c", "print('loading'); print('{\"a\": 1}')"]) == {
        "a": 1
    }
    for program in ("import sys; print('{}'); sys.exit('no such model')", "pass"):
        with pytest.raises(SystemExit, match=r"(?s)status [01]\n"):
            run_for_last_object([sys.executable, "-c", program])


@pytest.mark.parametrize(
    "program",
    [
        "accelerate_decoding",
        "deepspeed_training",
        "nvme_training",
        "oversized",
        "peft_training",
        "to_gguf",
        "transformers_side",
        "transformers_training",
    ],
)
def test_programs_of_peers_explain_themselves_here(program: str) -> None:
    """Their environments are not this one: options are read before torch is looked for."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/peers/{program}.py", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--offload", "/tmp"], "--offload: needs --zero 3"),
        (["--zero", "3"], "--zero 3: needs --experts 0, DeepSpeed-MoE has no ZeRO-3"),
    ],
)
def test_what_deepspeed_cannot_do(options: list[str], message: str) -> None:
    command = [sys.executable, "benchmarks/peers/deepspeed_training.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nowhere"], "--model nowhere: config.json cannot be read"),
        (["--model", "bare"], "--model bare: has no .safetensors files"),
        (["--memory-mb", "-1"], "--memory-mb -1: must be at least 0"),
        (["--new-tokens", "0"], "--new-tokens 0: must be at least 1"),
        (["--offload-folder", "nowhere"], "--offload-folder nowhere: is not a folder"),
        (["--prompt-ids", "3", "64"], "token 64: must be an id below the model's vocab_size = 64"),
        (["--ids", "nowhere"], "--ids nowhere: cannot be read"),
        (
            ["--ids", "ids.json"],
            "--ids ids.json: must be a list of --prompt + --new-tokens = 56 ids",
        ),
        (["--ids", "ids.json", "--prompt-ids", "3"], "not allowed with argument --ids"),
    ],
)
def test_what_accelerate_is_not_given(options: list[str], message: str, tmp_path: Path) -> None:
    for name in ("model", "bare"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 64}')
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "ids.json").write_text("[3, 4, 5]")
    program = Path("benchmarks/peers/accelerate_decoding.py").resolve()
    command = [sys.executable, str(program), "--model", "model", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_a_prompt_and_the_text_behind_it(tmp_path: Path) -> None:
    """Without a text the model goes on by itself."""
    (tmp_path / "ids.json").write_text("[3, 4, 5, 6, 7]")
    parse = accelerate_decoding.options().parse_args
    common = ["--model", "model", "--prompt", "2", "--new-tokens", "2"]
    text = parse([*common, "--ids", str(tmp_path / "ids.json")])
    assert accelerate_decoding.prompt_and_text(text, 64) == ([3, 4], [5, 6])
    assert accelerate_decoding.prompt_and_text(
        parse([*common, "--prompt-ids", "9", "8", "7"]), 64
    ) == ([9, 8, 7], [])
    drawn, text_behind = accelerate_decoding.prompt_and_text(parse(common), 64)
    assert len(drawn) == 2 and max(drawn) < 64 and text_behind == []


def test_accelerates_row_is_against_ours_of_the_same_round() -> None:
    kept = {"disk_read_bytes_per_token": 7, "bytes_in_memory": 0, "peak_rss_bytes": 9}
    runs = [{"tokens_per_s": rate} | kept for rate in (0.5, 1.0, 0.25)]
    row = oversized.accelerate_row([{"tokens_per_s": rate} for rate in (10.0, 10.0, 20.0)], runs)
    assert (
        row
        == {"tokens_per_s": {"accelerate": 0.5, "ratio": 20.0, "rounds": [0.5, 1.0, 0.25]}} | kept
    )


def test_both_sides_on_nvme_have_one_model_and_one_cache() -> None:
    """As many parameters as DeepSpeed's, and the bytes of its buffers."""
    for side, tier in (("nvme", "nvme"), ("memory", "device")):
        sizes = {"tokens": 256, "buffers": 20, "update": "device"}
        a = argparse.Namespace(side=side, folder=Path("records"), **sizes)
        made = nvme_training.config(a)
        hidden, inner, vocab = 512, 12288, 1024
        # norms, biases, the router
        layer = 2 * hidden * inner + inner + 4 * hidden * hidden + 9 * hidden + hidden
        assert (
            made.model.total_and_active_parameters()[0]
            == 6 * layer + (2 * vocab + 256 + 2) * hidden
        )
        assert (made.tiers.experts, made.tiers.optimizer) == (tier, tier)
        assert made.tiers.host_cache_bytes == (20 * 4 * hidden * inner if side == "nvme" else 0)


def test_a_model_that_llama_cpp_is_not_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss", "num_attention_heads": 4}')
    command = [
        sys.executable,
        "benchmarks/peers/to_gguf.py",
        str(tmp_path),
        str(tmp_path / "out.gguf"),
        "bf16",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        done.returncode == 1
        and "model_type = 'gpt_oss': must be one of mixtral, qwen3_moe" in done.stderr
    )
    assert not (tmp_path / "out.gguf").exists()


def test_rotary_rows_side_by_side() -> None:
    """Row i of a head's first half is followed by row i of its second half."""
    weight = np.arange(8, dtype=np.float32)[:, None]
    assert pairs_side_by_side(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_an_environment_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is named; nothing is written into a folder that has files."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="must be empty or new"):
        setup.set_up("transformers", tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes"]
    failing = (sys.executable, "-c", "import sys; sys.exit('no route to the index')")
    written = (sys.executable, "-c", "open('first', 'w').close()")
    monkeypatch.setattr(setup, "steps", lambda peer, folder: [written, failing, ("never",)])
    with pytest.raises(ValueError, match=r"(?s)status 1\nno route to the index"):
        setup.set_up("deepspeed", tmp_path / "new")
    assert (tmp_path / "new" / "first").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="npm: is not on the PATH"):
        setup.set_up("llama.cpp", tmp_path / "llama")
    assert not (tmp_path / "llama").exists()


def test_torch_is_installed_before_what_needs_it(tmp_path: Path) -> None:
    for peer in setup.PACKAGES:
        make, first, *_ = setup.steps(peer, tmp_path)
        assert make[1:3] == ("-m", "venv") and first[-1] == "torch"
        assert first[0] == str(tmp_path / "bin" / "python")
