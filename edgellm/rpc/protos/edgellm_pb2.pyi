from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "model")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model: str
    def __init__(self, protocol: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "vocabulary", "vocabulary_size", "model", "context_length", "model_hash", "logprobs", "chat_template", "penalties", "grammars", "behind", "likely_tokens", "draws_itself", "tokenizer", "sampling")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    PENALTIES_FIELD_NUMBER: _ClassVar[int]
    GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    LIKELY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAWS_ITSELF_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    vocabulary: bytes
    vocabulary_size: int
    model: str
    context_length: int
    model_hash: bytes
    logprobs: bool
    chat_template: str
    penalties: bool
    grammars: bool
    behind: str
    likely_tokens: int
    draws_itself: bool
    tokenizer: bytes
    sampling: Sampling
    def __init__(self, protocol: _Optional[int] = ..., vocabulary: _Optional[bytes] = ..., vocabulary_size: _Optional[int] = ..., model: _Optional[str] = ..., context_length: _Optional[int] = ..., model_hash: _Optional[bytes] = ..., logprobs: _Optional[bool] = ..., chat_template: _Optional[str] = ..., penalties: _Optional[bool] = ..., grammars: _Optional[bool] = ..., behind: _Optional[str] = ..., likely_tokens: _Optional[int] = ..., draws_itself: _Optional[bool] = ..., tokenizer: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class TokenizerRequest(_message.Message):
    __slots__ = ("model", "offset")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    model: str
    offset: int
    def __init__(self, model: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class TokenizerPart(_message.Message):
    __slots__ = ("data", "size")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    size: int
    def __init__(self, data: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class DeviceFrame(_message.Message):
    __slots__ = ("open", "verify")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    open: Open
    verify: Verify
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., verify: _Optional[_Union[Verify, _Mapping]] = ...) -> None: ...

class VerifierFrame(_message.Message):
    __slots__ = ("verdict", "working", "busy", "draining")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    WORKING_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    working: Working
    busy: Busy
    draining: Draining
    def __init__(self, verdict: _Optional[_Union[Verdict, _Mapping]] = ..., working: _Optional[_Union[Working, _Mapping]] = ..., busy: _Optional[_Union[Busy, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("protocol", "vocabulary", "sampling", "model")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    vocabulary: bytes
    sampling: Sampling
    model: str
    def __init__(self, protocol: _Optional[int] = ..., vocabulary: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed", "min_p", "penalties", "constraint")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PENALTIES_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float
    penalties: Penalties
    constraint: Constraint
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ..., penalties: _Optional[_Union[Penalties, _Mapping]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("schema", "start", "after")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    schema: str
    start: int
    after: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, schema: _Optional[str] = ..., start: _Optional[int] = ..., after: _Optional[_Iterable[int]] = ...) -> None: ...

class Penalties(_message.Message):
    __slots__ = ("repeat", "frequency", "presence", "ids", "bias", "start")
    REPEAT_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    repeat: float
    frequency: float
    presence: float
    ids: _containers.RepeatedScalarFieldContainer[int]
    bias: _containers.RepeatedScalarFieldContainer[float]
    start: int
    def __init__(self, repeat: _Optional[float] = ..., frequency: _Optional[float] = ..., presence: _Optional[float] = ..., ids: _Optional[_Iterable[int]] = ..., bias: _Optional[_Iterable[float]] = ..., start: _Optional[int] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ("round", "position", "prefix", "chunk", "extra", "copied", "logprobs")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    round: int
    position: int
    prefix: _containers.RepeatedScalarFieldContainer[int]
    chunk: _containers.RepeatedScalarFieldContainer[int]
    extra: int
    copied: bool
    logprobs: int
    def __init__(self, round: _Optional[int] = ..., position: _Optional[int] = ..., prefix: _Optional[_Iterable[int]] = ..., chunk: _Optional[_Iterable[int]] = ..., extra: _Optional[int] = ..., copied: _Optional[bool] = ..., logprobs: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("round", "accepted", "tokens", "seconds", "passes", "plausible", "logprobs", "cached")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    PLAUSIBLE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    round: int
    accepted: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    seconds: float
    passes: int
    plausible: bytes
    logprobs: Logprobs
    cached: int
    def __init__(self, round: _Optional[int] = ..., accepted: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., seconds: _Optional[float] = ..., passes: _Optional[int] = ..., plausible: _Optional[bytes] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., cached: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("own", "ids", "likeliest")
    OWN_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LIKELIEST_FIELD_NUMBER: _ClassVar[int]
    own: _containers.RepeatedScalarFieldContainer[float]
    ids: _containers.RepeatedScalarFieldContainer[int]
    likeliest: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, own: _Optional[_Iterable[float]] = ..., ids: _Optional[_Iterable[int]] = ..., likeliest: _Optional[_Iterable[float]] = ...) -> None: ...

class Working(_message.Message):
    __slots__ = ("round", "step", "computed", "cached")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    computed: int
    cached: int
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ..., computed: _Optional[int] = ..., cached: _Optional[int] = ...) -> None: ...

class Busy(_message.Message):
    __slots__ = ("round", "retry_ms")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    round: int
    retry_ms: int
    def __init__(self, round: _Optional[int] = ..., retry_ms: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
