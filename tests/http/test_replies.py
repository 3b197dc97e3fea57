"""What is written comes whole or in chunks, with what OpenAI's clients expect beside it."""

import asyncio
import math
import re
import threading
from typing import Any

import openai
import pytest

from edgellm.http.admission import Admission
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from tests.http.conftest import QUESTION, Answer, Ask, asker, conversation, serving, written
from tests.spec.real import case


@pytest.fixture(scope="module")
def client(server: HttpServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none is needed", max_retries=0)


def messages() -> Any:
    return [{"role": "user", "content": QUESTION}]


def test_the_official_client_lists_and_chats(client: openai.OpenAI, pair: LLM) -> None:
    models = client.models.list()
    assert [model.id for model in models] == ["edgellm-verifier"]
    assert client.models.retrieve("edgellm-verifier").owned_by == "edgellm"
    done = client.chat.completions.create(model="edgellm-verifier", messages=messages())
    assert done.choices[0].message.content == written(pair)
    assert done.choices[0].finish_reason == "stop"
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    extra: Any = done.model_extra
    assert "".join(token["text"] for token in extra["edgellm"]["tokens"]) == done.choices[0].message.content
    assert {token["source"] for token in extra["edgellm"]["tokens"]} <= {
        "accepted", "corrected", "bonus", "retrieved", "verifier",
    }  # fmt: skip
    timings = extra["timings"]
    assert timings["predicted_n"] == done.usage.completion_tokens
    assert 0 <= timings["draft_n_accepted"] <= timings["draft_n"]  # none, where that does not pay


def test_a_completion_goes_on_from_a_text_or_from_tokens(client: openai.OpenAI, pair: LLM) -> None:
    ids = pair.prompts.ids(QUESTION).tolist()
    done = client.completions.create(model="edgellm-verifier", prompt=ids, max_tokens=40)
    assert done.choices[0].text == written(pair)
    for prompt in ("The film", ["The film"]):
        text = client.completions.create(model="edgellm-verifier", prompt=prompt).choices[0].text
        assert text
    reply = pair.complete("The film", max_tokens=16)
    list(reply)
    assert text == reply.summary.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stop_sequence_ends_the_reply_and_is_not_in_it(ask: Ask, own: LLM, path: str, stream: bool) -> None:
    ids = own.prompts.ids(QUESTION).tolist()
    asked = conversation() if "chat" in path else {"prompt": ids, "max_tokens": 12}
    whole = text_of(ask("POST", path, asked).json)
    stop = whole[4:7]
    answer = ask("POST", path, asked | {"stop": [stop, "never said"], "stream": stream})
    if stream:
        text = "".join(text_of(event) for event in answer.events)
        last = answer.events[-1]
    else:
        text, last = text_of(answer.json), answer.json
    assert text == whole[: whole.index(stop)]
    assert last["choices"][0]["finish_reason"] == "stop"
    ours = last["edgellm"]["summary"]
    assert ours["stopped_by"] == stop


def text_of(data: Any) -> str:
    choice = data["choices"][0]
    found = choice.get("text") or choice.get("message", choice.get("delta", {})).get("content")
    return found or ""


def test_log_probabilities_are_true(client: openai.OpenAI, pair: LLM) -> None:
    done = client.chat.completions.create(
        model="edgellm-verifier", messages=messages(), logprobs=True, top_logprobs=3, max_tokens=6
    )
    reply = list(pair.reply(QUESTION, max_tokens=6, logprobs=3))
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for one, token in zip(logprobs.content, reply, strict=True):
        assert token.logprobs is not None
        assert bytes(one.bytes or []) == token.piece
        assert one.logprob == pytest.approx(token.logprobs.own, abs=1e-3)
        assert one.logprob == max(other.logprob for other in one.top_logprobs)  # greedy
        assert sum(math.exp(other.logprob) for other in one.top_logprobs) <= 1.0 + 1e-6
        assert len(one.top_logprobs) == 3
    plain = client.completions.create(
        model="edgellm-verifier", prompt=pair.prompts.ids(QUESTION).tolist(), logprobs=2, max_tokens=6
    )
    table = plain.choices[0].logprobs
    assert table is not None
    assert table.token_logprobs == pytest.approx([one.logprob for one in logprobs.content], abs=1e-3)
    assert table.tokens == [one.token for one in logprobs.content]
    assert table.text_offset is not None
    assert [plain.choices[0].text[at] for at in table.text_offset] == [token[0] for token in table.tokens or []]


def test_metrics_count_what_was_written(ask: Ask) -> None:
    def value(name: str) -> float:
        text = ask("GET", "/metrics").body.decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found or "position" in name, name  # which is not there before a draft is accepted
        return float(found[1]) if found else 0.0

    names = (
        "edgellm_prompt_tokens_total", "edgellm_generation_tokens_total", "edgellm_spec_draft_tokens_total",
        "edgellm_spec_accepted_tokens_total", 'edgellm_requests_total{outcome="stop"}', "edgellm_spec_rounds_total",
        "edgellm_time_to_first_token_seconds_count", 'edgellm_spec_accepted_per_pos_total{position="0"}',
    )  # fmt: skip
    ask("POST", "/v1/chat/completions", conversation())
    before = [value(name) for name in names]
    done = ask("POST", "/v1/chat/completions", conversation()).json
    after = [value(name) for name in names]
    grown = [new - old for new, old in zip(after, before, strict=True)]
    usage, timings = done["usage"], done["timings"]
    assert grown[:5] == [
        usage["prompt_tokens"], usage["completion_tokens"], timings["draft_n"], timings["draft_n_accepted"], 1.0,
    ]  # fmt: skip
    assert all(grown[at] > 0 for at in (0, 1, 6))
    assert (grown[5] > 0) == (timings["draft_n"] > 0)  # a busy machine may find that no draft pays
    assert (grown[7] > 0) == (timings["draft_n_accepted"] > 0)  # whether drafts pay is a matter of the machine's load
    assert value("edgellm_requests_running") == 0
    assert value('edgellm_peer_bytes_total{dir="up"}') == 0


def test_penalties_min_p_and_biases_are_those_of_the_pair(ask: Ask, own: LLM) -> None:
    asked = conversation(
        presence_penalty=1.5, frequency_penalty=0.5, repeat_penalty=1.2, min_p=0.1, logit_bias={"20": -100, "30": 1.5}
    )
    wanted = written(
        own, presence_penalty=1.5, frequency_penalty=0.5, repeat_penalty=1.2, min_p=0.1,
        logit_bias={20: -100.0, 30: 1.5},
    )  # fmt: skip
    assert text_of(ask("POST", "/v1/chat/completions", asked).json) == wanted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompts", [["The film", "Where is"], [[300, 301], [302]], ["The film"], [[300, 301]]], ids=str
)
def test_several_prompts_have_n_choices_each(ask: Ask, prompts: list[object], stream: bool) -> None:
    asked = {"temperature": 2.0, "top_p": 1.0, "top_k": 0, "seed": 5, "max_tokens": 5, "n": 2, "logprobs": False}
    single = [ask("POST", "/v1/completions", asked | {"prompt": prompt}).json for prompt in prompts]
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = ask("POST", "/v1/completions", asked | {"prompt": prompts} | more)
    wanted = [choice["text"] for one in single for choice in one["choices"]]
    if stream:
        assert answer.headers["x-accel-buffering"] == "no"
        texts, events = [""] * len(wanted), answer.events
        for event in events[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        usage = events[-1]["usage"]
    else:
        texts, usage = [choice["text"] for choice in answer.json["choices"]], answer.json["usage"]
    assert texts == wanted
    for name in ("prompt_tokens", "completion_tokens"):
        assert usage[name] == sum(one["usage"][name] for one in single)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_n_replies_are_those_of_the_seeds_that_follow(ask: Ask, own: LLM, path: str, stream: bool) -> None:
    asked = conversation() if "chat" in path else {"prompt": own.prompts.ids(QUESTION).tolist()}
    asked |= {"temperature": 2.0, "top_p": 1.0, "top_k": 0, "seed": 5, "max_tokens": 12}
    single = [ask("POST", path, asked | {"seed": 5 + number}).json for number in range(3)]
    answer = ask("POST", path, asked | {"n": 3, "stream": stream})
    if stream:
        texts = ["".join(text_of(event) for event in answer.events if event["choices"][0]["index"] == number)
                 for number in range(3)]  # fmt: skip
        assert answer.body.count(b"[DONE]") == 1
        reasons = [event["choices"][0]["finish_reason"] for event in answer.events]
        assert len([reason for reason in reasons if reason]) == 3
    else:
        texts = [text_of({"choices": [choice]}) for choice in answer.json["choices"]]
        assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2]
        usages = [one["usage"]["completion_tokens"] for one in single]
        assert answer.json["usage"]["completion_tokens"] == sum(usages)
    assert texts == [text_of(one) for one in single]
    assert len(set(texts)) > 1


