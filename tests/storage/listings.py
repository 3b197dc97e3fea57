"""Files of real repositories on the hub, as its API lists them: name, bytes, and SHA-256 where it was at hand.

They are facts that public sources state, each named below. A size of 0 was not stated there. Files that are no GGUF are
left out, except some.
"""

from __future__ import annotations

File = tuple[str, int, str]

# The names as the API gave them on 2026-10-10; sizes and hashes from public catalogues of model files that pin revision
# bb5d59e06d9551d752d08b292a50eb208b07ab1f.
QWEN_7B: tuple[File, ...] = (
    (".gitattributes", 0, ""),
    ("README.md", 0, ""),
    ("qwen2.5-7b-instruct-fp16-00001-of-00004.gguf", 0, ""),
    ("qwen2.5-7b-instruct-fp16-00002-of-00004.gguf", 0, ""),
    ("qwen2.5-7b-instruct-fp16-00003-of-00004.gguf", 0, ""),
    ("qwen2.5-7b-instruct-fp16-00004-of-00004.gguf", 0, ""),
    ("qwen2.5-7b-instruct-q2_k.gguf", 0, ""),
    ("qwen2.5-7b-instruct-q3_k_m.gguf", 0, ""),
    ("qwen2.5-7b-instruct-q4_0-00001-of-00002.gguf", 3_983_228_352, ""),
    ("qwen2.5-7b-instruct-q4_0-00002-of-00002.gguf", 448_162_496, ""),
    ("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", 3_993_201_344,
     "dfce12e3862a5283ccfb88221b48480e58745165de856439950d0f22590580db"),
    ("qwen2.5-7b-instruct-q4_k_m-00002-of-00002.gguf", 689_872_288,
     "539cf93f78e887edea1c04e2d7d8cdaca9d01dae9c9025bcb8accbe29df3d72a"),
    ("qwen2.5-7b-instruct-q5_0-00001-of-00002.gguf", 4_001_112_160, ""),
    ("qwen2.5-7b-instruct-q5_0-00002-of-00002.gguf", 1_314_064_416, ""),
    ("qwen2.5-7b-instruct-q5_k_m-00001-of-00002.gguf", 3_989_841_792, ""),
    ("qwen2.5-7b-instruct-q5_k_m-00002-of-00002.gguf", 1_454_989_568, ""),
    ("qwen2.5-7b-instruct-q6_k-00001-of-00002.gguf", 3_950_642_464, ""),
    ("qwen2.5-7b-instruct-q6_k-00002-of-00002.gguf", 2_303_556_416, ""),
    ("qwen2.5-7b-instruct-q8_0-00001-of-00003.gguf", 3_980_069_248,
     "26e30cb4559f0d9e9e11f34d351292af6f42199ce3fa742b5e7c5af4bc35b0f0"),
    ("qwen2.5-7b-instruct-q8_0-00002-of-00003.gguf", 3_942_935_680, ""),
    ("qwen2.5-7b-instruct-q8_0-00003-of-00003.gguf", 175_520_480, ""),
)  # fmt: skip
"""Qwen/Qwen2.5-7B-Instruct-GGUF"""

# Sizes and hashes from public package recipes and download logs of March 2026.
PHI_3: tuple[File, ...] = (
    ("Phi-3-mini-4k-instruct-fp16.gguf", 7_643_295_904,
     "5d99003e395775659b0dde3f941d88ff378b2837a8dc3a2ea94222ab1420fad3"),
    ("Phi-3-mini-4k-instruct-q4.gguf", 2_393_231_072,
     "8a83c7fb9049a9b2e92266fa7ad04933bb53aa1e85136b7b30f1b8000ff2edef"),
)  # fmt: skip
"""microsoft/Phi-3-mini-4k-instruct-gguf"""

