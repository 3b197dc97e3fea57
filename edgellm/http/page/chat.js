// The conversation: asks the same API as every program, and shows the stream as it arrives.

import { MEANINGS, showBudget, showFigures, showLegend, watchServer } from "./side.js";

const byId = (id) => document.getElementById(id);
const turns = []; // {role, content}, as in the API
let controller = null; // the AbortController of the reply being written

function element(kind, name, text = "") {
  const node = document.createElement(kind);
  node.className = name;
  node.textContent = text;
  return node;
}

// The conversation scrolls; on a phone the page does, up to the question's field.
function isAtEnd() {
  const log = byId("messages");
  if (log.scrollHeight > log.clientHeight) return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  return byId("talk").getBoundingClientRect().bottom - innerHeight < 80;
}

function scrollToEnd() {
  const log = byId("messages");
  log.scrollTop = log.scrollHeight;
  byId("talk").scrollIntoView({ block: "end" });
}

function add(node) {
  const follows = isAtEnd();
  byId("messages").append(node);
  if (follows) scrollToEnd();
  return node;
}

export function headers() {
  const key = sessionStorage.getItem("edgellm-key");
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

export function askForKey(wanted) {
  byId("key-form").hidden = !wanted;
}

function hover(token) {
  const sure = token.confidence === null ? "" : ` · draft confidence ${Math.round(100 * token.confidence)} %`;
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

function showError(text) {
  add(element("p", "trouble", text)).setAttribute("role", "alert");
}

async function checkResponse(response) {
  if (response.ok) return true;
  const text = await response.text();
  let message = `The server answered with status ${response.status}.`;
  try {
    message = JSON.parse(text).error.message;
  } catch { /* not JSON: show the status */ }
  if (response.status === 401) askForKey(true);
  showError(message);
  return false;
}

// Draws at most once per frame: a layout per token is too much for a slow machine.
function oncePerFrame(draw) {
  let frame = 0;
  const now = () => {
    cancelAnimationFrame(frame);
    frame = 0;
    draw();
  };
  return { now, soon: () => (frame ||= requestAnimationFrame(now)) };
}

// Shows a thought, folded, before the words of a reply.
function thoughtBefore(words) {
  const box = document.createElement("details");
  box.className = "thought";
  const title = box.appendChild(element("summary", "", "thinking …"));
  const text = box.appendChild(element("div", ""));
  const began = performance.now();
  let tokens = 0;
  words.before(box);
  return {
    add(token) {
      tokens += 1;
      text.append(token.text);
    },
    end() {
      title.textContent = `thought for ${Math.round((performance.now() - began) / 1000)} s, ${tokens} tokens`;
    },
  };
}

// Shows one reply. Returns its answer, or as much of it as arrived.
async function reply(body, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (!(await checkResponse(response))) return "";
  askForKey(false);
  const box = add(element("div", "reply writing"));
  const words = box.appendChild(element("div", "words"));
  const stats = box.appendChild(element("p", "said"));
  const counts = {}, fresh = document.createDocumentFragment();
  let text = "", began = 0, tokens = 0, rate = "", thought = null;
  const view = oncePerFrame(() => {
    if (!box.isConnected) return; // another conversation has begun
    const follows = isAtEnd();
    words.append(fresh);
    byId("speed").textContent = rate;
    showLegend(counts);
    if (follows) scrollToEnd();
  });
  try {
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      const ours = event.edgellm ?? {};
      if (ours.notice) add(element("p", "notice", ours.notice));
      for (const token of ours.tokens ?? []) {
        began ||= performance.now();
        tokens += 1;
        counts[token.source] = (counts[token.source] ?? 0) + 1;
        if (token.channel === "thinking") {
          if (token.text) thought ??= thoughtBefore(words);
          thought?.add(token);
          continue;
        }
        if (!text) thought?.end();
        const span = element("span", token.source, token.text);
        span.title = hover(token);
        fresh.append(span);
        text += token.text;
      }
      const seconds = (performance.now() - began) / 1000;
      if (tokens > 1 && seconds > 0) rate = `${((tokens - 1) / seconds).toFixed(1)} tokens/s`;
      if (event.timings) {
        stats.textContent = showFigures(event.timings, ours.summary);
        rate = "";
      }
      view.soon();
    }
  } catch (error) {
    if (error.name === "AbortError") stats.textContent = "stopped";
    else if (error.message === "network error") showError("The connection to the server was lost during the reply.");
    else showError(error.message);
  } finally {
    if (!text) thought?.end();
    view.now();
    box.classList.remove("writing");
  }
  return text;
}

async function ask(question) {
  byId("hello")?.remove();
  add(element("div", "asked", question));
  scrollToEnd();
  turns.push({ role: "user", content: question });
  const share = Number(byId("budget").value) / 100;
  const body = { messages: turns, stream: true, ...(share < 1 ? { budget: share } : {}) };
  controller = new AbortController();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  byId("speed").textContent = "";
  let text = "";
  try {
    text = await reply(body, controller.signal);
  } catch (error) {
    if (error.name !== "AbortError") showError("The server does not answer. Check that it is still running.");
  }
  controller = null;
  byId("send").hidden = false;
  byId("stop").hidden = true;
  if (text) turns.push({ role: "assistant", content: text });
  else turns.pop();
  byId("question").focus();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (!question || controller) return;
  byId("question").value = "";
  ask(question);
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => controller?.abort());
byId("new").addEventListener("click", () => {
  controller?.abort();
  turns.length = 0;
  byId("messages").replaceChildren();
  showLegend({});
  byId("figures").textContent = byId("speed").textContent = "";
  byId("question").focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("edgellm-key", byId("key").value.trim());
  askForKey(false);
});
byId("budget").addEventListener("input", showBudget);
showBudget();
showLegend({});
watchServer(headers, askForKey);
byId("question").focus();
