from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WelcomeRequest(_message.Message):
    __slots__ = ("protocol", "nonce")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    nonce: bytes
    def __init__(self, protocol: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class WelcomeReply(_message.Message):
    __slots__ = ("protocol", "device", "signature", "version", "rights", "models", "cards")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    CARDS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    device: bytes
    signature: bytes
    version: str
    rights: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedCompositeFieldContainer[Offer]
    cards: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[int] = ..., device: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., version: _Optional[str] = ..., rights: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ..., cards: _Optional[_Iterable[str]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("model", "size", "vocabulary", "behind", "tokenizer")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    model: str
    size: int
    vocabulary: bytes
    behind: str
    tokenizer: bytes
    def __init__(self, model: _Optional[str] = ..., size: _Optional[int] = ..., vocabulary: _Optional[bytes] = ..., behind: _Optional[str] = ..., tokenizer: _Optional[bytes] = ...) -> None: ...

class PairFrame(_message.Message):
    __slots__ = ("hello", "confirm", "done")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    hello: PairHello
    confirm: PairConfirm
    done: PairDone
    def __init__(self, hello: _Optional[_Union[PairHello, _Mapping]] = ..., confirm: _Optional[_Union[PairConfirm, _Mapping]] = ..., done: _Optional[_Union[PairDone, _Mapping]] = ...) -> None: ...

class PairHello(_message.Message):
    __slots__ = ("protocol", "certificate", "spake")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SPAKE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    certificate: bytes
    spake: bytes
    def __init__(self, protocol: _Optional[int] = ..., certificate: _Optional[bytes] = ..., spake: _Optional[bytes] = ...) -> None: ...

class PairConfirm(_message.Message):
    __slots__ = ("mac", "sealed", "signature")
    MAC_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    mac: bytes
    sealed: bytes
    signature: bytes
    def __init__(self, mac: _Optional[bytes] = ..., sealed: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class PairDone(_message.Message):
    __slots__ = ("mac",)
    MAC_FIELD_NUMBER: _ClassVar[int]
    mac: bytes
    def __init__(self, mac: _Optional[bytes] = ...) -> None: ...

class Introduction(_message.Message):
    __slots__ = ("name", "rights", "addresses", "cards")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    CARDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    rights: _containers.RepeatedScalarFieldContainer[str]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    cards: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., rights: _Optional[_Iterable[str]] = ..., addresses: _Optional[_Iterable[str]] = ..., cards: _Optional[_Iterable[str]] = ...) -> None: ...
