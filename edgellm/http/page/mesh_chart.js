// The plan of a mesh beside what its devices really did.

import { byId, element, svgElement } from "./dom.js";

const seconds = (value) => value < 0.1 ? `${(1e3 * value).toFixed(1)} ms` : `${value.toFixed(2)} s`;
export const deviceName = (name) => name === "here" ? "this device" : name;
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
    const begin = Math.max(0, times.finish_s - times.compute_s), sent = (times.received_s ?? begin) - times.network_s;
    bar(y + 10, Math.min(times.load_s, begin), begin, "wait", `${device} waits`);
    bar(y + 10, Math.max(0, sent), sent + times.network_s, "network", `${device} receives its input`);
    bar(y, 0, times.load_s, "load", `${device} loads`);
    bar(y + 10, begin, times.finish_s, "compute", `${device} computes`);
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

// The running mesh: the last reply, beside the plan for such a reply.
export function showMesh({ last }) {
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
  const moves = (last.moves ?? []).map((move) => {
    const where = move.stages.map((stage) => `${deviceName(stage.device)} ${stage.first_layer}–${stage.last_layer}`);
    return element("p", "small", `From token ${move.after_token + 1} on ${where.join(", ")}: took over after ` +
      withPlan(move.at_s, move.planned ? move.planned.at_s : null));
  });
  byId("gantt").replaceChildren(chart(last.stages, [last.ttft_s ?? 0, planned ?? 0]), ...rows, ...moves);
}
