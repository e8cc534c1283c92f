"""Fine-tuning of a downloaded model on chats: `--init-from MODEL --data.path chats.jsonl`.

The model is that of `--init-from`; a preset has only the options of training.
"""

from dataclasses import replace

from jmoe.config import DpoConfig, LoraConfig, ModelConfig, OptimizerConfig, TrainConfig

MODEL = "MODEL"  # in place of the folder: a preset whose `init_from` is set needs the option

fine_tune = TrainConfig(
    model=ModelConfig(max_position_embeddings=4096),
    init_from=MODEL,
    optimizer=OptimizerConfig(learning_rate=1e-5, warmup_steps=10, weight_decay=0.0),
    num_steps=200,
    batch_size=8,
    sequence_length=4096,
    remat="layer",
)

fine_tune_dpo = replace(
    fine_tune,
    optimizer=replace(fine_tune.optimizer, learning_rate=1e-6),
    dpo=DpoConfig(beta=0.1),
)

fine_tune_lora = replace(
    fine_tune,
    optimizer=replace(fine_tune.optimizer, learning_rate=2e-4),
    lora=LoraConfig(rank=16, alpha=32.0),
)
