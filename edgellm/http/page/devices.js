// The server's state, its devices and the link to the verifier, asked for while the page is visible.

import { askForKey, call } from "./api.js";
import { byId, element } from "./dom.js";
import { showMesh, showPlan } from "./mesh_chart.js";

const EVERY_MS = 2000;

function device(name, lines, state) {
  const row = element("li", `device ${state}`, element("b", "", name));
  row.append(...lines.filter(Boolean).map((line) => element("p", "", line)));
  return row;
}

const hostOf = (address) => address.replace(/:\d+$/, "");
const rightsOf = (peer) => `its rights here: ${list(peer.may_here)} · this device's rights there: ${list(peer.may_there)}`;
const list = (rights) => rights.join(", ") || "none";

// The paired device that verifies, if it is known here.
const verifierPeer = ({ link, devices }) => link &&
  devices.find((one) => one.addresses.some((address) => hostOf(address) === hostOf(link.address)));

export function verifierName(status) {
  return verifierPeer(status)?.name ?? (status.link && !status.anonymous ? status.link.address : "the verifier");
}

export const isAway = ({ link }) => Boolean(link && !link.up);

// The state with the pair of the chosen model, whose fields are null while that is not in memory.
export function ofChosen(status) {
  const name = byId("model").value || status.model;
  const own = name === status.model ? status : status.models?.find((one) => one.name === name);
  const { draft = null, verifier = null, sampling = null, link = null } = own ?? {};
  return { ...status, draft, verifier, sampling, link };
}

function showDevices(status) {
  const { link, requests } = status, peer = verifierPeer(status);
  const holders = status.mesh?.holders ?? [];
  const held = (one) => `holds layers ${one.first_layer}–${one.last_layer} of ${status.verifier}`;
  const rows = [device("this device", [
    status.draft && `drafts with ${status.draft}`,
    !link && !status.mesh && status.verifier && `writes with ${status.verifier}`,
    ...holders.filter((one) => one.device === "here").map(held),
    `${requests.running} of ${requests.places} reply slots in use, ${requests.waiting} waiting`,
  ], "up")];
  if (link) {
    rows.push(device(verifierName(status), [
      link.up ? `verifies with ${status.verifier}` : "not reachable",
      link.up && link.rtt_ms !== null ? `${link.rtt_ms.toFixed(1)} ms round trip` : "",
      peer && `${peer.short} · ${link.address}`, link.reason, peer && rightsOf(peer),
    ], link.up ? "up" : "down"));
  }
  for (const one of holders) if (one.device !== "here") rows.push(device(one.device, [held(one)], "up"));
  for (const one of status.devices) {
    if (one !== peer) rows.push(device(one.name, [`${one.short} · ${one.addresses.join(", ")}`, rightsOf(one)], "paired"));
  }
  byId("devices").replaceChildren(...rows);
  byId("devices-part").hidden = rows.length < 2;
  byId("devices-note").hidden = !status.anonymous;
}

function showState(text, good) {
  byId("state").textContent = text;
  byId("state").className = good ? "good" : "bad";
}

async function poll(onStatus) {
  try {
    await call("GET", "/health");
    const heard = await call("GET", "/status");
    askForKey(false);
    await onStatus(heard);
    const status = ofChosen(heard);
    showDevices(status);
    if (status.mesh) showMesh(status.mesh);
    else showPlan(status.plan);
    showState(isAway(status) ? "" : "ready", !isAway(status)); // a note above the question says who is away
  } catch (error) {
    showState(error.status === 401 ? "the API key is missing" : error.status ? error.message : "the server is gone", false);
  }
}

// Asks for the server's state now and every two seconds; `onStatus` gets each one, and shows the models.
export function watchServer(onStatus) {
  const repeat = async () => {
    if (!document.hidden) await poll(onStatus);
    setTimeout(repeat, EVERY_MS);
  };
  byId("model").addEventListener("change", () => poll(onStatus));
  document.addEventListener("visibilitychange", () => document.hidden || poll(onStatus));
  repeat();
}
