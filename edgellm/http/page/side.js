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
  const own = [told.draft && `drafts with ${told.draft}`, !told.link && told.verifier && `verifies with ${told.verifier}`];
  rows.push(device("this device", [...own, `${told.requests.running} of ${told.requests.places} replies under way, ` +
    `${told.requests.waiting} waiting`], "up"));
  if (told.link) {
    const { link } = told;
    rows.push(device(link.address, [
      `verifies with ${told.verifier}`, link.up ? "" : "gone: replies go on from the draft model, unchecked",
      link.rtt_ms === null ? "" : `${link.rtt_ms.toFixed(1)} ms there and back`, link.reason,
    ], link.up ? "up" : "down"));
  }
  for (const peer of told.devices) {
    const may = (rights) => rights.join(", ") || "nothing";
    rows.push(device(peer.name, [`${peer.short} · ${peer.addresses.join(", ")}`,
      `may here: ${may(peer.may_here)} · this device there: ${may(peer.may_there)}`], ""));
  }
  at("devices").replaceChildren(...rows);
}

const SVG = "http://www.w3.org/2000/svg";

function drawn(kind, attributes, text = "") {
  const node = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

// A lane a device: loading above; waiting, receiving and computing below.
export function showPlan(plan) {
  at("plan").hidden = !plan;
  if (!plan) return;
  at("plan-advice").textContent = plan.advice;
  const width = 300, lane = 42, end = Math.max(...plan.stages.map((stage) => stage.finish_s)) || 1;
  const height = lane * plan.stages.length + 34;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img",
    "aria-label": "When each device loads, waits, receives and computes" });
  const bar = (y, from, to, kind, what) => {
    if (to <= from) return;
    const box = drawn("rect", { x: (from / end) * width, width: ((to - from) / end) * width, y, height: 9, class: kind });
    box.append(drawn("title", {}, `${what}: ${from.toFixed(2)} to ${to.toFixed(2)} s`));
    svg.append(box);
  };
  plan.stages.forEach((stage, row) => {
    const y = row * lane, begin = stage.finish_s - stage.compute_s;
    const name = `${stage.device}: layers ${stage.first_layer}–${stage.last_layer}`;
    svg.append(drawn("text", { x: 0, y: y + 12 }, name));
    bar(y + 17, 0, stage.load_s, "load", `${stage.device} loads`);
    bar(y + 27, Math.min(stage.load_s, begin), begin, "wait", `${stage.device} waits`);
    bar(y + 27, Math.max(0, begin - stage.network_s), begin, "network", `${stage.device} receives`);
    bar(y + 27, begin, stage.finish_s, "compute", `${stage.device} computes`);
  });
  let x = 0;
  for (const kind of ["load", "wait", "network", "compute"]) {
    svg.append(drawn("rect", { x, y: height - 26, width: 9, height: 9, class: kind }));
    svg.append(drawn("text", { x: x + 13, y: height - 18 }, kind));
    x += 70;
  }
  svg.append(drawn("text", { x: 0, y: height - 3 }, `first token after ${plan.ttft_s.toFixed(2)} s`));
  at("gantt").replaceChildren(svg);
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
    showPlan(told.plan);
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
