// What stands beside the conversation: colours, figures, the budget, devices and links, and the mesh plan.

export const MEANINGS = {
  accepted: "drafted, and the verifier agreed",
  retrieved: "copied from what was said before, and the verifier agreed",
  bonus: "the verifier's own word, after it agreed with a whole chunk",
  corrected: "the verifier's own word, where it disagreed",
  verifier: "the verifier wrote alone",
  parallel: "drafted while the verdict was on its way",
  draft: "the draft model wrote it, nobody checked it",
};

const at = (id) => document.getElementById(id);

function made(kind, name, text = "") {
  const node = document.createElement(kind);
  node.className = name;
  node.textContent = text;
  return node;
}

export function showLegend(counts) {
  at("legend").replaceChildren(...Object.entries(MEANINGS).map(([source, meaning]) => {
    const row = document.createElement("li");
    row.title = meaning;
    row.append(made("b", source, source), made("i", "", meaning), made("span", "count", counts[source] ?? ""));
    return row;
  }));
}

// A line about a reply that has ended; the side shows the rest.
export function showFigures(timings, summary) {
  const percent = (share) => `${Math.round(100 * share)} %`;
  const rows = [];
  if (summary.share_verified !== null) rows.push(`${percent(summary.share_verified)} verified`);
  if (summary.acceptance_rate !== null) rows.push(`${percent(summary.acceptance_rate)} of drafts accepted`);
  if (summary.retrieved) rows.push(`${summary.retrieved} copied`);
  if (summary.verifier_passes_per_token) rows.push(`${summary.verifier_passes_per_token.toFixed(2)} verifier passes a token`);
  if (summary.share_offloaded !== null && summary.share_offloaded < 1) rows.push(`${percent(summary.share_offloaded)} offloaded so far`);
  if (summary.rtt_ms_p50 !== null) rows.push(`${summary.rtt_ms_p50.toFixed(1)} ms to the verifier and back`);
  if (summary.bytes_up) rows.push(`${summary.bytes_up} B up, ${summary.bytes_down} B down`);
  at("figures").textContent = rows.join(" · ");
  const line = [`${timings.predicted_n} tokens`];
  if (timings.predicted_per_second) line.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  if (timings.prompt_ms) line.push(`first after ${Math.round(timings.prompt_ms)} ms`);
  if (summary.finish_reason === "length") line.push("cut at the length limit");
  return line.join(" · ");
}

export function showBudget() {
  const share = Number(at("budget").value);
  at("budget-value").textContent = share === 100 ? "everything" : share ? `${share} %` : "nothing";
  at("budget-meaning").textContent = share === 100
    ? "All is verified: the words are the verifier's own."
    : share
      ? `The verifier is asked about ${share} % of the drafted chunks: those that matter most.`
      : "The draft model writes alone, and nobody checks it.";
}

function device(name, lines, state) {
  const row = made("div", `device ${state}`);
  row.append(made("b", "", name), ...lines.filter(Boolean).map((line) => made("p", "small", line)));
  return row;
}

function showDevices(told) {
  const rows = [];
  const holders = told.mesh?.holders ?? [];
  const held = (one) => `holds layers ${one.first_layer}–${one.last_layer} of ${told.verifier}`;
  const own = [told.draft && `drafts with ${told.draft}`,
    !told.link && !told.mesh && told.verifier && `verifies with ${told.verifier}`,
    ...holders.filter((one) => one.device === "here").map(held)];
  rows.push(device("this device", [...own, `${told.requests.running} of ${told.requests.places} replies under way, ` +
    `${told.requests.waiting} waiting`], "up"));
  if (told.link) {
    const { link } = told;
    rows.push(device(link.address, [
      `verifies with ${told.verifier}`, link.up ? "" : "gone: replies go on from the draft model, unchecked",
      link.rtt_ms === null ? "" : `${link.rtt_ms.toFixed(1)} ms there and back`, link.reason,
    ], link.up ? "up" : "down"));
  }
  for (const one of holders) if (one.device !== "here") rows.push(device(one.device, [held(one)], "up"));
  for (const peer of told.devices) {
    const may = (rights) => rights.join(", ") || "nothing";
    rows.push(device(peer.name, [`${peer.short} · ${peer.addresses.join(", ")}`,
      `may here: ${may(peer.may_here)} · this device there: ${may(peer.may_there)}`], ""));
  }
  if (told.anonymous) rows.push(made("p", "small", "Other devices are named to those who show a key: --api-key-file."));
  at("devices").replaceChildren(...rows);
}

const SVG = "http://www.w3.org/2000/svg";

