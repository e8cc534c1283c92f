"""Every file in examples/ runs and prints what it promises."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.model_configs import CHECKPOINTS
from tests.processes import QUICK_XLA_FLAGS

ROOT = Path(__file__).resolve().parent.parent
MIXTRAL = CHECKPOINTS / "mixtral"
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
PRINTS = {
    "custom_experts.py": "return their input: True",
    "custom_router.py": "[0.25, 0.25, 0.25, 0.25]",
    "generate_offloaded.py": "the same tokens: True",
    "load_and_save.py": "the copy gives the same: True",
    "moe_layer.py": "step 49",
    "stacked_layers.py": "4 layers, loss",
}
ARGUMENTS = ("chat_client.py", "generate_offloaded.py", "load_and_save.py")
ELSEWHERE = {"chat_client.py"}  # needs a server: tests/serving/test_completions.py


def test_every_example_is_run() -> None:
    assert set(EXAMPLES) == PRINTS.keys() | ELSEWHERE


@pytest.mark.parametrize("name", EXAMPLES)
def test_at_most_sixty_lines(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", sorted(PRINTS))
def test_it_prints_what_it_promises(
    name: str, run_python: Callable[..., Any], tmp_path: Path
) -> None:
    arguments = {
        "generate_offloaded.py": [MIXTRAL],
        "load_and_save.py": [MIXTRAL, tmp_path / "copy"],
    }.get(name, [])
    environment = {"XLA_FLAGS": QUICK_XLA_FLAGS, "JAX_NUM_CPU_DEVICES": None}
    done = run_python([ROOT / "examples" / name, *arguments], environment)
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout


@pytest.mark.parametrize("name", ARGUMENTS)
def test_without_its_arguments_it_says_which(name: str, run_python: Callable[..., Any]) -> None:
    done = run_python([ROOT / "examples" / name])
    assert done.returncode == 1 and f"Usage: python examples/{name} " in done.stderr
    assert "Traceback" not in done.stderr
