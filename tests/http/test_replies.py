"""What is written comes whole or in chunks, with what OpenAI's clients expect beside it."""

import asyncio
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from edgellm.http.admission import Admission
from edgellm.llm import LLM
from tests.http.conftest import QUESTION, Answer, Ask, asker, conversation, serving, written
from tests.spec.real import case
from tests.waiting import until


def test_a_completion_goes_on_from_a_text_or_from_tokens(client: openai.OpenAI, pair: LLM) -> None:
    ids = pair.prompt_writer.ids(QUESTION).tolist()
    done = client.completions.create(model="edgellm-verifier", prompt=ids, max_tokens=40)
    assert done.choices[0].text == written(pair)
    for prompt in ("The film", ["The film"]):
        text = client.completions.create(model="edgellm-verifier", prompt=prompt).choices[0].text
        assert text
    reply = pair.complete("The film", max_tokens=16)
    list(reply)
    assert text == reply.summary.text


def text_of(data: Any) -> str:
    choice = data["choices"][0]
    found = choice.get("text") or choice.get("message", choice.get("delta", {})).get("content")
    return found or ""


def test_log_probabilities_are_true(client: openai.OpenAI, pair: LLM) -> None:
    asked: Any = conversation()["messages"]
    done: Any = client.chat.completions.create(
        model="edgellm-verifier", messages=asked, logprobs=True, top_logprobs=3, max_tokens=6
    )
    reply = list(pair.reply(QUESTION, max_tokens=6, logprobs=3))
    logprobs = done.choices[0].logprobs
    for one, token in zip(logprobs.content, reply, strict=True):
        assert token.logprobs is not None
        assert bytes(one.bytes or []) == token.piece
        assert one.logprob == pytest.approx(token.logprobs.own, abs=1e-3)
        assert one.logprob == max(other.logprob for other in one.top_logprobs)  # greedy
        assert sum(math.exp(other.logprob) for other in one.top_logprobs) <= 1.0 + 1e-6
        assert len(one.top_logprobs) == 3
    plain: Any = client.completions.create(
        model="edgellm-verifier", prompt=pair.prompt_writer.ids(QUESTION).tolist(), logprobs=2, max_tokens=6
    )
    table = plain.choices[0].logprobs
    assert table.token_logprobs == pytest.approx([one.logprob for one in logprobs.content], abs=1e-3)
    assert table.tokens == [one.token for one in logprobs.content]
    assert [max(one.values()) for one in table.top_logprobs] == table.token_logprobs
    assert [plain.choices[0].text[at] for at in table.text_offset] == [token[0] for token in table.tokens or []]


def test_metrics_count_what_was_written(ask: Ask) -> None:
    def metrics() -> Counter[str]:
        until(lambda: b"edgellm_requests_running 0.0" in ask("GET", "/metrics").body)
        lines = [line.rpartition(" ") for line in ask("GET", "/metrics").body.decode().splitlines() if line[0] != "#"]
        return Counter({name.removeprefix("edgellm_"): float(value) for name, _, value in lines})

    ask("POST", "/v1/chat/completions", conversation())
    before = metrics()
    done = ask("POST", "/v1/chat/completions", conversation()).json
    after = metrics()
    usage, timings = done["usage"], done["timings"]
    for name, wanted in {
        "prompt_tokens_total": usage["prompt_tokens"], "generation_tokens_total": usage["completion_tokens"],
        "spec_draft_tokens_total": timings["draft_n"], "spec_accepted_tokens_total": timings["draft_n_accepted"],
        'requests_total{outcome="stop"}': 1, "time_to_first_token_seconds_count": 1,
    }.items():  # fmt: skip
        assert after[name] - before[name] == wanted, name
    grown = after - before
    assert ("spec_rounds_total" in grown) == (timings["draft_n"] > 0)  # a busy machine may find that no draft pays
    assert ('spec_accepted_per_pos_total{position="0"}' in grown) == (timings["draft_n_accepted"] > 0)
    assert after['peer_bytes_total{dir="up"}'] == 0