CLIENTS = 8  # more than are served at once, and two of each prompt: one streams


def test_everyone_gets_the_same_as_alone(own: LLM) -> None:
    """Replies of a pair take turns."""
    with serving(own, "edgellm-verifier", replies=3, waiting=CLIENTS) as server:
        ask = asker(server)
        answers: dict[int, Answer] = {}

        def post(number: int) -> None:
            turns = [{"role": turn.role, "content": turn.content} for turn in case(number % 4)]
            body = {"messages": turns, "max_tokens": 24, "stream": number < 4}
            answers[number] = ask("POST", "/v1/chat/completions", body)

        threads = [threading.Thread(target=post, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(4):
        reply = own.reply(case(number), max_tokens=24)
        list(reply)
        for at in range(number, CLIENTS, 4):
            assert answers[at].status == 200
            said = answers[at].events if at < 4 else [answers[at].json]
            assert "".join(map(text_of, said)) == reply.summary.text


def test_a_slot_that_is_given_just_when_its_request_leaves_goes_to_the_next() -> None:
    async def settled() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def walk() -> None:
        admission = Admission(2, 2)
        await admission.acquire("small", 1)
        leaves = asyncio.create_task(admission.acquire("small", 1))
        stays = asyncio.create_task(admission.acquire("small", 1))
        await settled()
        admission.release("small")
        leaves.cancel()
        await settled()
        assert (stays.done(), admission.running) == (True, 1)

    asyncio.run(asyncio.wait_for(walk(), 60))
