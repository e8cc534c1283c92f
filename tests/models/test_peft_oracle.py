"""jmoe's adapter files beside PEFT, where that is installed with transformers 5: each loads what the
other writes.

Run like `test_transformers_oracle.py`, in an environment that has PEFT too.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jmoe
from jmoe.config import LoraConfig
from jmoe.config.lora import LORA_TARGETS
from jmoe.deploy.adapters import merge_adapter_folder
from jmoe.models.huggingface import family_of, model_config
from jmoe.models.lora import adapted_parameters, initial_adapters
from jmoe.models.peft_files import CONFIG, write_adapter_folder
from jmoe.models.pretrained import read_config
from tests.model_configs import CHECKPOINTS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", "5", reason="needs transformers 5")
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
TOLERANCE = 1e-4  # of a logit
TOKENS = np.random.default_rng(0).integers(3, 64, (2, 20))


def write_base(name: str, out: Path) -> Path:
    """Write a fixture in float32: bfloat16 would round the sum of weight and adapter."""
    jmoe.save_pretrained(jmoe.load_pretrained(CHECKPOINTS / name, dtype="float32"), out)
    return out


def open_base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def logits_of_torch(model: Any) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.from_numpy(TOKENS), use_cache=False).logits.numpy()
    return logits


def merged_logits(adapter: Path, base: Path, out: Path) -> np.ndarray:
    merge_adapter_folder(adapter, base, out)
    return np.asarray(jmoe.load_pretrained(out, dtype="float32")(TOKENS.astype(np.int32)))


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_peft_loads_what_jmoe_writes(name: str, rslora: bool, tmp_path: Path) -> None:
    base, adapter = write_base(name, tmp_path / "base"), tmp_path / "adapter"
    fields = read_config(base)
    lora = LoraConfig(rank=3, alpha=5.0, rslora=rslora, targets=LORA_TARGETS)
    parameters = adapted_parameters(model_config(fields), family_of(fields), lora.targets)
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda a: 0.2 * rng.standard_normal(a.shape, np.float32),
        initial_adapters(jax.random.key(0), parameters, 3),
    )
    adapter.mkdir()
    write_adapter_folder(adapter, parameters, adapters, lora, str(base))
    own = merged_logits(adapter, base, tmp_path / "merged")
    model = peft.PeftModel.from_pretrained(open_base(base), adapter)
    theirs = logits_of_torch(model)
    np.testing.assert_allclose(own, theirs, atol=TOLERANCE, rtol=0)
    assert np.abs(theirs - logits_of_torch(open_base(base))).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_jmoe_loads_what_peft_writes(name: str, tmp_path: Path) -> None:
    """PEFT's configuration is that of the fixture; its values are drawn here."""
    base = write_base(name, tmp_path / "base")
    fixture = CHECKPOINTS.parent / "lora" / name / "first"
    kept = ("r", "lora_alpha", "use_rslora", "target_modules", "target_parameters")
    fields = json.loads((fixture / CONFIG).read_text())
    config = peft.LoraConfig(**{field: fields[field] for field in kept})
    model = peft.get_peft_model(open_base(base), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    model.save_pretrained(tmp_path / "adapter")
    own = merged_logits(tmp_path / "adapter", base, tmp_path / "merged")
    np.testing.assert_allclose(own, logits_of_torch(model), atol=TOLERANCE, rtol=0)
