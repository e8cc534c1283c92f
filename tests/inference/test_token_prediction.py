"""Drafts by a checkpoint's layer for multi-token prediction: its logits are those of torch, and
answers those without drafts.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference.delta_states import DeltaCache
from jmoe.inference.engine import Engine
from jmoe.inference.loading import model_bytes
from jmoe.inference.runner import ModelRunner
from jmoe.inference.runner_protocol import BatchOutput, TokenBatch
from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.scheduler import Scheduler
from jmoe.inference.sequence import Sequence
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.models.prediction_layer import BESIDE_DECODER, PredictionLayer, TensorNames
from tests.checkpoint_variants import Tensors, write_variant
from tests.compiled import compilations
from tests.model_configs import CHECKPOINTS
from tests.tiny_engines import needs_compiler, run_as_on_accelerator

PREDICTING = CHECKPOINTS.parent / "prediction"
SIZES: dict[str, Any] = {"max_batch": 4, "max_seq_len": 64, "dtype": "float32"}
MTP: dict[str, Any] = {"speculation": "mtp"}
PROMPTS = [[5, 9, 2, 7] * 4, [4, 3] * 5, [6, 7, 8] * 4, [11], [9, 4] * 6, [8, 8, 8]]


def open_engine(folder: Path, **options: Any) -> Engine:
    return Engine(folder, EngineConfig(**{**SIZES, "prefill_chunk_tokens": 16, **options}))


def made_predictable(tensors: Tensors, noise: float) -> Tensors:
    """Let the next token follow from the latest one alone, up to `noise` times the layers' outputs;
    the prediction layer's own outputs are zero, so it predicts what follows without noise.
    """
    made = dict(tensors)
    size = made["model.norm.weight"].size
    last = max(int(name.split(".")[2]) for name in made if name.startswith("model.layers."))
    is_beside = BESIDE_DECODER.w_join in made
    names = BESIDE_DECODER if is_beside else TensorNames.behind_decoder(last)
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            made[name] = values * (0 if name.startswith(names.block) else noise)
    ones = np.ones_like(made[names.token_norm])
    made[names.token_norm] = 0 * ones if is_beside else ones  # norms centred at zero, or not
    made[names.norm] = made["model.norm.weight"]
    joined = np.concatenate([np.eye(size), np.zeros((size, size))], axis=1)
    made[names.w_join] = joined.astype(ones.dtype)
    return made


@pytest.fixture(scope="module")
def predictable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predictable") / "model"
    source = PREDICTING / "deepseek_v3"
    return write_variant(source, folder, lambda tensors: made_predictable(tensors, 0.05))


@pytest.fixture(scope="module")
def predictable_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with gated delta networks."""
    folder = tmp_path_factory.mktemp("predictable states") / "model"
    source = PREDICTING / "qwen3_next"
    return write_variant(source, folder, lambda tensors: made_predictable(tensors, 0.05))