def test_penalties_min_p_and_biases_are_those_of_the_pair(ask: Ask, own: LLM) -> None:
    asked = conversation(
        presence_penalty=1.5, frequency_penalty=0.5, repeat_penalty=1.2, min_p=0.1, logit_bias={"20": -100, "30": 1.5}
    )
    wanted = written(
        own, presence_penalty=1.5, frequency_penalty=0.5, repeat_penalty=1.2, min_p=0.1,
        logit_bias={20: -100.0, 30: 1.5},
    )  # fmt: skip
    assert text_of(ask("POST", "/v1/chat/completions", asked).json) == wanted


TEXTS, IDS = ["The film", "Where is"], [[300, 301], [302]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [None, TEXTS, IDS, TEXTS[:1], IDS[:1]], ids=str)
def test_each_prompt_has_n_replies_which_are_those_of_the_seeds_that_follow(
    ask: Ask, prompts: list[object] | None, stream: bool
) -> None:
    """A chat where there are no prompts."""
    more = {"temperature": 2.0, "top_p": 1.0, "top_k": 0, "max_tokens": 5, "logprobs": False}
    path, asked = "/v1/chat/completions", [conversation(**more)]
    if prompts is not None:
        path, asked = "/v1/completions", [{"prompt": prompt, **more} for prompt in prompts]
    alone = [ask("POST", path, one | {"seed": seed}).json for one in asked for seed in (5, 6)]
    many = asked[0] | {"seed": 5, "n": 2, "stream": stream} | ({"prompt": prompts} if prompts else {})
    answer = ask("POST", path, many | ({"stream_options": {"include_usage": True}} if stream else {}))
    if stream:
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.body.count(b"[DONE]") == 1
        *events, last = answer.events
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert len([reason for reason in reasons if reason]) == len(alone)
        texts = ["".join(text_of(event) for event in events if event["choices"][0]["index"] == number)
                 for number in range(len(alone))]  # fmt: skip
    else:
        last = answer.json
        assert [choice["index"] for choice in last["choices"]] == [*range(len(alone))]
        texts = [text_of({"choices": [choice]}) for choice in last["choices"]]
    assert texts == [text_of(one) for one in alone]
    assert len(set(texts)) > 1
    for name, ones in (("prompt_tokens", alone[::2]), ("completion_tokens", alone)):
        assert last["usage"][name] == sum(one["usage"][name] for one in ones)


CLIENTS = 8  # more than are served at once, and two of each prompt: one streams


def test_everyone_gets_the_same_as_alone(own: LLM) -> None:
    """Replies of a pair take turns."""
    with serving(own, "edgellm-verifier", replies=3, waiting=CLIENTS) as server:
        ask = asker(server)

        def post(number: int) -> Answer:
            turns = [{"role": turn.role, "content": turn.content} for turn in case(number % 4)]
            return ask("POST", "/v1/chat/completions", {"messages": turns, "max_tokens": 24, "stream": number < 4})

        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = [*threads.map(post, range(CLIENTS))]
    for number in range(4):
        reply = own.reply(case(number), max_tokens=24)
        list(reply)
        for at in range(number, CLIENTS, 4):
            assert answers[at].status == 200
            said = answers[at].events if at < 4 else [answers[at].json]
            assert "".join(map(text_of, said)) == reply.summary.text


async def test_a_slot_that_is_given_just_when_its_request_leaves_goes_to_the_next() -> None:
    async def settled() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    admission = Admission(2, 2)
    await admission.acquire("small", 1)
    leaves, stays = (asyncio.create_task(admission.acquire("small", 1)) for _ in range(2))
    await settled()
    admission.release("small")
    leaves.cancel()
    await settled()
    assert (stays.done(), admission.running) == (True, 1)
