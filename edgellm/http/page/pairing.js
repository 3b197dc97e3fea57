// Pairing with the computer: a code from its screen, by a link or typed, is exchanged for a key of this browser's own.

import { askForKey, call, hasPageKey, keepPageKey, linkedCode } from "./api.js";
import { byId, toast } from "./dom.js";

const CODE = /^[0-9a-z]{4}[- ]?[0-9a-z]{4}$/i; // an API key has 16 characters or more
const SYSTEMS = ["iPhone", "iPad", "Android", "CrOS", "Windows", "Macintosh", "Linux"];

// A name by which the user tells this device from others, as far as the browser says.
async function deviceName() {
  const said = await navigator.userAgentData?.getHighEntropyValues(["model"]).catch(() => null);
  return said?.model || SYSTEMS.find((one) => navigator.userAgent.includes(one)) || "phone";
}

function say(text, busy = false) {
  askForKey(true);
  byId("key-why").textContent = text;
  byId("key-form").classList.toggle("busy", busy);
}

async function pair(code) {
  say("Pairing with the computer …", true);
  try {
    const { key, name } = await call("POST", "/phones", { code, name: await deviceName() });
    const kept = keepPageKey(key);
    const until = kept ? "" : " This browser forgets that with the tab.";
    sessionStorage.setItem("edgellm-paired", `Paired. The computer calls this “${name}”.${until}`);
    location.reload();
  } catch (error) {
    say(error.message);
    if (hasPageKey()) toast(error.message); // the page is paired already, and goes on
  }
}

export function startPairing() {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = byId("key").value.trim();
    byId("key").value = "";
    if (CODE.test(given)) {
      pair(given);
      return;
    }
    sessionStorage.setItem("edgellm-key", given);
    askForKey(false);
  });
  const paired = sessionStorage.getItem("edgellm-paired");
  sessionStorage.removeItem("edgellm-paired");
  if (paired) toast(paired);
  if (linkedCode) pair(linkedCode);
}
