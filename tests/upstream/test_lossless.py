"""A reply through every dialect and tier is the one that the verifier writes alone."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgellm.cli.app import app
from edgellm.diagnostics import examine_server
from edgellm.errors import InvalidOption, VocabularyMismatch
from edgellm.llm import DEFAULT, LLM
from edgellm.spec.stream import Reply
from edgellm.spec.types import Explanation, Source, Token
from edgellm.upstream.rows import Tier
from edgellm.upstream.verifier import UpstreamOptions
from testkit.upstream.dialects import NOWHERE, LlamaServer, Sglang, Vllm
from testkit.upstream.engine import Engine
from testkit.upstream.server import Fault, UpstreamServer
from tests.spec.real import case, ids
from tests.upstream.conftest import MOST, NUMBERS, SCORING, WAYS, OpenPair

WRITES = {"/inference/v1/generate", "/v1/completions", "/completion", "/generate", "/api/generate"}

KINDS = {
    "vllm": "vLLM", "llama-server": "llama-server", "sglang": "SGLang", "ollama": "Ollama", "lm-studio": "LM Studio",
    "tabby": "TabbyAPI", "mlx-lm": "completions by text", "llama-cpp-python": "llama-cpp-python",
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_nothing(way: str, open_pair: OpenPair, wanted: dict[int, list[int]]) -> None:
    pair, server = open_pair(*WAYS[way])
    told: list[Explanation] = []
    for number in NUMBERS:
        reply = pair.reply(case(number), max_tokens=MOST, budget=1.0)
        reply.listen(on_explain=told.append)
        assert ids(reply) == wanted[number]
        assert reply.summary.share_verified == 1.0
    if way != "lm-studio":  # it has a min-p of its own
        # at 1 it leaves the likeliest token alone, so the sampled text is the greedy one
        sampled = pair.reply(case(2), max_tokens=MOST, budget=1.0, temperature=1.5, min_p=1.0, seed=3)
        assert ids(sampled) == wanted[2]
        assert sampled.summary.share_verified == 1.0
    kind = next(name for name in sorted(KINDS, reverse=True) if way.startswith(name))
    assert any(one.text.startswith(f"{KINDS[kind]} at {server.url} verifies by") for one in told)
    assert {path for path, _, _ in server.requests} & WRITES


@pytest.mark.parametrize("way", WAYS)
def test_the_server_alone(
    way: str, engine: Engine, f32_pair: tuple[Path, Path], wanted: dict[int, list[int]], closing: ExitStack
) -> None:
    """Without a draft model several tokens come from one request."""
    make, tier = WAYS[way]
    server = closing.enter_context(UpstreamServer(make(engine)))
    options = UpstreamOptions(tier=tier)
    pair = closing.enter_context(LLM.open("none", server.url, tokenizer=f32_pair[0], threads=1, upstream=options))
    before = len(server.requests)
    assert ids(pair.reply(case(2), max_tokens=MOST)) == wanted[2]
    assert len(server.requests) - before <= len(wanted[2]) // 4 + 2


def test_what_a_server_logs_or_hides_is_said_once(
    engine: Engine, f32_pair: tuple[Path, Path], closing: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))  # an earlier server may have had the same port
    server = closing.enter_context(UpstreamServer(Vllm(engine)))
    said = []
    for _ in range(2):
        with LLM.open(f32_pair[0], server.url, threads=1) as pair:
            said.append(pair.notices)
    assert ["--enable-log-requests" in said[0][0], "does not show its chat template" in said[0][1]] == [True, True]
    assert said[1] == ()


def test_a_tier_that_the_server_lacks(open_pair: OpenPair) -> None:
    with pytest.raises(InvalidOption, match="by score: it can by continue"):
        open_pair(LlamaServer, Tier.SCORE)


def test_the_servers_own_template_is_used(open_pair: OpenPair) -> None:
    template = "<|begin|><|user|>Template of the server<|end|><|assistant|>"
    pair, _ = open_pair(partial(LlamaServer, template=template))
    assert b"Template of the server" in pair._text_model.detokenize(pair.prompt_writer.ids("A question"))


def test_rows_of_cached_positions_are_never_read(open_pair: OpenPair, wanted: dict[int, list[int]]) -> None:
    """The same question again: what is asked then is in the server's cache, drafts included, and its rows are memory
    that nobody has written to."""
    pair, server = open_pair(SCORING)
    for _ in range(3):
        assert ids(pair.reply(case(5), max_tokens=MOST, budget=1.0)) == wanted[5]
    assert isinstance(server.dialect, Vllm)
    assert max(server.dialect.cached) > 0
    assert NOWHERE > 1.0


def test_sglang_is_asked_from_the_prefix_end_on(open_pair: OpenPair) -> None:
    """From the first token on, it would compute the whole prompt for each verdict."""
    pair, server = open_pair(Sglang)
    ids(pair.reply(case(5), max_tokens=MOST, budget=1.0))
    prompt = len(pair.prompt_writer.ids(case(5)))
    asked = [body for path, body, _ in server.requests if path == "/generate" and len(body["input_ids"]) >= prompt]
    scored = [body["logprob_start_len"] for body in asked if "logprob_start_len" in body]
    assert len(scored) > 2
    assert min(scored) >= prompt - 1


def test_a_server_that_cannot_write_rows_is_asked_for_none(open_pair: OpenPair, wanted: dict[int, list[int]]) -> None:
    """There is a NaN in the memory of rows that it has cached, and it refuses with status 400."""
    pair, server = open_pair(partial(Vllm, scores=True, counts=True, refuses=True))
    for _ in range(2):
        reply = pair.reply(case(5), max_tokens=MOST, budget=1.0)
        assert ids(reply) == wanted[5]
        assert reply.summary.share_verified == 1.0
    scored = [path for path, _, _ in server.requests if path == "/inference/v1/generate"]
    assert isinstance(server.dialect, Vllm)
    assert 2 <= len([cached for cached in server.dialect.cached if cached]) <= 5
    assert len(scored) < len([path for path, _, _ in server.requests if path == "/v1/completions"])


def test_log_probabilities_are_the_servers(open_pair: OpenPair, f32_pair: tuple[Path, Path]) -> None:
    with LLM.open("none", f32_pair[1], threads=1) as alone:
        right = [token for token in alone.reply(case(2), max_tokens=8, logprobs=3) if isinstance(token, Token)]
    for way in ("vllm-score", "vllm-fan-out", "llama-server", "sglang-score"):
        pair, _ = open_pair(*WAYS[way])
        told = list(pair.reply(case(2), max_tokens=8, logprobs=3))
        assert [token.id for token in told] == [token.id for token in right]
        for one, other in zip(told, right, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert one.logprobs.own == pytest.approx(other.logprobs.own, abs=1e-3)
            assert one.logprobs.ids.tolist() == other.logprobs.ids.tolist()


def test_a_profile_is_that_of_the_pair_here_and_budgets_hold(open_pair: OpenPair, f32_pair: tuple[Path, Path]) -> None:
    prompts = [case(number) for number in range(20, 24)]
    with LLM.open(*f32_pair, threads=1, history=False) as here:
        wanted = here.profile(prompts, max_tokens=MOST)
    pair, _ = open_pair(LlamaServer)
    found = pair.profile(prompts, max_tokens=MOST)
    # A server may write more than one token behind a draft, so that its next chunk begins elsewhere.
    assert found.alpha == pytest.approx(wanted.alpha, abs=0.1)
    assert found.c_th == pytest.approx(wanted.c_th, abs=0.05)
    reply = pair.reply(case(2), max_tokens=48, budget=0.3, gate="auto", retrieval="off")
    assert Source.DRAFT in {token.source for token in reply}
    assert 0.0 < (reply.summary.share_verified or 0.0) < 1.0


def test_no_default_model_is_taken_for_one_of_a_server_that_does_not_tell_its_tokens(
    engine: Engine, closing: ExitStack, f32_pair: tuple[Path, Path]
) -> None:
    server = closing.enter_context(UpstreamServer(WAYS["ollama"][0](engine)))
    for draft in (DEFAULT, "none"):
        with pytest.raises(VocabularyMismatch, match="does not tell its tokens") as refused:
            LLM.open(draft, server.url, threads=1)
        assert "--draft" in refused.value.next_step
    LLM.open("none", server.url, tokenizer=f32_pair[0], threads=1).close()


# --- from the command line --------------------------------------------------------------------------------------------


def test_a_chat_with_a_server(engine: Engine, f32_pair: tuple[Path, Path], tmp_path: Path, closing: ExitStack) -> None:
    server = closing.enter_context(UpstreamServer(Vllm(engine), key="open-sesame"))
    key = tmp_path / "key"
    key.write_text("open-sesame\n")
    words = ["chat", "Where is my mug?", "--draft", str(f32_pair[0]), "--verifier", server.url, "--max-tokens", "6"]
    done = CliRunner().invoke(
        app, [*words, "--verifier-key-file", str(key), "--verifier-tier", "continue", "--explain"]
    )
    assert done.exit_code == 0, done.output
    assert "verifies by continue" in done.stderr
    assert "open-sesame" not in done.output + done.stderr
    with LLM.open("none", f32_pair[1], threads=1) as alone:
        reply: Reply = alone.reply("Where is my mug?", max_tokens=6)
        assert "".join(token.piece.decode() for token in reply) in done.stdout


def test_doctor_tells_who_verifies_and_how(engine: Engine, f32_pair: tuple[Path, Path], closing: ExitStack) -> None:
    server = closing.enter_context(UpstreamServer(LlamaServer(engine)))
    first, *_ = examine_server(server.url, str(f32_pair[0]))
    assert first.state == "ok"
    assert "llama-server" in first.what
    assert "verifies by continue" in first.what
    assert "mean the same there as here" in first.what
    server.fault = Fault.GARBAGE
    (found,) = examine_server(server.url, str(f32_pair[0]))
    assert found.state == "problem"
