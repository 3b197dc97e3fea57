// The server's state, its devices and the link to the verifier, asked for while the page is visible.

import { askForKey, call } from "./api.js";
import { byId, element } from "./dom.js";
import { showMesh } from "./mesh_chart.js";

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

// The state with the pair that the chosen model has, if that is in memory.
function ofChosen(status) {
  const chosen = byId("model").value || status.model;
  const { draft, verifier, link } = status.models.find((one) => one.name === chosen) ?? { link: null };
  return { ...status, draft, verifier, link };
}

function showDevices(status) {
  const { link, requests } = status;
  const holders = status.mesh?.holders ?? [];
  const held = (one) => `holds layers ${one.first_layer}–${one.last_layer} of ${status.verifier}`;
  const rows = [device("this device", [
    status.draft && `drafts with ${status.draft}`,
    !link && !status.mesh && status.verifier && `verifies with ${status.verifier}`,
    ...holders.filter((one) => one.device === "here").map(held),
    `${requests.running} of ${requests.places} reply slots in use, ${requests.waiting} waiting`,
  ], "up")];
  if (link) {
    const name = verifierName(status), peer = verifierPeer(status);
    rows.push(device(name, [
      `verifies with ${status.verifier}`, link.up ? "" : "not reachable: the draft model goes on alone, unverified",
      link.up && link.rtt_ms !== null ? `${link.rtt_ms.toFixed(1)} ms round trip` : "",
      peer && `${peer.short} · ${link.address}`, link.reason, peer && rightsOf(peer),
    ], link.up ? "up" : "down"));
  }
  for (const one of holders) if (one.device !== "here") rows.push(device(one.device, [held(one)], "up"));
  for (const peer of status.devices) {
    if (peer === verifierPeer(status)) continue;
    rows.push(device(peer.name, [`${peer.short} · ${peer.addresses.join(", ")}`, rightsOf(peer)], "paired"));
  }
  byId("devices").replaceChildren(...rows);
  byId("devices-note").hidden = !status.anonymous;
}

function showState(text, good) {
  byId("state").textContent = text;
  byId("state").className = good ? "good" : "bad";
}

async function poll(onStatus) {
  try {
    await call("GET", "/health");
    const status = ofChosen(await call("GET", "/status"));
    askForKey(false);
    byId("gone").hidden = true;
    showDevices(status);
    byId("plan").hidden = !status.mesh;
    if (status.mesh) showMesh(status.mesh);
    const away = status.link && !status.link.up;
    showState(away ? `${verifierName(status)} is away` : "ready", !away);
    onStatus(status);
  } catch (error) {
    byId("gone").hidden = Boolean(error.status);
    showState(error.status === 401 ? "not paired" : error.status ? error.message : "the server is gone", false);
  }
}

// Asks for the server's state now and every two seconds; `onStatus` gets each one.
export function watchServer(onStatus) {
  const repeat = async () => {
    if (!document.hidden) await poll(onStatus);
    setTimeout(repeat, EVERY_MS);
  };
  document.addEventListener("visibilitychange", () => document.hidden || poll(onStatus));
  repeat();
}
