"""The engine: llama.cpp behind a small, typed door. The only package that imports `llama_cpp`."""

from edgellm.engine import native  # before anything else imports llama.cpp: OpenMP reads its settings then

# isort: split
from edgellm.engine.chat.template import Message, ToolCall
from edgellm.engine.context import Context
from edgellm.engine.gguf.cuttable import check_cuttable, cut, cut_bytes
from edgellm.engine.gguf.header import GgufHeader
from edgellm.engine.gguf.reader import ModelFile, check_gguf
from edgellm.engine.graph_hooks import Capture, Recorder
from edgellm.engine.kv.sequences import SeqRows
from edgellm.engine.layer_block import Block
from edgellm.engine.model import ContextSpec, Model, mtp_obstacle
from edgellm.engine.native import ShouldStop, Stop, never
from edgellm.engine.vocabulary import Floats, Ids, Vocabulary, common_prefix
