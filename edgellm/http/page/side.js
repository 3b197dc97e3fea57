// The panels beside the conversation: colours, figures, the budget, devices and links, and the mesh plan.

export const MEANINGS = {
  accepted: "drafted, and accepted by the verifier",
  retrieved: "copied from earlier text, and accepted by the verifier",
  bonus: "written by the verifier after it accepted a whole chunk",
  corrected: "written by the verifier in place of a rejected draft",
  verifier: "written by the verifier without a draft",
  parallel: "drafted while waiting for the verifier",
  draft: "written by the draft model, not verified",
};

const byId = (id) => document.getElementById(id);

function element(kind, name, text = "") {
  const node = document.createElement(kind);
  node.className = name;
  node.textContent = text;
  return node;
}

export function showLegend(counts) {
  byId("legend").replaceChildren(...Object.entries(MEANINGS).map(([source, meaning]) => {
    const row = document.createElement("li");
    row.title = meaning;
    row.append(element("b", source, source), element("i", "", meaning), element("span", "count", counts[source] ?? ""));
    return row;
  }));
}

// Returns a line about a reply that has ended, and shows other figures in the side panel.
export function showFigures(timings, summary) {
  const percent = (share) => `${Math.round(100 * share)} %`;
  const rows = [];
  if (summary.share_verified !== null) rows.push(`${percent(summary.share_verified)} verified`);
  if (summary.acceptance_rate !== null) rows.push(`${percent(summary.acceptance_rate)} of drafts accepted`);
  if (summary.retrieved) rows.push(`${summary.retrieved} tokens copied`);
  if (summary.verifier_passes_per_token) rows.push(`${summary.verifier_passes_per_token.toFixed(2)} verifier passes per token`);
  if (summary.share_offloaded !== null && summary.share_offloaded < 1) rows.push(`${percent(summary.share_offloaded)} offloaded so far`);
  if (summary.rtt_ms_p50 !== null) rows.push(`${summary.rtt_ms_p50.toFixed(1)} ms round trip to the verifier`);
  if (summary.bytes_up) rows.push(`${summary.bytes_up} B up, ${summary.bytes_down} B down`);
  byId("figures").textContent = rows.join(" · ");
  const line = [`${timings.predicted_n} tokens`];
  if (timings.predicted_per_second) line.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  if (timings.prompt_ms) line.push(`first after ${Math.round(timings.prompt_ms)} ms`);
  if (summary.finish_reason === "length") line.push("stopped at the length limit");
  return line.join(" · ");
}

export function showBudget() {
  const share = Number(byId("budget").value);
  byId("budget-value").textContent = share === 100 ? "everything" : share ? `${share} %` : "nothing";
  byId("budget-meaning").textContent = share === 100
    ? "Every chunk is verified: the text is the verifier's own."
    : share
      ? `The verifier checks ${share} % of the drafted chunks: those that matter most.`
      : "The draft model writes alone, and nothing is verified.";
}

function device(name, lines, state) {
  const row = element("div", `device ${state}`);
  row.append(element("b", "", name), ...lines.filter(Boolean).map((line) => element("p", "small", line)));
  return row;
}

function showDevices(status) {
  const rows = [];
  const holders = status.mesh?.holders ?? [];
  const held = (one) => `holds layers ${one.first_layer}–${one.last_layer} of ${status.verifier}`;
  const own = [status.draft && `drafts with ${status.draft}`,
    !status.link && !status.mesh && status.verifier && `verifies with ${status.verifier}`,
    ...holders.filter((one) => one.device === "here").map(held)];
  rows.push(device("this device", [...own, `${status.requests.running} of ${status.requests.places} reply slots in use, ` +
    `${status.requests.waiting} waiting`], "up"));
  if (status.link) {
    const { link } = status;
    rows.push(device(link.address, [
      `verifies with ${status.verifier}`, link.up ? "" : "not reachable: the draft model goes on alone, unverified",
      link.rtt_ms === null ? "" : `${link.rtt_ms.toFixed(1)} ms round trip`, link.reason,
    ], link.up ? "up" : "down"));
  }
  for (const one of holders) if (one.device !== "here") rows.push(device(one.device, [held(one)], "up"));
  for (const peer of status.devices) {
    const list = (rights) => rights.join(", ") || "none";
    rows.push(device(peer.name, [`${peer.short} · ${peer.addresses.join(", ")}`,
      `its rights here: ${list(peer.may_here)} · this device's rights there: ${list(peer.may_there)}`], ""));
  }
  if (status.anonymous) rows.push(element("p", "small", "Other devices are shown only to clients with an API key; see --api-key-file."));
  byId("devices").replaceChildren(...rows);
}

const SVG = "http://www.w3.org/2000/svg";

