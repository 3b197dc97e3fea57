// Settings of replies: the model, the system prompt, sampling, and the budget with what it costs.

import { call } from "./api.js";
import { byId, element, storage } from "./dom.js";

const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repeat_penalty"]; // where left empty, as the model wants
const NUMBERS = [...SAMPLING, "max_tokens", "seed"];

const percent = (share) => `${Math.round(100 * share)} %`;
const budget = () => Number(byId("budget").value) / 100;
const budgetName = (share) => share === 1 ? "everything" : share ? percent(share) : "nothing";

let away = false; // whether the verifier cannot be asked

export function showVerifier(isAway) {
  if (away === isAway) return;
  away = isAway;
  showBudget();
}

function meaning(share) {
  if (away && share) return "Nothing is verified while the verifier is away: the draft model writes alone.";
  if (share === 1) return "Every chunk is verified: the text is the verifier's own.";
  return share
    ? `The verifier checks ${percent(share)} of the drafted chunks: those that matter most.`
    : "The draft model writes alone, and nothing is verified.";
}

// The sums of a model's replies by their budget, as they were measured in this browser.
const costs = () => storage.get(`costs-${byId("model").value}`, {});

export function addCost({ share, tokens, seconds, passes, unchecked, bytes }) {
  const all = costs();
  const sum = all[share] ?? { replies: 0, tokens: 0, seconds: 0, passes: 0, unchecked: 0, bytes: 0 };
  all[share] = {
    replies: sum.replies + 1, tokens: sum.tokens + tokens, seconds: sum.seconds + seconds, passes: sum.passes + passes,
    unchecked: sum.unchecked + unchecked, bytes: sum.bytes + bytes,
  };
  storage.set(`costs-${byId("model").value}`, all);
  showBudget();
}

export function showBudget() {
  const share = budget(), rows = Object.entries(costs()).sort(([a], [b]) => b - a);
  byId("budget-value").textContent = budgetName(share);
  byId("budget").setAttribute("aria-valuetext", budgetName(share));
  byId("budget-meaning").textContent = meaning(share);
  byId("costs").hidden = !rows.length;
  const links = rows.some(([, sum]) => sum.bytes);
  byId("costs-head").replaceChildren(...["budget", "unchecked", "passes", "tok/s", ...(links ? ["bytes"] : [])]
    .map((title) => {
      const cell = element("th", "", title);
      cell.scope = "col";
      return cell;
    }));
  byId("costs-rows").replaceChildren(...rows.map(([at, sum]) => {
    const each = (total) => total / Math.max(1, sum.tokens);
    const speed = sum.seconds > 0 ? (sum.tokens / sum.seconds).toFixed(0) : "–";
    const cells = [percent(each(sum.unchecked)), each(sum.passes).toFixed(2), speed, ...(links ? [each(sum.bytes).toFixed(0)] : [])];
    const head = element("th", "", budgetName(Number(at)));
    head.scope = "row";
    const row = element("tr", Number(at) === share ? "now" : "", head, ...cells.map((text) => element("td", "", text)));
    row.title = `${sum.replies} ${sum.replies === 1 ? "reply" : "replies"}, ${sum.tokens} tokens`;
    return row;
  }));
}

// Returns the parameters of a request. What was left empty is the server's choice.
export function parameters() {
  const alone = byId("pair").hidden; // no draft model, and so nothing to choose about verifying
  const body = { model: byId("model").value || undefined, budget: budget() < 1 && !alone ? budget() : undefined };
  for (const name of NUMBERS) if (byId(name).value !== "" && byId(name).checkValidity()) body[name] = Number(byId(name).value);
  const think = byId("think").value;
  if (think) body.think = think === "on";
  if (byId("require_verified").checked && !alone) body.require_verified = true;
  if (byId("copying").value) body.retrieval = byId("copying").value;
  return body;
}

export const systemPrompt = () => byId("system").value.trim();

export function showSystemPrompt(text) {
  byId("system").value = text;
}

function keep() {
  const values = Object.fromEntries([...NUMBERS, "think", "copying", "budget"].map((name) => [name, byId(name).value]));
  storage.set("settings", { ...values, require_verified: byId("require_verified").checked });
  const changed = [...NUMBERS, "think", "copying"].filter((name) => byId(name).value !== "").length;
  byId("sampling-changed").textContent = changed ? `${changed} changed` : "";
  byId("reset").disabled = !changed && !byId("require_verified").checked;
  showBudget();
}

let names = "", models = [], heard = 0;
const LIST_EVERY = 15; // states of the server

// Shows the served models; the chosen one stays chosen as long as it is there.
export async function showModels(status) {
  if (heard++ % LIST_EVERY === 0 || !models.some((one) => one.id === status.model)) {
    try {
      models = (await call("GET", "/v1/models")).data.filter((one) => !one.embeds);
    } catch { /* the state line says that the server is gone */ }
  }
  const found = new Map(models.map((one) => [one.id, one.device ? `${one.id} on ${one.device}` : one.id]));
  if (status.model && !found.has(status.model)) found.set(status.model, status.model);
  if (names !== [...found.values()].join("\n")) {
    names = [...found.values()].join("\n");
    const kept = storage.get("model", ""), chosen = found.has(kept) ? kept : status.model;
    byId("model").replaceChildren(...Array.from(found, ([id, label]) => new Option(label, id, false, id === chosen)));
    byId("model").disabled = found.size < 2;
    showBudget();
  }
  const own = status.models.find((one) => one.name === byId("model").value);
  byId("pair").hidden = Boolean(own) && !own.draft;
  const pair = own?.draft ? `${own.draft} drafts, ${own.verifier ?? own.name} verifies` : "";
  for (const name of SAMPLING) {
    byId(name).placeholder = own?.sampling?.[name] ?? "the model's";
    byId(name).title = own?.sampling ? `If left empty, ${own.sampling[name]}, by ${own.sampling.origin}` : "";
  }
  const loading = status.loading?.includes(byId("model").value) ? "being loaded" : "";
  const length = models.find((one) => one.id === byId("model").value)?.context_length;
  byId("model-about").textContent = [loading, pair, length && `context of ${length.toLocaleString("en")} tokens`].filter(Boolean).join(" · ");
  byId("title-model").textContent = byId("model").value || "no model";
}

export function startSettings() {
  const kept = storage.get("settings", {});
  for (const name of [...NUMBERS, "think", "copying", "budget"]) if (typeof kept[name] === "string") byId(name).value = kept[name];
  byId("require_verified").checked = kept.require_verified === true;
  byId("settings").addEventListener("input", keep);
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  byId("budget").addEventListener("input", keep);
  byId("model").addEventListener("change", () => {
    storage.set("model", byId("model").value);
    byId("title-model").textContent = byId("model").value;
    showBudget();
  });
  byId("reset").addEventListener("click", () => {
    for (const name of [...NUMBERS, "think", "copying"]) byId(name).value = "";
    byId("require_verified").checked = false;
    keep();
  });
  keep();
}
