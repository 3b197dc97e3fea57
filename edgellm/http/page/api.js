// The server: requests with the key, its errors, and its streams.

import { byId, storage } from "./dom.js";

export class ServerError extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const MAX_OUTLIVING = 20_000; // characters; browsers allow 64 KiB

export const GONE = "The server does not answer. Check that it is still running.";

// The link that `edgellm serve` prints ends in the page's key, which also opens the conversations. It stays in this
// browser; an API key that was typed stays in the tab. A link for a phone ends in a code, for which it gets a key.
function takeFromLink() {
  const [, kind, value] = /^#(key|pair)=([!-~]+)$/.exec(location.hash) ?? [];
  if (!kind) return "";
  history.replaceState(null, "", location.pathname);
  if (kind === "key") storage.set("page-key", value);
  return kind === "pair" ? value : "";
}
export const linkedCode = takeFromLink();
addEventListener("hashchange", () => /^#(key|pair)=/.test(location.hash) && location.reload());

const pageKey = () => storage.get("page-key", null);
export const hasPageKey = () => pageKey() !== null;
export const forgetPageKey = () => storage.set("page-key", null);

// Keeps a key that this browser was given; returns false where it can be kept for the tab alone.
export function keepPageKey(key) {
  storage.set("page-key", key);
  if (pageKey() === key) sessionStorage.removeItem("edgellm-key");
  else sessionStorage.setItem("edgellm-key", key);
  return pageKey() === key;
}

function headers() {
  const key = sessionStorage.getItem("edgellm-key") ?? pageKey();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

const UNPAIRED = "This page is not paired with the computer yet.";
const REVOKED = "This page is not paired any more: the computer does not accept its key.";
const WRONG = "The computer does not accept this key.";

// Shows or hides the field for a code or a key. What it says stays while it is shown.
export function askForKey(wanted) {
  const form = byId("key-form");
  if (wanted && form.hidden) byId("key-why").textContent = sessionStorage.getItem("edgellm-key") ? WRONG : hasPageKey() ? REVOKED : UNPAIRED;
  form.hidden = !wanted;
}

async function errorOf(response) {
  let error = {};
  try {
    error = JSON.parse(await response.text()).error ?? {};
  } catch { /* not JSON: the status says what there is to say */ }
  if (error.code === "invalid_api_key") {
    askForKey(true);
    error.message = "The computer does not accept this page's key. Pair the page below, then try again.";
  }
  return new ServerError(error.message ?? `The server answered with status ${response.status}.`, response.status,
    error.code ?? "");
}

// `outlives`: the request goes on when the page is closed, if it is short.
async function request(method, path, body, { signal, more = {}, outlives = false } = {}) {
  let response;
  try {
    const data = body === undefined ? undefined : JSON.stringify(body);
    const keepalive = outlives && (data?.length ?? 0) < MAX_OUTLIVING;
    response = await fetch(path, { method, headers: { ...headers(), ...more }, body: data, signal, keepalive });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(GONE);
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

// Returns the JSON of an answer, null where it has none. Throws a ServerError.
export async function call(method, path, body) {
  const response = await request(method, path, body);
  return response.status === 204 ? null : response.json();
}

// Conversations need the page's key, whatever key was typed for the rest.
export async function callWithPageKey(method, path, body) {
  const response = await request(method, path, body, { more: { Authorization: `Bearer ${pageKey() ?? ""}` }, outlives: method !== "GET" });
  return response.status === 204 ? null : response.json();
}

// Yields the data of the answer's server-sent events until [DONE]. Throws a ServerError, also for an error on the way.
export async function* stream(path, body, signal) {
  const response = await request("POST", path, body, { signal });
  askForKey(false);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new ServerError("The connection to the server was lost during the reply.");
    }
    if (part.done) throw new ServerError("The connection to the server was lost during the reply.");
    held += part.value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const event of whole) {
      if (!event.startsWith("data: ")) continue; // a comment, which only shows that the server is there
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ServerError(parsed.error.message, response.status, parsed.error.code ?? "");
      yield parsed;
    }
  }
}