@pytest.mark.parametrize(
    ("family", "chunk", "native"),
    [
        ("deepseek_v3", 16, "off"),
        ("glm4_moe", 5, "auto"),
        ("qwen3_next", 5, "auto"),
        pytest.param("qwen3_5_moe_text", 16, "off", marks=pytest.mark.slow),
        pytest.param("glm4_moe", 16, "off", marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_torch(
    family: str, chunk: int, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole prompts, and of prompts in chunks: the layer's cache has the tokens before."""
    found = dict(np.load(PREDICTING / family / "reference.npz"))
    prompts, predicted = found["input_ids"], found["predicted"]
    engine = open_engine(PREDICTING / family, prefill_chunk_tokens=chunk, native=native, **MTP)
    with engine:
        assert engine._predictor is not None
        layer = engine._predictor._layer
        logits: list[np.ndarray] = []
        forward = layer.forward

        def recorded(batches: list[TokenBatch]) -> list[BatchOutput]:
            (output,) = forward(batches)
            is_real = batches[0].positions_PC[0] < layer.num_table_positions
            logits.append(np.asarray(layer.logits_of_chunk(output, 0))[is_real])
            return [output]

        monkeypatch.setattr(layer, "forward", recorded)
        for prompt, expected in zip(prompts, predicted, strict=True):
            logits.clear()
            engine.generate([prompt.tolist()], max_new_tokens=2, ignore_eos=True)
            ours = np.concatenate(logits)[: len(expected)]
            np.testing.assert_allclose(ours, expected, atol=2e-5 * np.abs(expected).max())


def answers(engine: Engine) -> list[list[int]]:
    """Return the tokens of greedy and sampled requests that run together."""
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.3, "seed": 3}, {"repetition_penalty": 1.1}]
    sequences = [
        engine.add_request(
            prompt, SamplingParams(max_new_tokens=30, ignore_eos=True, **kinds[i % 3])
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    while engine.has_unfinished:
        engine.step()
    return [sequence.output_token_ids for sequence in sequences]


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "resident", "native": "on"},
        pytest.param(
            {"policy": "ring", "ring_slots": 1, "native": "off", "num_speculative_tokens": 3},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"policy": "experts", "device_bytes": 30_000, "native": "on", "kv_cache_dtype": "fp8"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_answers_are_those_without_drafts(options: dict[str, Any], predictable: Path) -> None:
    if options["native"] == "on":
        needs_compiler()
    plain = {name: value for name, value in options.items() if name != "num_speculative_tokens"}
    with open_engine(predictable, **plain) as engine:
        expected, steps = answers(engine), engine.stats().steps
    with open_engine(predictable, **options, **MTP) as engine:
        assert answers(engine) == expected
        stats = engine.stats()
    assert stats.steps < steps
    assert stats.drafted >= stats.drafts > 20 and 0.1 < stats.accepted_share < 1


@pytest.mark.parametrize(
    "options",
    [
        {**MTP, "policy": "resident", "native": "on"},
        pytest.param(
            {**MTP, "policy": "ring", "ring_slots": 1, "num_speculative_tokens": 3},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {**MTP, "policy": "experts", "device_bytes": 30_000, "num_speculative_tokens": 5},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {**MTP, "policy": "resident", "native": "off", "accelerator": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"speculation": "lookup", "policy": "resident", "native": "off"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"speculation": "lookup", "policy": "resident", "num_speculative_tokens": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_states_after_accepted_tokens_go_on(
    options: dict[str, Any], predictable_states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gated delta networks: tokens are those without drafts, wherever drafts end; a row that
    another sequence takes begins anew.
    """
    options = dict(options)
    if options.get("native") == "on":
        needs_compiler()
    if options.pop("accelerator", False):
        run_as_on_accelerator(monkeypatch)
    drafting = "speculation", "num_speculative_tokens"
    plain = {name: value for name, value in options.items() if name not in drafting}
    with open_engine(predictable_states, **plain) as engine:
        expected, steps = answers(engine), engine.stats().steps
    with open_engine(predictable_states, **options) as engine:
        assert answers(engine) == expected
        stats = engine.stats()
    assert stats.steps < steps
    assert stats.drafts > 5 and 0.1 < stats.accepted_share < 1


def test_the_state_of_each_accepted_token_is_kept(
    predictable_states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step the row has the state that single tokens leave, to rounding, at the number
    of computed tokens modulo the number of states.
    """
    prompt, most = PROMPTS[0], 24
    with open_engine(predictable_states, policy="resident", native="off") as engine:
        (plain,) = engine.generate([prompt], max_new_tokens=most, ignore_eos=True)
        tokens = prompt + plain.token_ids
        states = {}
        sequence = engine.add_request(prompt, SamplingParams(max_new_tokens=most, ignore_eos=True))
        while engine.has_unfinished:
            engine._ahead = None
            engine.step()
            if sequence.row is not None:
                states[sequence.num_computed_tokens] = states_of(engine, sequence)
    options = {**MTP, "num_speculative_tokens": 3, "policy": "resident", "native": "off"}
    with open_engine(predictable_states, **options) as engine:
        sequence = engine.add_request(prompt, SamplingParams(max_new_tokens=most, ignore_eos=True))
        lengths = []
        while engine.has_unfinished:
            engine.step()
            if sequence.row is not None:
                lengths.append(sequence.num_computed_tokens)
                for found, expected in zip(
                    states_of(engine, sequence), states[lengths[-1]], strict=True
                ):
                    scale = np.abs(expected).max()
                    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * scale)
    assert sequence.known_token_ids == tokens
    grown = np.diff(lengths)
    assert grown.max() > 1 and 0 < engine.stats().accepted_share < 1


def states_of(engine: Engine, sequence: Sequence) -> list[np.ndarray]:
    """Return the states of a running sequence's row after its computed tokens."""
    caches = [cache for cache in engine._runner.caches if isinstance(cache, DeltaCache)]
    arrays = [x for cache in caches for x in (cache.conv_NMKJ, cache.memory_NMHde)]
    assert arrays and sequence.row is not None
    return [np.asarray(x[sequence.num_computed_tokens % len(x), sequence.row]) for x in arrays]


@pytest.mark.parametrize("family", ["glm4_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_a_layer_that_is_right_halves_the_steps(family: str, tmp_path: Path) -> None:
    folder = write_variant(
        PREDICTING / family, tmp_path / "model", lambda t: made_predictable(t, 0.0)
    )
    for drafted, most in ((1, 17), (4, 9)):
        options = {"num_speculative_tokens": drafted, "native": "off"}
        with open_engine(folder, **options, **MTP) as engine:
            engine.generate([PROMPTS[0]], max_new_tokens=32, ignore_eos=True)
            stats = engine.stats()
        assert stats.accepted_share == 1 and stats.steps <= most


@pytest.mark.slow
def test_an_accelerator_drafts_too(predictable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_as_on_accelerator(monkeypatch)
    options = {"policy": "resident", "native": "off", "num_speculative_tokens": 2}
    with open_engine(predictable, policy="resident", native="off") as engine:
        expected = answers(engine)
    with open_engine(predictable, **options, **MTP) as engine:
        engine.compile_all_programs()
        with compilations() as own:
            assert answers(engine) == expected
        assert own == [] and engine.stats().accepted > 20


@pytest.mark.slow
def test_preempted_sequences_and_shared_prefixes(
    predictable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scheduler, "_num_sequences_that_may_grow", lambda *_: 0)
    folder = write_variant(predictable, tmp_path / "model", max_position_embeddings=512)
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 60, 150).tolist()
    prompts = [shared[: 90 + 3 * i] + rng.integers(3, 60, 20).tolist() for i in range(5)]

    def outputs(**options: Any) -> list[list[int]]:
        sizes = {"max_seq_len": 384, "prefill_chunk_tokens": 32, "native": "off"}
        with open_engine(folder, **sizes, **options) as engine:
            found = engine.generate(prompts, max_new_tokens=60, ignore_eos=True)
            assert engine.scheduler_stats().reused_tokens > 100
            assert ("cache_tokens" in options) == (engine.scheduler_stats().preemptions > 0)
            return [completion.token_ids for completion in found]

    assert outputs(cache_tokens=400, **MTP) == outputs()


def test_memory_plans_have_the_layer() -> None:
    """With all of its experts, without what it shares, and a cache of one layer more."""
    folder, options = PREDICTING / "deepseek_v3", {"policy": "resident", "native": "off"}
    with LazyCheckpoint(folder, "float32") as checkpoint:
        off, on = (model_bytes(checkpoint, EngineConfig(**SIZES, **o)) for o in ({}, MTP))
        layers = checkpoint.config.num_hidden_layers
        experts = checkpoint.config.num_experts * checkpoint.expert_bytes
    assert on.cache_bytes * layers == off.cache_bytes * (layers + 1)
    with open_engine(folder, **options, **MTP) as engine:
        assert engine._predictor is not None
        layer, decoder = engine._predictor._layer, engine._runner
        assert isinstance(decoder, ModelRunner)
        shared = {id(x) for x in decoder.embed_and_head[1]}
        around = [x for x in layer.embed_and_head[1] if id(x) not in shared]
        held = sum(x.nbytes for x in jax.tree.leaves([around, [a for _, a in layer._layers]]))
    assert len(around) < len(layer.embed_and_head[1])
    assert off.prediction_bytes == 0
    # what inference splits in two, or keeps in float32, has as many numbers
    assert on.prediction_bytes == held + experts


@pytest.mark.parametrize(
    ("family", "options", "error"),
    [
        ("glm4_moe", MTP, "speculation = 'mtp': must be off or lookup: .*model.layers.4.eh_proj"),
        ("mixtral", MTP, "speculation = 'mtp': must be off or lookup: .*model.layers.2.eh_proj"),
        ("qwen3_next", MTP, "speculation = 'mtp': must be off or lookup: .*tensor 'mtp.fc.weight'"),
    ],
)
def test_models_without_such_a_layer_are_refused(
    family: str, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        open_engine(CHECKPOINTS / family, **options)


def test_other_layers_beside_a_decoder_are_refused(tmp_path: Path) -> None:
    """An embedding of their own, and tensors without a place; further layers are not read."""
    further = "mtp.layers.1.input_layernorm.weight"
    unknown = "mtp.hc_head.weight"

    def open_variant(name: str, *tensors: str, **fields: Any) -> None:
        ones = dict.fromkeys(tensors, np.ones(4, np.float32))
        folder = write_variant(
            PREDICTING / "qwen3_next", tmp_path / name, lambda made: made | ones, **fields
        )
        PredictionLayer(folder, "float32").close()

    open_variant("further", further)
    with pytest.raises(ValueError, match="is unexpected: a prediction layer has no place"):
        open_variant("unknown", further, unknown)
    with pytest.raises(ValueError, match="mtp_use_dedicated_embeddings = True: must be false"):
        open_variant("dedicated", mtp_use_dedicated_embeddings=True)


def test_options_that_drafts_do_not_take_are_refused() -> None:
    with pytest.raises(
        ValueError, match="prompt_lookup_max = 3: must be 4 with speculation = 'mtp'"
    ):
        EngineConfig(prompt_lookup_max=3, **MTP)
    with pytest.raises(ValueError, match="speculation = 'mtp': must be off or lookup with mesh"):
        EngineConfig(mesh=EngineMesh(2), **MTP)
