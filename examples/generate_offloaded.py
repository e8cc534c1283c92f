"""Generate with resident experts, and with a ring of one layer's slots; compare the tokens.

Usage: python examples/generate_offloaded.py FOLDER
"""

import sys

from jmoe import Engine, EngineConfig

if len(sys.argv) != 2:
    sys.exit(__doc__)
# token ids; strings also work if the folder has a tokenizer
PROMPTS = [[3, 14, 15, 9, 2, 6], [5, 3, 5]]
OPTIONS = {"max_batch": 2, "max_seq_len": 32, "dtype": "float32"}

outputs = []
for policy in ({"policy": "resident"}, {"policy": "ring", "ring_slots": 1}):
    with Engine(sys.argv[1], EngineConfig(**OPTIONS, **policy)) as engine:
        completions = engine.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)
        stats = engine.stats()
    outputs.append([completion.token_ids for completion in completions])
    print(
        f"{policy['policy']}: {stats.device_expert_bytes:,} bytes of experts on the device",
        end=", ",
    )
    print(f"{stats.streamed_bytes:,} moved; tokens {outputs[-1]}")
print(f"the same tokens: {outputs[0] == outputs[1]}")
