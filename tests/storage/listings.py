"""Files of real repositories on the hub: name and bytes, 0 where no public source states them.

The names are as the hub's API gave them in 2025 and 2026. Files that are no GGUF are left out.
"""


def parts(stem: str, *sizes: int) -> dict[str, int]:
    """Return the parts of a split model of these sizes."""
    return {f"{stem}-{at:05}-of-{len(sizes):05}.gguf": size for at, size in enumerate(sizes, 1)}


QWEN_7B = {
    "qwen2.5-7b-instruct-q2_k.gguf": 0, "qwen2.5-7b-instruct-q3_k_m.gguf": 0,
    **parts("qwen2.5-7b-instruct-fp16", 0, 0, 0, 0),
    **parts("qwen2.5-7b-instruct-q4_0", 3_983_228_352, 448_162_496),
    **parts("qwen2.5-7b-instruct-q4_k_m", 3_993_201_344, 689_872_288),
    **parts("qwen2.5-7b-instruct-q5_k_m", 3_989_841_792, 1_454_989_568),
    **parts("qwen2.5-7b-instruct-q6_k", 3_950_642_464, 2_303_556_416),
    **parts("qwen2.5-7b-instruct-q8_0", 3_980_069_248, 3_942_935_680, 175_520_480),
}  # fmt: skip
PHI_3 = {"Phi-3-mini-4k-instruct-fp16.gguf": 7_643_295_904, "Phi-3-mini-4k-instruct-q4.gguf": 2_393_231_072}
QWEN_27B = {
    **parts("BF16/Qwen3.8-27B-BF16", 49_986_159_616, 4_671_576_000),
    "MTP/mtp-Qwen3.8-27B-Q4_0.gguf": 1_369_590_656, "Qwen3.8-27B-Q4_0.gguf": 16_056_478_688,
    "Qwen3.8-27B-Q8_0.gguf": 29_047_086_048, "Qwen3.8-27B-UD-IQ1_S.gguf": 6_192_222_208,
    "Qwen3.8-27B-UD-IQ3_S.gguf": 12_040_883_104, "Qwen3.8-27B-UD-IQ4_XS.gguf": 14_252_845_984,
    "Qwen3.8-27B-UD-Q3_K_XL.gguf": 13_146_393_504, "Qwen3.8-27B-UD-Q4_K_M.gguf": 16_464_440_224,
    "Qwen3.8-27B-UD-Q4_K_XL.gguf": 17_559_178_144, "imatrix_unsloth.gguf": 13_642_656,
    "mmproj-BF16.gguf": 931_146_432,
}  # fmt: skip
QWEN_FLASH = {
    "MTP/mtp-Qwen3.8-Flash-Next-Q8_0.gguf": 4_137_429_120, "mmproj-BF16.gguf": 907_542_944,
    "MTP/mtp-Qwen3.8-Flash-Next-shared-Q8_0.gguf": 2_786_568_256, "UD-Q6_K_XL/imatrix_unsloth.gguf": 0,
    **parts("UD-Q4_K_XL/Qwen3.8-Flash-Next-UD-Q4_K_XL", 10_946_624, 49_859_583_136, 49_376_141_504, 12_087_983_520),
}  # fmt: skip
GPT_OSS = parts("gpt-oss-120b-mxfp4", 0, 0, 0)
DRAFTERS = {
    "gemma-4-12b-it-Q8_0.gguf": 12_670_000_000, "MTP/mtp-gemma-4-12b-it-Q8_0.gguf": 465_000_000,
    "mtp-gemma-4-12b-it.gguf": 465_000_000, "dflash-Qwen3.6-27B-BF16.gguf": 3_000_000_000,
    "dspark/DeepSeek-V4-Flash-0731-Q8_0-dspark.gguf": 11_000_000_000,
}  # fmt: skip
"""A model beside drafters by several schemes of names."""
