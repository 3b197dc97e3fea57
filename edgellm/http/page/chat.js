// The conversation on the page: it asks the same API as every program, and shows the stream as it arrives.

import { GONE, stream } from "./api.js";
import { startApp } from "./app.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { verifierName, watchServer } from "./devices.js";
import { announce, byId, storage, toast } from "./dom.js";
import { Library } from "./library.js";
import { startPairing } from "./pairing.js";
import { startPanels } from "./panels.js";
import { hideDetails, Marks, showLegend } from "./provenance.js";
import {
  addCost, parameters, showModels, showSystemPrompt, showVerifier, startSettings, systemPrompt,
} from "./settings.js";
import { TurnList } from "./turns.js";

let conversation = new Conversation();
let controller = null; // the AbortController of the reply that is being written
let status = null; // the server's, as it was last heard of

const library = new Library(show);
const turns = new TurnList({ edit, retry, verify, branch, select, toggleColours });
const composer = new Composer(ask, () => controller?.abort(), () => turns.editLast());

function show(found) {
  controller?.abort();
  conversation = found ?? new Conversation();
  if (found) showSystemPrompt(found.system);
  library.show(conversation.id);
  showAll();
  composer.field.focus();
}

function showAll() {
  hideDetails();
  turns.show(conversation);
  showWriters();
  byId("title").textContent = conversation.nodes.size ? conversation.title : "New conversation";
  document.title = conversation.nodes.size ? `${conversation.title.slice(0, 60)} · edgellm` : "edgellm";
}

// The counts of the last reply, and how many words of the conversation nobody has checked.
function showWriters() {
  const replies = conversation.path().filter((node) => node.role === "assistant" && node.marks);
  showLegend(replies.length ? new Marks(replies.at(-1).marks).counts() : {});
  byId("figures").textContent = replies.at(-1)?.figures ?? "";
  showAway(replies);
}

function showAway(replies = conversation.path().filter((node) => node.marks)) {
  const unchecked = replies.reduce((sum, node) => sum + new Marks(node.marks).uncheckedWords(node.text), 0);
  const away = Boolean(status?.link && !status.link.up);
  showVerifier(away);
  byId("away").hidden = !away;
  if (!away) return;
  const name = verifierName(status);
  byId("away").textContent = `${name} is away: ` +
    (unchecked ? `${unchecked} ${unchecked === 1 ? "word" : "words"} unchecked.` : "replies are not checked.");
}

function ask(text, files) {
  if (controller) return;
  const question = conversation.add("user", text, files.length ? { files } : {});
  write(question);
}

function edit(node, text) {
  if (controller) return false;
  const { files } = node;
  write(conversation.add("user", text, files ? { files } : {}, node.parent));
  return true;
}

function retry(node, changes = { seed: undefined }) { // another seed than that of the settings, and so another text
  if (controller) return;
  const question = conversation.nodes.get(node.parent);
  if (!node.text && !conversation.children(node.id).length) conversation.nodes.delete(node.id); // nothing to come back to
  conversation.leaf = question.id;
  write(question, changes);
}

// Has a reply written again as it would be with every word checked: what stands stays.
function verify(node) {
  if (status?.link && !status.link.up) toast(`${verifierName(status)} is still away.`);
  else retry(node, { seed: node.seed, budget: undefined, require_verified: true });
}

function select(node) {
  if (controller) return;
  conversation.select(node);
  showAll();
  library.save(conversation);
}

function branch(node) {
  show(conversation.branch(node.id));
  library.save(conversation).then(() => library.show(conversation.id));
  toast("This is a new conversation, with the turns up to there.");
}

function toggleColours() {
  const on = document.body.classList.toggle("coloured");
  storage.set("coloured", on);
  byId("colours").checked = on;
  for (const button of document.querySelectorAll("button.who")) button.setAttribute("aria-pressed", String(on));
}

