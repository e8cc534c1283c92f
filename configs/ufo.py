"""Super-networks that learn several image tasks at once, like UFO (SE-MoE, section 4.1; VIMER-UFO 2.0).

`ufo-tiny`: a dense layer, a layer whose experts tokens choose, and two routed by task. In the first of those all
tasks share expert 0 but digits; in the last each has its own. Batches are the paper's 512, 256, 128 and 128 / 8.
"""

from jmoe.config import (
    CommConfig,
    OptimizerConfig,
    RouterConfig,
    TaskConfig,
    VisionModelConfig,
    VisionTrainConfig,
)

ufo_tiny = VisionTrainConfig(
    model=VisionModelConfig(
        image_size=16,
        patch_size=4,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=1,
        mlp_only_layers=(0,),
        task_layers=(2, 3),
        position="learned",
        norm="layernorm",
        router=RouterConfig(kind="sigmoid", aux_loss_coef=0.0),
    ),
    tasks={
        "glyphs": TaskConfig("glyphs", batch_size=64, path=(0, 0)),
        "digits": TaskConfig("digits", batch_size=32, path=(1, 1)),
        "fonts": TaskConfig("fonts", batch_size=16, path=(0, 2)),
        "photographs": TaskConfig("photographs", batch_size=16, path=(0, 3)),
    },
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50, weight_decay=0.05),
    comm=CommConfig(schedule="none"),
    num_steps=3000,
    compute_dtype="float32",
)
