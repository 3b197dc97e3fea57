"""The engine: llama.cpp behind a small, typed door. The only package that imports `llama_cpp`."""

from edgellm.engine.abort_flag import ShouldStop, Stop, never
from edgellm.engine.chat_prompt import Message
from edgellm.engine.decoding.batch import SeqRows
from edgellm.engine.decoding.context import Context
from edgellm.engine.decoding.graph_hooks import Capture, Recorder
from edgellm.engine.decoding.lazy_logits import HEADS, LateRows, Rows, block_ends, in_blocks, known
from edgellm.engine.decoding.lm_head import LMHead, head_pays, why_late
from edgellm.engine.decoding.top_k import Top2, top2, top_k
from edgellm.engine.gguf.dequantize import to_f32
from edgellm.engine.gguf.dimensions import Dimensions, dimensions
from edgellm.engine.gguf.memory_estimate import MemoryEstimate, costs_of
from edgellm.engine.gguf.merge_shards import join
from edgellm.engine.gguf.reader import GgufHeader, TensorInfo, check_gguf
from edgellm.engine.gguf.shard import check_cuttable, cut, cut_bytes
from edgellm.engine.layer_block import Block, Passage
from edgellm.engine.model import Model
from edgellm.engine.types import Floats, Ids, common_prefix
from edgellm.engine.vocabulary import Vocabulary

__all__ = [
    "HEADS",
    "Block",
    "Capture",
    "Context",
    "Dimensions",
    "Floats",
    "GgufHeader",
    "Ids",
    "LMHead",
    "LateRows",
    "MemoryEstimate",
    "Message",
    "Model",
    "Passage",
    "Recorder",
    "Rows",
    "SeqRows",
    "ShouldStop",
    "Stop",
    "TensorInfo",
    "Top2",
    "Vocabulary",
    "block_ends",
    "check_cuttable",
    "check_gguf",
    "common_prefix",
    "costs_of",
    "cut",
    "cut_bytes",
    "dimensions",
    "head_pays",
    "in_blocks",
    "join",
    "known",
    "never",
    "to_f32",
    "top2",
    "top_k",
    "why_late",
]