function svgElement(kind, attributes, text = "") {
  const node = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

const seconds = (value) => value < 0.1 ? `${(1e3 * value).toFixed(1)} ms` : `${value.toFixed(2)} s`;
const deviceName = (name) => name === "here" ? "this device" : name;
const withPlan = (value, planned) => planned === null ? seconds(value) : `${seconds(value)} (${seconds(planned)})`;

// One lane per device, or two where there is a plan and a measurement; in each, loading is above waiting, receiving and
// computing.
function chart(stages, ends) {
  const both = stages.some((stage) => stage.planned) && stages.some((stage) => stage.measured);
  const left = both ? 30 : 0, width = 300 - left, row = both ? 26 : 22;
  const end = Math.max(...ends, ...stages.flatMap((stage) => [stage.planned, stage.measured])
    .map((times) => times?.finish_s ?? 0)) || 1;
  const svg = svgElement("svg", { width: "100%", role: "img",
    "aria-label": "When each device loads, waits, receives and computes" });
  const bar = (y, from, to, kind, what) => {
    if (to <= from) return;
    const box = svgElement("rect", { x: left + (from / end) * width, width: Math.max(0.5, ((to - from) / end) * width), y,
      height: 9, class: kind });
    box.append(svgElement("title", {}, `${what}: ${seconds(from)} to ${seconds(to)}`));
    svg.append(box);
  };
  const lane = (y, device, times, name) => {
    if (both) svg.append(svgElement("text", { x: 0, y: y + 13 }, name));
    const begin = times.finish_s - times.compute_s, sent = (times.received_s ?? begin) - times.network_s;
    const loads = times.loading ?? [[0, times.load_s]], computes = times.computing ?? [[begin, times.finish_s]];
    const first = computes.length ? computes[0][0] : times.finish_s;
    bar(y + 10, Math.min(times.load_s, first), first, "wait", `${device} waits`);
    bar(y + 10, Math.max(0, sent), sent + times.network_s, "network", `${device} receives its input`);
    for (const [from, to] of loads) bar(y, from, to, "load", `${device} loads`);
    for (const [from, to] of computes) bar(y + 10, from, to, "compute", `${device} computes`);
  };
  let y = 0;
  for (const stage of stages) {
    svg.append(svgElement("text", { x: 0, y: y + 12, class: "name" },
      `${deviceName(stage.device)}: layers ${stage.first_layer}–${stage.last_layer}`));
    y += 17;
    for (const name of ["planned", "measured"]) {
      if (!stage[name]) continue;
      lane(y, deviceName(stage.device), stage[name], name === "planned" ? "plan" : "run");
      y += row;
    }
  }
  let x = 0;
  for (const kind of ["load", "wait", "network", "compute"]) {
    svg.append(svgElement("rect", { x, y: y + 8, width: 9, height: 9, class: kind }));
    svg.append(svgElement("text", { x: x + 13, y: y + 16 }, kind));
    x += 70;
  }
  svg.setAttribute("viewBox", `0 0 300 ${y + 22}`);
  return svg;
}

export function showPlan(plan) {
  byId("plan").hidden = !plan;
  if (!plan) return;
  byId("plan-title").textContent = "Mesh plan";
  byId("plan-advice").textContent = plan.advice;
  byId("gantt").replaceChildren(chart(plan.stages.map((stage) => ({ ...stage, planned: stage })), [plan.ttft_s]),
    element("p", "small", `First token after ${plan.ttft_s.toFixed(2)} s.`));
}

// The running mesh: the last reply, beside the plan for such a reply.
export function showMesh({ last }) {
  byId("plan").hidden = false;
  byId("plan-title").textContent = last && last.ttft_s !== null ? "Mesh: the last reply" : "Mesh";
  if (!last) {
    byId("plan-advice").textContent = "After the first reply, this shows what each device did for it.";
    byId("gantt").replaceChildren();
    return;
  }
  const measured = last.ttft_s !== null, planned = last.planned_ttft_s;
  byId("plan-advice").textContent = measured
    ? `First token after ${withPlan(last.ttft_s, planned)}, then ${withPlan(last.token_s, last.planned_token_s)} per token` +
      (planned === null ? "." : "; the plan is in brackets.")
    : `Planned: first token after ${seconds(planned)}, then ${seconds(last.planned_token_s)} per token.`;
  const rows = last.stages.filter((stage) => stage.measured).map((stage) => {
    const both = (key) => withPlan(stage.measured[key], stage.planned ? stage.planned[key] : null);
    const loaded = stage.measured.load_s ? `loaded after ${both("load_s")}, ` : "";
    return element("p", "small", `${deviceName(stage.device)}: ${loaded}computed for ${both("compute_s")}, ` +
      `done after ${both("finish_s")}`);
  });
  const wrong = last.disproved.map((sentence) => element("p", "notice", sentence));
  byId("gantt").replaceChildren(chart(last.stages, [last.ttft_s ?? 0, planned ?? 0]), ...rows, ...wrong);
}

function showState(text, good) {
  byId("state").textContent = text;
  byId("state").className = good ? "good" : "bad";
}

async function poll(headers, askForKey) {
  try {
    const health = await fetch("/health");
    if (!health.ok) {
      showState((await health.json()).error.message, false);
      return;
    }
    const response = await fetch("/status", { headers: headers() });
    if (response.status === 401) {
      showState("the API key is missing", false);
      askForKey(true);
      return;
    }
    const status = await response.json();
    if (!response.ok) {
      showState(status.error.message, false);
      return;
    }
    byId("model").textContent = status.model ?? "no model";
    showDevices(status);
    if (status.mesh) showMesh(status.mesh);
    else showPlan(status.plan);
    if (status.link && !status.link.up) showState("the verifier is gone", false);
    else showState("ready", true);
  } catch {
    showState("the server is gone", false);
  }
}

// Polls the server's status, now and every two seconds while the page is visible.
export function watchServer(headers, askForKey) {
  const repeat = async () => {
    if (!document.hidden) await poll(headers, askForKey);
    setTimeout(repeat, 2000);
  };
  repeat();
}
