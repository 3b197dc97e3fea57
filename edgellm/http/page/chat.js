// The conversation: asks the API that every program uses, and shows its stream as it comes.

import { MEANINGS, showBudget, showFigures, showLegend, watchServer } from "./side.js";

const at = (id) => document.getElementById(id);
const turns = []; // {role, content}, as the API takes them
let going = null; // the AbortController of the reply under way

function made(kind, name, text = "") {
  const node = document.createElement(kind);
  node.className = name;
  node.textContent = text;
  return node;
}

// What scrolls: the conversation, or on a phone the page up to the question's field.
function isAtEnd() {
  const log = at("messages");
  if (log.scrollHeight > log.clientHeight) return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  return at("talk").getBoundingClientRect().bottom - innerHeight < 80;
}

function toEnd() {
  const log = at("messages");
  log.scrollTop = log.scrollHeight;
  at("talk").scrollIntoView({ block: "end" });
}

function add(node) {
  const follows = isAtEnd();
  at("messages").append(node);
  if (follows) toEnd();
  return node;
}

export function headers() {
  const key = sessionStorage.getItem("edgellm-key");
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

export function askForKey(wanted) {
  at("key-form").hidden = !wanted;
}

function hover(token) {
  const sure = token.confidence === null ? "" : ` · the draft model was ${Math.round(100 * token.confidence)} % sure`;
  return `${token.source}: ${MEANINGS[token.source]}${sure} · round ${token.round}`;
}

// The data of server-sent events, one JSON value each, until [DONE].
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const event of whole) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function problem(text) {
  add(made("p", "trouble", text)).setAttribute("role", "alert");
}

async function answered(response) {
  if (response.ok) return true;
  const text = await response.text();
  let message = `The server answers ${response.status}.`;
  try {
    message = JSON.parse(text).error.message;
  } catch { /* no JSON: the status has to do */ }
  if (response.status === 401) askForKey(true);
  problem(message);
  return false;
}

// Draws once before the next frame, however often it is asked: a layout per token is too much for a slow machine.
function oncePerFrame(draw) {
  let frame = 0;
  const now = () => {
    cancelAnimationFrame(frame);
    frame = 0;
    draw();
  };
  return { now, soon: () => (frame ||= requestAnimationFrame(now)) };
}

// Writes one reply. Returns its text as far as it came.
async function reply(body, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (!(await answered(response))) return "";
  askForKey(false);
  const box = add(made("div", "reply writing"));
  const words = box.appendChild(made("div", "words"));
  const said = box.appendChild(made("p", "said"));
  const counts = {}, fresh = document.createDocumentFragment();
  let text = "", began = 0, tokens = 0, rate = "";
  const view = oncePerFrame(() => {
    if (!box.isConnected) return; // another conversation has begun
    const follows = isAtEnd();
    words.append(fresh);
    at("speed").textContent = rate;
    showLegend(counts);
    if (follows) toEnd();
  });
  try {
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      const ours = event.edgellm ?? {};
      if (ours.notice) add(made("p", "notice", ours.notice));
      for (const token of ours.tokens ?? []) {
        began ||= performance.now();
        tokens += 1;
        counts[token.source] = (counts[token.source] ?? 0) + 1;
        const span = made("span", token.source, token.text);
        span.title = hover(token);
        fresh.append(span);
        text += token.text;
      }
      const seconds = (performance.now() - began) / 1000;
      if (tokens > 1 && seconds > 0) rate = `${((tokens - 1) / seconds).toFixed(1)} tokens/s`;
      if (event.timings) {
        said.textContent = showFigures(event.timings, ours.summary);
        rate = "";
      }
      view.soon();
    }
  } catch (error) {
    if (error.name === "AbortError") said.textContent = "stopped";
    else problem(error.message === "network error" ? "The server is gone in the middle of the reply." : error.message);
  } finally {
    view.now();
    box.classList.remove("writing");
  }
  return text;
}

async function ask(question) {
  at("hello")?.remove();
  add(made("div", "asked", question));
  toEnd();
  turns.push({ role: "user", content: question });
  const share = Number(at("budget").value) / 100;
  const body = { messages: turns, stream: true, ...(share < 1 ? { budget: share } : {}) };
  going = new AbortController();
  at("send").hidden = true;
  at("stop").hidden = false;
  at("speed").textContent = "";
  let text = "";
  try {
    text = await reply(body, going.signal);
  } catch (error) {
    if (error.name !== "AbortError") problem("The server does not answer.");
  }
  going = null;
  at("send").hidden = false;
  at("stop").hidden = true;
  if (text) turns.push({ role: "assistant", content: text });
  else turns.pop();
  at("question").focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = at("question").value.trim();
  if (!question || going) return;
  at("question").value = "";
  ask(question);
});
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => going?.abort());
at("new").addEventListener("click", () => {
  going?.abort();
  turns.length = 0;
  at("messages").replaceChildren();
  showLegend({});
  at("figures").textContent = at("speed").textContent = "";
  at("question").focus();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("edgellm-key", at("key").value.trim());
  askForKey(false);
});
at("budget").addEventListener("input", showBudget);
showBudget();
showLegend({});
watchServer(headers, askForKey);
at("question").focus();