// Has the reply to a question written, by the settings but for some `changes`.
async function write(question, changes = {}) {
  const talk = conversation; // another one may be opened meanwhile
  talk.system = systemPrompt();
  const messages = talk.messages(question.id, { apart: true });
  const body = { ...parameters(), ...changes, messages, truncation: "auto", stream: true, return_progress: true };
  const wasCut = talk.isCut(question.id);
  const node = talk.add("assistant", "", {}, question.id);
  showAll();
  byId("turns").lastElementChild.remove(); // the place of the reply
  const view = turns.open(node);
  const own = controller = new AbortController();
  composer.busy = true;
  view.wait(() => status?.loading?.includes(body.model) ? `${body.model} is being loaded`
    : status?.requests.waiting > 0 ? "waiting for a free reply slot" : "waiting for the first word");
  try {
    await read(stream("/v1/chat/completions", body, own.signal), view, body.budget ?? 1, wasCut);
  } catch (error) {
    if (error.name === "AbortError") node.stopped = true;
    else node.error = error.message ?? GONE;
  }
  view.end();
  if (controller === own) controller = null;
  composer.busy = controller !== null;
  byId("speed").textContent = "";
  if (talk === conversation) {
    turns.close(view);
    showWriters();
  }
  announce(node.error ? `The reply failed: ${node.error}` : node.stopped ? "The reply was stopped." : "The reply has ended.");
  await library.save(talk);
  if (talk === conversation) library.show(talk.id);
}

// `wasCut`: that old turns are left out was said in this conversation.
async function read(events, view, share, wasCut) {
  let began = 0, tokens = 0;
  for await (const event of events) {
    const ours = event.edgellm ?? {};
    if (event.prompt_progress) view.progress(event.prompt_progress);
    if (ours.turns_left_out) view.node.leftOut = ours.turns_left_out;
    if (ours.notice && !(ours.turns_left_out && wasCut)) view.note(ours.notice);
    for (const token of ours.tokens ?? []) {
      began ||= performance.now();
      tokens += 1;
      view.add(token);
    }
    const seconds = (performance.now() - began) / 1000;
    if (tokens > 1 && seconds > 0.2) byId("speed").textContent = `${((tokens - 1) / seconds).toFixed(1)} tokens/s`;
    if (event.timings) finish(view, event.timings, ours.summary, share);
  }
}

// Notes the figures of a reply that has ended.
function finish(view, timings, summary, share) {
  const percent = (part) => `${Math.round(100 * part)} %`;
  const { node, marks } = view, counts = marks.counts();
  node.seed = summary.seed;
  const line = [`${timings.predicted_n} tokens`];
  if (timings.predicted_per_second) line.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  if (timings.prompt_ms) line.push(`first after ${Math.round(timings.prompt_ms)} ms`);
  const drafted = counts.accepted || counts.draft || counts.parallel;  // A model alone verifies nobody's drafts.
  if (summary.share_verified !== null && drafted) line.push(`${percent(summary.share_verified)} verified`);
  if (summary.finish_reason === "length") line.push("stopped at the length limit");
  node.said = line.join(" · ");
  const rows = [];
  if (summary.acceptance_rate !== null) rows.push(`${percent(summary.acceptance_rate)} of drafts accepted`);
  if (summary.retrieved) rows.push(`${summary.retrieved} tokens copied`);
  if (summary.verifier_passes_per_token) rows.push(`${summary.verifier_passes_per_token.toFixed(2)} verifier passes per token`);
  if (summary.share_offloaded !== null && summary.share_offloaded < 1) rows.push(`${percent(summary.share_offloaded)} offloaded so far`);
  if (summary.rtt_ms_p50 !== null) rows.push(`${summary.rtt_ms_p50.toFixed(1)} ms round trip to the verifier`);
  rows.push(`seed ${summary.seed}`);
  if (summary.bytes_up) rows.push(`${summary.bytes_up} B up, ${summary.bytes_down} B down`);
  node.figures = rows.join(" · ");
  addCost({
    share, tokens: timings.predicted_n, seconds: timings.predicted_ms / 1000,
    passes: (summary.verifier_passes_per_token ?? 0) * timings.predicted_n,
    unchecked: (counts.draft ?? 0) + (counts.parallel ?? 0), bytes: summary.bytes_up + summary.bytes_down,
  });
}

library.onRenamed = (id, name, when) => {
  if (conversation.id !== id) return;
  Object.assign(conversation, { name, when });
  byId("title").textContent = conversation.title;
};
byId("new").addEventListener("click", () => show(null));
byId("colours").addEventListener("change", toggleColours);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && controller && !document.body.matches(".left, .right")) controller.abort();
});
if (storage.get("coloured", false)) toggleColours();
startPairing();
startPanels();
startSettings();
showAll();
library.start();
watchServer((found) => {
  status = found;
  showModels(found).then(() => {
    const model = byId("model").value;
    byId("examples").hidden = model.startsWith("edgellm-");
    for (const note of document.querySelectorAll("[data-models]")) note.hidden = !model.startsWith(note.dataset.models);
  });
  showAway();
});
composer.field.focus();
startApp();
