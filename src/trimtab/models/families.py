"""Families of models by their `model_type`, as far as the shape of their forward cannot be told from a config."""

from __future__ import annotations

# The forward looks both ways. A family in no table is judged by its architecture's name.
ENCODERS = frozenset({
    "albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert",
    "electra", "ernie", "eurobert", "funnel", "ibert", "jina_embeddings_v3", "layoutlm", "longformer", "luke",
    "megatron-bert", "mobilebert", "modernbert", "mpnet", "mra", "nomic_bert", "nystromformer", "rembert",
    "roberta", "roberta-prelayernorm", "roformer", "squeezebert", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso",
})  # fmt: skip
DECODERS = frozenset({
    "apertus", "arcee", "bitnet", "bloom", "codegen", "cohere", "cohere2", "dbrx", "deepseek_v2", "deepseek_v3",
    "ernie4_5", "exaone4", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "helium",
    "hunyuan_v1_dense", "jamba", "lfm2", "llama", "mamba", "mamba2", "minicpm3", "ministral", "mistral",
    "mixtral", "modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    "stablelm", "starcoder2", "vaultgemma", "xglm", "zamba", "zamba2",
})  # fmt: skip
ENCODER_DECODERS = frozenset({
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5",
    "m2m_100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet",
    "switch_transformers", "t5", "t5gemma", "umt5",
})  # fmt: skip
# Their position table starts behind the padding index, so two rows (with padding index 1) can never be used.
POSITIONS_AFTER_PADDING = frozenset({
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "luke", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
# Relative positions or none: no longest input.
NO_POSITIONS = frozenset({"t5", "mt5", "umt5", "bloom", "mamba", "mamba2", "xlnet", "transfo-xl", "rwkv"})
