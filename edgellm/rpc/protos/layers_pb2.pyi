from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Piece(_message.Message):
    __slots__ = ("first", "last", "size", "sha256")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    size: int
    sha256: bytes
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., size: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Recipe(_message.Message):
    __slots__ = ("fingerprint", "name", "architecture", "layers", "pieces")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    name: str
    architecture: str
    layers: int
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    def __init__(self, fingerprint: _Optional[bytes] = ..., name: _Optional[str] = ..., architecture: _Optional[str] = ..., layers: _Optional[int] = ..., pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ...) -> None: ...

class HeldRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class HeldReply(_message.Message):
    __slots__ = ("protocol", "limit", "size", "free", "models")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    limit: int
    size: int
    free: int
    models: _containers.RepeatedCompositeFieldContainer[HeldModel]
    def __init__(self, protocol: _Optional[int] = ..., limit: _Optional[int] = ..., size: _Optional[int] = ..., free: _Optional[int] = ..., models: _Optional[_Iterable[_Union[HeldModel, _Mapping]]] = ...) -> None: ...

class HeldModel(_message.Message):
    __slots__ = ("recipe", "pieces", "arriving", "used")
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    recipe: Recipe
    pieces: _containers.RepeatedScalarFieldContainer[int]
    arriving: int
    used: int
    def __init__(self, recipe: _Optional[_Union[Recipe, _Mapping]] = ..., pieces: _Optional[_Iterable[int]] = ..., arriving: _Optional[int] = ..., used: _Optional[int] = ...) -> None: ...

class Wanted(_message.Message):
    __slots__ = ("protocol", "recipe")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    recipe: Recipe
    def __init__(self, protocol: _Optional[int] = ..., recipe: _Optional[_Union[Recipe, _Mapping]] = ...) -> None: ...

class There(_message.Message):
    __slots__ = ("sizes",)
    SIZES_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class Portion(_message.Message):
    __slots__ = ("piece", "offset", "data")
    PIECE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    piece: Piece
    offset: int
    data: bytes
    def __init__(self, piece: _Optional[_Union[Piece, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Arrived(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...

class CleanRequest(_message.Message):
    __slots__ = ("protocol", "fingerprint")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    fingerprint: bytes
    def __init__(self, protocol: _Optional[int] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class CleanReply(_message.Message):
    __slots__ = ("pieces", "size", "in_use")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    pieces: int
    size: int
    in_use: int
    def __init__(self, pieces: _Optional[int] = ..., size: _Optional[int] = ..., in_use: _Optional[int] = ...) -> None: ...

class MeasureRequest(_message.Message):
    __slots__ = ("protocol", "header", "data", "layers", "width", "oldest")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    header: bytes
    data: int
    layers: int
    width: int
    oldest: float
    def __init__(self, protocol: _Optional[int] = ..., header: _Optional[bytes] = ..., data: _Optional[int] = ..., layers: _Optional[int] = ..., width: _Optional[int] = ..., oldest: _Optional[float] = ...) -> None: ...

class Figures(_message.Message):
    __slots__ = ("taken", "reason", "block", "rows", "seconds", "layer", "disk", "memory", "processor", "version", "waited", "unit", "unit_reason")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    UNIT_REASON_FIELD_NUMBER: _ClassVar[int]
    taken: int
    reason: str
    block: bytes
    rows: _containers.RepeatedScalarFieldContainer[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    layer: int
    disk: float
    memory: int
    processor: str
    version: str
    waited: float
    unit: str
    unit_reason: str
    def __init__(self, taken: _Optional[int] = ..., reason: _Optional[str] = ..., block: _Optional[bytes] = ..., rows: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Iterable[float]] = ..., layer: _Optional[int] = ..., disk: _Optional[float] = ..., memory: _Optional[int] = ..., processor: _Optional[str] = ..., version: _Optional[str] = ..., waited: _Optional[float] = ..., unit: _Optional[str] = ..., unit_reason: _Optional[str] = ...) -> None: ...

class FlowRequest(_message.Message):
    __slots__ = ("data", "want")
    DATA_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    want: int
    def __init__(self, data: _Optional[bytes] = ..., want: _Optional[int] = ...) -> None: ...

class FlowReply(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
