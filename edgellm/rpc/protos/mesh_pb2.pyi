from edgellm.rpc.protos import edgellm_pb2 as _edgellm_pb2
from edgellm.rpc.protos import layers_pb2 as _layers_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HoldsRequest(_message.Message):
    __slots__ = ("protocol", "model", "pieces")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model: bytes
    pieces: _containers.RepeatedCompositeFieldContainer[_layers_pb2.Piece]
    def __init__(self, protocol: _Optional[int] = ..., model: _Optional[bytes] = ..., pieces: _Optional[_Iterable[_Union[_layers_pb2.Piece, _Mapping]]] = ...) -> None: ...

class HoldsReply(_message.Message):
    __slots__ = ("protocol", "layers", "warm", "memory", "version", "begins", "ends", "whole", "brought", "cut", "unit")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    BROUGHT_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    warm: _containers.RepeatedScalarFieldContainer[int]
    memory: int
    version: str
    begins: _containers.RepeatedScalarFieldContainer[int]
    ends: _containers.RepeatedScalarFieldContainer[int]
    whole: bool
    brought: _containers.RepeatedCompositeFieldContainer[_layers_pb2.Piece]
    cut: _containers.RepeatedScalarFieldContainer[int]
    unit: str
    def __init__(self, protocol: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., warm: _Optional[_Iterable[int]] = ..., memory: _Optional[int] = ..., version: _Optional[str] = ..., begins: _Optional[_Iterable[int]] = ..., ends: _Optional[_Iterable[int]] = ..., whole: _Optional[bool] = ..., brought: _Optional[_Iterable[_Union[_layers_pb2.Piece, _Mapping]]] = ..., cut: _Optional[_Iterable[int]] = ..., unit: _Optional[str] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("prepare", "parcel", "waiting")
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    PARCEL_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    prepare: Prepare
    parcel: MeshParcel
    waiting: Waiting
    def __init__(self, prepare: _Optional[_Union[Prepare, _Mapping]] = ..., parcel: _Optional[_Union[MeshParcel, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("working", "loaded", "onward", "answer", "failed", "progress", "held", "computing")
    WORKING_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    ONWARD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    working: _edgellm_pb2.Working
    loaded: StageLoaded
    onward: MeshParcel
    answer: StageAnswer
    failed: StageFailed
    progress: float
    held: float
    computing: float
    def __init__(self, working: _Optional[_Union[_edgellm_pb2.Working, _Mapping]] = ..., loaded: _Optional[_Union[StageLoaded, _Mapping]] = ..., onward: _Optional[_Union[MeshParcel, _Mapping]] = ..., answer: _Optional[_Union[StageAnswer, _Mapping]] = ..., failed: _Optional[_Union[StageFailed, _Mapping]] = ..., progress: _Optional[float] = ..., held: _Optional[float] = ..., computing: _Optional[float] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("protocol", "model", "name", "first", "last", "layers", "n_embd", "n_vocab", "context", "sessions", "half", "version", "pieces", "parameters", "reproducible")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    N_EMBD_FIELD_NUMBER: _ClassVar[int]
    N_VOCAB_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    HALF_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    REPRODUCIBLE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model: bytes
    name: str
    first: int
    last: int
    layers: int
    n_embd: int
    n_vocab: int
    context: int
    sessions: int
    half: bool
    version: str
    pieces: _containers.RepeatedCompositeFieldContainer[_layers_pb2.Piece]
    parameters: int
    reproducible: bool
    def __init__(self, protocol: _Optional[int] = ..., model: _Optional[bytes] = ..., name: _Optional[str] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., layers: _Optional[int] = ..., n_embd: _Optional[int] = ..., n_vocab: _Optional[int] = ..., context: _Optional[int] = ..., sessions: _Optional[int] = ..., half: _Optional[bool] = ..., version: _Optional[str] = ..., pieces: _Optional[_Iterable[_Union[_layers_pb2.Piece, _Mapping]]] = ..., parameters: _Optional[int] = ..., reproducible: _Optional[bool] = ...) -> None: ...

class MeshParcel(_message.Message):
    __slots__ = ("session", "number", "start", "ids", "rows", "wide", "ask", "sampling", "logits")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDE_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    session: int
    number: int
    start: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    rows: bytes
    wide: bool
    ask: _edgellm_pb2.Verify
    sampling: _edgellm_pb2.Sampling
    logits: bool
    def __init__(self, session: _Optional[int] = ..., number: _Optional[int] = ..., start: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., rows: _Optional[bytes] = ..., wide: _Optional[bool] = ..., ask: _Optional[_Union[_edgellm_pb2.Verify, _Mapping]] = ..., sampling: _Optional[_Union[_edgellm_pb2.Sampling, _Mapping]] = ..., logits: _Optional[bool] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageLoaded(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    def __init__(self, layers: _Optional[int] = ...) -> None: ...

class StageAnswer(_message.Message):
    __slots__ = ("verdict", "logits")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    verdict: _edgellm_pb2.Verdict
    logits: bytes
    def __init__(self, verdict: _Optional[_Union[_edgellm_pb2.Verdict, _Mapping]] = ..., logits: _Optional[bytes] = ...) -> None: ...

class StageFailed(_message.Message):
    __slots__ = ("number", "what", "next_step")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    number: int
    what: str
    next_step: str
    def __init__(self, number: _Optional[int] = ..., what: _Optional[str] = ..., next_step: _Optional[str] = ...) -> None: ...
