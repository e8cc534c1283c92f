"""The seed of a sequence's draws."""

from jmoe.inference.sampling_params import SamplingParams
from jmoe.inference.sequence import Sequence


def seeded(prompt: list[int], seed: int) -> Sequence:
    return Sequence(prompt, SamplingParams(seed=seed))


def test_seeds() -> None:
    """The noise of a request depends on its seed and its prompt; without a seed it is another
    one every time.
    """
    assert seeded([1], 5).noise_seed == seeded([1], 5).noise_seed
    others = [([2], 5), ([1, 1], 5), ([1], 6), ([1], -5), ([1], 5 + 2**32)]
    assert len({seeded(prompt, seed).noise_seed for prompt, seed in [([1], 5), *others]}) == 6
    assert Sequence([1]).noise_seed != Sequence([1]).noise_seed
    assert seeded([1], 5).noise_seed == 3085186920139808632, "the same on every machine"
