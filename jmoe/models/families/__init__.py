"""The Hugging Face families that jmoe reads and writes, one file each.

To add a family: write its file, add it to `FAMILIES` (see docs/families.md).
"""

from jmoe.models.families import (
    bailing_moe,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5_moe,
    glm4_moe,
    gpt_moe,
    gpt_oss,
    granitemoe,
    hunyuan_v1_moe,
    llama4_text,
    minimax_m2,
    mixtral,
    olmoe,
    phimoe,
    qwen2_moe,
    qwen3_5_moe_text,
    qwen3_moe,
    qwen3_next,
)
from jmoe.models.families.family import Family

# in the order in which `hf_config` tries them
FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (
        mixtral,
        qwen3_moe,
        qwen2_moe,
        olmoe,
        deepseek_v3,
        gpt_oss,
        glm4_moe,
        dots1,
        minimax_m2,
        deepseek_v2,
        ernie4_5_moe,
        granitemoe,
        hunyuan_v1_moe,
        qwen3_next,
        qwen3_5_moe_text,
        phimoe,
        bailing_moe,
        llama4_text,
        gpt_moe,
    )
}