# Some files of the listing of 2026-09-25, from a public test that quotes it.
QWEN_27B: tuple[File, ...] = (
    ("BF16/Qwen3.8-27B-BF16-00001-of-00002.gguf", 49_986_159_616, ""),
    ("BF16/Qwen3.8-27B-BF16-00002-of-00002.gguf", 4_671_576_000, ""),
    ("MTP/mtp-Qwen3.8-27B-Q4_0.gguf", 1_369_590_656, ""),
    ("Qwen3.8-27B-Q4_0.gguf", 16_056_478_688, ""),
    ("Qwen3.8-27B-Q8_0.gguf", 29_047_086_048, ""),
    ("Qwen3.8-27B-UD-IQ1_S.gguf", 6_192_222_208, ""),
    ("Qwen3.8-27B-UD-IQ3_S.gguf", 12_040_883_104, ""),
    ("Qwen3.8-27B-UD-IQ4_XS.gguf", 14_252_845_984, ""),
    ("Qwen3.8-27B-UD-Q3_K_XL.gguf", 13_146_393_504, ""),
    ("Qwen3.8-27B-UD-Q4_K_M.gguf", 16_464_440_224, ""),
    ("Qwen3.8-27B-UD-Q4_K_XL.gguf", 17_559_178_144, ""),
    ("imatrix_unsloth.gguf", 13_642_656, ""),
    ("mmproj-BF16.gguf", 931_146_432, ""),
)
"""unsloth/Qwen3.8-27B-GGUF"""

# Some of its files at revision 38bb39ee97821de2c9009abb7e93950eec396e66, from public pins of model files. The first
# part of the model holds the metadata alone.
QWEN_FLASH: tuple[File, ...] = (
    ("MTP/mtp-Qwen3.8-Flash-Next-Q8_0.gguf", 4_137_429_120, ""),
    ("MTP/mtp-Qwen3.8-Flash-Next-shared-Q8_0.gguf", 2_786_568_256,
     "5ff54097406a905cf3a724c709124ceb0e3e10235ee862298969e91c96fa96e6"),
    ("UD-Q4_K_XL/Qwen3.8-Flash-Next-UD-Q4_K_XL-00001-of-00004.gguf", 10_946_624,
     "4448186216b3af4cc558bbce2c3213f01608f8f8b2e5267a9767971dd3ec8082"),
    ("UD-Q4_K_XL/Qwen3.8-Flash-Next-UD-Q4_K_XL-00002-of-00004.gguf", 49_859_583_136,
     "3f342f1c1580473f1ee94ddd5b28206e8c07a70fa1a366f59d1d6c922919a6c9"),
    ("UD-Q4_K_XL/Qwen3.8-Flash-Next-UD-Q4_K_XL-00003-of-00004.gguf", 49_376_141_504,
     "56758f40269cad5cd9b0d3d6fbae0f40f6d5be6de49e4ab392dbe83157d9cbd3"),
    ("UD-Q4_K_XL/Qwen3.8-Flash-Next-UD-Q4_K_XL-00004-of-00004.gguf", 12_087_983_520,
     "753bda48b98ba4f1636134a90a967de1b2d3908a236c026e464777342e53510a"),
    ("UD-Q6_K_XL/imatrix_unsloth.gguf", 0, ""),
    ("mmproj-BF16.gguf", 907_542_944, ""),
)  # fmt: skip
"""unsloth/Qwen3.8-Flash-Next-GGUF"""

# Hashes from a public benchmark's list of models; today the repository has one file of 63,387,346,208 bytes instead.
GPT_OSS: tuple[File, ...] = (
    ("gpt-oss-120b-mxfp4-00001-of-00003.gguf", 0, "e2865eb6c1df7b2ffbebf305cd5d9074d5ccc0fe3b862f98d343a46dad1606f9"),
    ("gpt-oss-120b-mxfp4-00002-of-00003.gguf", 0, "346492f65891fb27cac5c74a8c07626cbfeb4211cd391ec4de37dbbe3109a93b"),
    ("gpt-oss-120b-mxfp4-00003-of-00003.gguf", 0, "66dca81040933f5a49177e82c479c51319cefb83bd22dad9f06dad45e25f1463"),
)
"""ggml-org/gpt-oss-120b-GGUF, in 2025"""

# Names that public tests of other programs quote from repositories of 2026.
DRAFTERS: tuple[File, ...] = (
    ("gemma-4-12b-it-Q8_0.gguf", 12_670_000_000, ""),
    ("MTP/mtp-gemma-4-12b-it-Q8_0.gguf", 465_000_000, ""),
    ("mtp-gemma-4-12b-it.gguf", 465_000_000, ""),
    ("dflash-Qwen3.6-27B-BF16.gguf", 3_000_000_000, ""),
    ("dspark/DeepSeek-V4-Flash-0731-Q8_0-dspark.gguf", 11_000_000_000, ""),
)
"""A model beside drafters by several schemes of names."""


def sizes(files: tuple[File, ...]) -> dict[str, int]:
    """Return name -> bytes."""
    return {name: size for name, size, _ in files}
