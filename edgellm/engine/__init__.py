"""The engine: llama.cpp behind a small, typed door. The only package that imports `llama_cpp`."""

from edgellm.engine.batch import SeqRows
from edgellm.engine.block import Block, Passage
from edgellm.engine.capture import Capture, Recorder
from edgellm.engine.chat import Message
from edgellm.engine.context import Context
from edgellm.engine.convert import to_f32
from edgellm.engine.costs import Costs, costs_of
from edgellm.engine.dimensions import Dimensions, dimensions
from edgellm.engine.facts import Top2, top2, top_k
from edgellm.engine.gguf import GgufHeader, TensorInfo, check_gguf
from edgellm.engine.head import Head, head_pays, why_late
from edgellm.engine.join import join
from edgellm.engine.late import HEADS, LateRows, Rows, block_ends, in_blocks, known
from edgellm.engine.model import Model
from edgellm.engine.shard import check_cuttable, cut, cut_bytes
from edgellm.engine.stop import Stop
from edgellm.engine.types import Floats, Ids, common_prefix
from edgellm.engine.vocabulary import Vocabulary

__all__ = [
    "HEADS",
    "Block",
    "Capture",
    "Context",
    "Costs",
    "Dimensions",
    "Floats",
    "GgufHeader",
    "Head",
    "Ids",
    "LateRows",
    "Message",
    "Model",
    "Passage",
    "Recorder",
    "Rows",
    "SeqRows",
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
    "to_f32",
    "top2",
    "top_k",
    "why_late",
]