function drawn(kind, attributes, text = "") {
  const node = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

const seconds = (value) => value < 0.1 ? `${(1e3 * value).toFixed(1)} ms` : `${value.toFixed(2)} s`;
const called = (name) => name === "here" ? "this device" : name;
const besides = (value, planned) => planned === null ? seconds(value) : `${seconds(value)} (${seconds(planned)})`;

// A lane a device, or two where what was planned stands above what was measured; in each, loading above waiting,
// receiving and computing.
function chart(stages, ends) {
  const both = stages.some((stage) => stage.planned) && stages.some((stage) => stage.measured);
  const left = both ? 30 : 0, width = 300 - left, row = both ? 26 : 22;
  const end = Math.max(...ends, ...stages.flatMap((stage) => [stage.planned, stage.measured])
    .map((times) => times?.finish_s ?? 0)) || 1;
  const svg = drawn("svg", { width: "100%", role: "img",
    "aria-label": "When each device loads, waits, receives and computes" });
  const bar = (y, from, to, kind, what) => {
    if (to <= from) return;
    const box = drawn("rect", { x: left + (from / end) * width, width: Math.max(0.5, ((to - from) / end) * width), y,
      height: 9, class: kind });
    box.append(drawn("title", {}, `${what}: ${seconds(from)} to ${seconds(to)}`));
    svg.append(box);
  };
  const lane = (y, device, times, name) => {
    if (both) svg.append(drawn("text", { x: 0, y: y + 13 }, name));
    const begin = times.finish_s - times.compute_s, sent = (times.received_s ?? begin) - times.network_s;
    const loads = times.loading ?? [[0, times.load_s]], computes = times.computing ?? [[begin, times.finish_s]];
    const first = computes.length ? computes[0][0] : times.finish_s;
    bar(y + 10, Math.min(times.load_s, first), first, "wait", `${device} waits`);
    bar(y + 10, Math.max(0, sent), sent + times.network_s, "network", `${device} is sent its input`);
    for (const [from, to] of loads) bar(y, from, to, "load", `${device} loads`);
    for (const [from, to] of computes) bar(y + 10, from, to, "compute", `${device} computes`);
  };
  let y = 0;
  for (const stage of stages) {
    svg.append(drawn("text", { x: 0, y: y + 12, class: "name" },
      `${called(stage.device)}: layers ${stage.first_layer}–${stage.last_layer}`));
    y += 17;
    for (const name of ["planned", "measured"]) {
      if (!stage[name]) continue;
      lane(y, called(stage.device), stage[name], name === "planned" ? "plan" : "run");
      y += row;
    }
  }
  let x = 0;
  for (const kind of ["load", "wait", "network", "compute"]) {
    svg.append(drawn("rect", { x, y: y + 8, width: 9, height: 9, class: kind }));
    svg.append(drawn("text", { x: x + 13, y: y + 16 }, kind));
    x += 70;
  }
  svg.setAttribute("viewBox", `0 0 300 ${y + 22}`);
  return svg;
}

export function showPlan(plan) {
  at("plan").hidden = !plan;
  if (!plan) return;
  at("plan-title").textContent = "Mesh plan";
  at("plan-advice").textContent = plan.advice;
  at("gantt").replaceChildren(chart(plan.stages.map((stage) => ({ ...stage, planned: stage })), [plan.ttft_s]),
    made("p", "small", `First token after ${plan.ttft_s.toFixed(2)} s.`));
}

// The mesh that is running: the last reply, beside what was planned for one like it.
export function showMesh({ last }) {
  at("plan").hidden = false;
  at("plan-title").textContent = last && last.ttft_s !== null ? "Mesh: the last reply" : "Mesh";
  if (!last) {
    at("plan-advice").textContent = "Behind the first reply this shows what each device did for it.";
    at("gantt").replaceChildren();
    return;
  }
  const measured = last.ttft_s !== null, planned = last.planned_ttft_s;
  at("plan-advice").textContent = measured
    ? `First token after ${besides(last.ttft_s, planned)}, then ${besides(last.token_s, last.planned_token_s)} a token` +
      (planned === null ? "." : "; planned in brackets.")
    : `Planned: first token after ${seconds(planned)}, then ${seconds(last.planned_token_s)} a token.`;
  const rows = last.stages.filter((stage) => stage.measured).map((stage) => {
    const both = (key) => besides(stage.measured[key], stage.planned ? stage.planned[key] : null);
    const loaded = stage.measured.load_s ? `loaded after ${both("load_s")}, ` : "";
    return made("p", "small", `${called(stage.device)}: ${loaded}computed for ${both("compute_s")}, ` +
      `done after ${both("finish_s")}`);
  });
  const wrong = last.disproved.map((sentence) => made("p", "notice", sentence));
  at("gantt").replaceChildren(chart(last.stages, [last.ttft_s ?? 0, planned ?? 0]), ...rows, ...wrong);
}

function state(text, good) {
  at("state").textContent = text;
  at("state").className = good ? "good" : "bad";
}

async function look(headers, askForKey) {
  try {
    const health = await fetch("/health");
    if (!health.ok) {
      state((await health.json()).error.message, false);
      return;
    }
    const response = await fetch("/status", { headers: headers() });
    if (response.status === 401) {
      state("the key is missing", false);
      askForKey(true);
      return;
    }
    const told = await response.json();
    if (!response.ok) {
      state(told.error.message, false);
      return;
    }
    at("model").textContent = told.model ?? "nobody writes here";
    showDevices(told);
    if (told.mesh) showMesh(told.mesh);
    else showPlan(told.plan);
    if (told.link && !told.link.up) state("the verifier is gone", false);
    else state("ready", true);
  } catch {
    state("the server is gone", false);
  }
}

// Asks how the server is, now and every two seconds while somebody looks.
export function watchServer(headers, askForKey) {
  const again = async () => {
    if (!document.hidden) await look(headers, askForKey);
    setTimeout(again, 2000);
  };
  again();
}
