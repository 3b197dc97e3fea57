from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OfferRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("protocol", "version", "memory", "unit", "cached")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    memory: int
    unit: str
    cached: int
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., memory: _Optional[int] = ..., unit: _Optional[str] = ..., cached: _Optional[int] = ...) -> None: ...

class RpcOrder(_message.Message):
    __slots__ = ("begin", "whole")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    whole: Whole
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., whole: _Optional[_Union[Whole, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("protocol", "session", "memory", "weights", "name")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    session: bytes
    memory: int
    weights: int
    name: str
    def __init__(self, protocol: _Optional[int] = ..., session: _Optional[bytes] = ..., memory: _Optional[int] = ..., weights: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class Whole(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RpcReport(_message.Message):
    __slots__ = ("serving", "beat")
    SERVING_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    serving: Serving
    beat: Beat
    def __init__(self, serving: _Optional[_Union[Serving, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class Serving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RpcFrame(_message.Message):
    __slots__ = ("session", "data")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    data: bytes
    def __init__(self, session: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...
