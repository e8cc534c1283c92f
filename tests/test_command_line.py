"""Command lines as configurations."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from jmoe.command_line import (
    OTHER_TRAINERS_NAMES,
    parse_batch,
    parse_bundle,
    parse_serve,
    parse_status,
    parse_supervise,
    parse_train,
)
from jmoe.config import CommConfig, TrainConfig
from jmoe.configs import PRESETS


def test_a_longer_context_has_two_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["fine-tune", "--init-from", "folder", "--data.path", "chats.jsonl"]
    for options in (
        ["--yarn-factor", "4"],
        ["--model.rope-scaling", "yarn", "--model.rope-factor", "4"],
        ["--model.rope_factor=4.0", "--num-steps", "3", "--model.rope-scaling=yarn"],
    ):
        config = parse_train([*given, *options], PRESETS)
        assert config.yarn_factor == 4.0
        assert config.num_steps == (3 if "3" in options else 200)
    for options, said in (
        (["--model.rope-scaling", "linear", "--model.rope-factor", "4"], "'linear': must be yarn"),
        (["--model.rope-scaling", "yarn"], "must be yarn, and have --model.rope-factor F"),
        (["--model.rope-factor", "4"], "None: must be yarn"),
    ):
        with pytest.raises(SystemExit, match=said):
            parse_train([*given, *options], PRESETS)
    with pytest.raises(SystemExit):
        parse_train(["tiny", "--yarn-factor", "4"], PRESETS)
    assert "yarn_factor = 4.0: must be 1 without init_from" in capsys.readouterr().err


@pytest.mark.parametrize("tier", ["auto", "device", "host", "nvme"])
def test_moments_go_where_the_weights_are(tier: str) -> None:
    """Unless they have a tier of their own; with weights on NVMe there is no other one."""
    for options in (["--tiers.experts", tier], [f"--tiers.experts={tier}"]):
        config = parse_train(["tiny", *options], PRESETS)
        assert (config.tiers.experts, config.tiers.optimizer, config.plan) == (tier, tier, False)
    config = parse_train(["tiny", "--tiers.optimizer", "nvme", "--plan", *options], PRESETS)
    assert (config.tiers.experts, config.tiers.optimizer, config.plan) == (tier, "nvme", True)
    assert config.output_dir == "runs/tiny"


def test_ablations_are_presets_and_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_train(["tiny-unfused", "--comm.exchange", "flat"], PRESETS)
    assert config.comm == CommConfig(exchange="flat", schedule="none", fuse_dense=False)
    assert parse_train(["tiny", "--comm.bucket-bytes", "1000"], PRESETS).comm.bucket_bytes == 1000
    with pytest.raises(SystemExit):
        parse_train(["tiny", "--comm.fuse-dense", "False"], PRESETS)
    assert "Unrecognized options: --comm.fuse-dense" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_train(["tiny", "--help"], PRESETS)
    assert "fuse" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tinny"], "Did you mean tiny?"),
        (["tiny", "--model.hiden-size", "32"], "Perhaps you meant: --model.hidden-size"),
        (
            ["tiny", "--batch-size", "seven"],
            "--batch-size: invalid literal for int() with base 10: 'seven'",
        ),
        (["tiny", "--model.hidden-size", "0"], "hidden_size = 0: must be greater than 0"),
        (["tiny", "--comm.bucket-bytes", "-1"], "bucket_bytes = -1: must not be negative"),
        (
            ["tiny-unfused", "--comm.bucket-bytes", "1"],
            "bucket_bytes = 1: must be 0 with fuse_dense = False",
        ),
        (
            ["tiny", "--model.num-experts-per-tok", "9"],
            "num_experts_per_tok = 9: must be between 1 and num_experts",
        ),
        (["tiny", "--profile.steps", "5:3"], "profile.steps = '5:3': must read FIRST:LAST"),
        (
            ["tiny", "--optimizer.lr", "1"],
            "--optimizer.lr: no such option. Did you mean --optimizer.learning-rate?",
        ),
        (["tiny", "--lr=1"], "--lr: no such option. Did you mean --optimizer.learning-rate?"),
    ],
    ids=["preset", "field", "type", "value", "bytes", "buckets", "pair", "profile", "lr", "short"],
)
def test_a_mistake_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_train(arguments, PRESETS)
    assert ended.value.code
    screen = f"{ended.value.code} {''.join(capsys.readouterr())}"
    assert message in " ".join(screen.replace("│", " ").split())


def test_short_names_stand_for_options_that_there_are() -> None:
    for meant in OTHER_TRAINERS_NAMES.values():
        section, _, name = meant.replace("-", "_").rpartition(".")
        assert hasattr(getattr(TrainConfig(), section) if section else TrainConfig(), name), meant


def test_help_lists_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_train(["--help"], PRESETS)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for preset in (
        "tiny",
        "small",
        "gpt-moe-8e",
        "gpt-moe-128e",
        "mixtral-8x7b",
        "qwen3-30b-a3b",
        "olmoe-1b-7b",
    ):
        assert any(line[:1] == [preset] and len(line) > 4 for line in lines), preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_needs_no_options_but_a_model_and_data(name: str) -> None:
    given = ["--init-from", "folder", "--data.path", "chats.jsonl"] if "fine" in name else []
    config = parse_train([name, *given], PRESETS)
    assert config.output_dir == f"runs/{name}"
    assert config.init_from == ("folder" if given else "")


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ([], "--init-from and --data.path must be given: train.py fine-tune --init-from MODEL"),
        (["--init-from", "folder"], "fine-tune: --data.path must be given"),
        (["--data.path=chats.jsonl"], "fine-tune: --init-from must be given"),
    ],
)
def test_fine_tuning_needs_a_model_and_data(
    given: list[str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit, match=missing):
        parse_train(["fine-tune", *given], PRESETS)


@pytest.mark.parametrize(
    ("train", "serve"), [("train.py", "serve.py"), ("jmoe-train", "jmoe-serve")]
)
def test_help_and_mistakes_have_the_name_that_was_started(
    train: str, serve: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/somewhere/bin/{train}"])
    for arguments, expected in (
        (["--help"], f"\n{train} PRESET --plan"),
        (["tiny", "--help"], f"usage: {train} tiny"),
    ):
        with pytest.raises(SystemExit, match="0"):
            parse_train(arguments, PRESETS)
        assert expected in capsys.readouterr().out
    with pytest.raises(SystemExit, match=f"{train}: no preset is named 'tinny'"):
        parse_train(["tinny"], PRESETS)
    monkeypatch.setattr(sys, "argv", [f"/somewhere/bin/{serve}"])
    with pytest.raises(SystemExit, match="0"):
        parse_serve(["--help"])
    assert f"usage: {serve} " in capsys.readouterr().out


ROOT = Path(__file__).resolve().parent.parent
OPTION = re.compile(r"(?<![\w-])--(?!xla_)[a-z][\w.-]*\w")  # of XLA's options JAX knows which exist
# Of pip, hf, sbatch, srun, scontrol, vLLM, C++ compilers and a program that a program starts.
ELSEWHERE = {
    *"""--find-links --local-dir --gpus-per-node --gpus-per-task --ntasks-per-node --gpu-bind --open-mode
    --signal --test-only --chat-template-content-format --version --background
    --tool-call-parser --head --address --include""".split()  # noqa: SIM905
}
GROUPS = {"--machine", "--distil", "--distributed", "--comm", "--mesh"}  # `--mesh.*`


def known_options(capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """Yield the options of every program."""
    train = partial(parse_train, presets=PRESETS)
    for parse, arguments in (
        (train, ["tiny"]),
        (train, ["ufo-tiny"]),
        (parse_serve, []),
        (parse_bundle, []),
        (parse_batch, []),
        (parse_supervise, []),
        (parse_status, []),
    ):
        with pytest.raises(SystemExit):
            parse([*arguments, "--help"])
        yield from OPTION.findall(capsys.readouterr().out)
    for folder in ("jmoe", "benchmarks", "kernels_pallas", "launch"):
        for source in (ROOT / folder).rglob("*.py"):
            yield from re.findall(r'add_argument\(\s*"(--[\w-]+)"', source.read_text())


def test_options_that_pages_and_messages_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = {*known_options(capsys), *ELSEWHERE, *GROUPS}
    pages = [ROOT / "README.md", ROOT / "launch" / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [(page, page.read_text()) for page in pages]
    sources = [*ROOT.glob("*.py"), *(ROOT / "jmoe").rglob("*.py"), *ROOT.glob("examples/*.py")]
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append((source, node.value))
    for place, text in texts:
        named = {option.replace(".NAME", ".digits") for option in OPTION.findall(text)}
        assert named <= known, f"{place.relative_to(ROOT)}: {sorted(named - known)}"


COMMAND = re.compile(
    r"(?<![\w/.])(train\.py|serve\.py|jmoe-train|jmoe-serve|jmoe\.deploy\.bundle|jmoe\.programs\.batch"
    r"|jmoe-supervise|jmoe\.cluster\.supervise|jmoe-status|jmoe\.status) (.*)"
)
PARSERS = {
    "train": partial(parse_train, presets=PRESETS),
    "serve": parse_serve,
    "bundle": parse_bundle,
    "batch": parse_batch,
    "supervise": parse_supervise,
    "status": parse_status,
}


def commands_of(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (program, arguments) of the commands in a page's blocks, without their comments."""
    blocks = re.findall(r"^```(?:\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            first, _, started = re.sub(r"\s#\s.*", "", line).partition(" -- ")
            for command in map(COMMAND.search, (first, started)):
                if command is not None:
                    yield command[1], command[2].split()


def test_commands_of_pages_have_options_of_their_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And presets that exist."""
    known: dict[tuple[str, ...], set[str]] = {}
    count = 0
    for page in (ROOT / "README.md", ROOT / "launch" / "README.md", *(ROOT / "docs").glob("*.md")):
        for program, arguments in commands_of(page):
            kind = next(name for name in PARSERS if name in program)
            starts = ("ufo-tiny" if arguments[0].startswith("ufo") else "tiny",)
            start = starts if kind == "train" else ()
            if kind == "train" and not arguments[0].startswith("-"):
                assert arguments[0] == "PRESET" or arguments[0] in PRESETS, (
                    f"{page.name}: {arguments}"
                )
            if (kind, *start) not in known:
                with pytest.raises(SystemExit):
                    PARSERS[kind]([*start, "--help"])
                known[kind, *start] = {*OPTION.findall(capsys.readouterr().out), "--help"}
            named = set(OPTION.findall(" ".join(arguments)))
            left = named - known[kind, *start]
            assert not left, f"{page.name}: {program} has no {sorted(left)}"
            count += 1
    assert count > 40


def test_experts_of_a_dense_model_have_two_names() -> None:
    """With --init-from, whose model has none; without it they are the model's own."""
    start = ["fine-tune", "--init-from", "dense", "--data.path", "chats.jsonl"]
    config = parse_train(
        [*start, "--model.num-experts=8", "--model.num_experts_per_tok", "3"], PRESETS
    )
    assert config == parse_train(
        [*start, "--upcycle.num-experts", "8", "--upcycle.num-experts-per-tok", "3"], PRESETS
    )
    assert (config.upcycle.num_experts, config.upcycle.num_experts_per_tok) == (8, 3)
    plain = parse_train(["tiny", "--model.num-experts", "16"], PRESETS)
    assert plain.model.num_experts == 16 and plain.upcycle.num_experts is None
