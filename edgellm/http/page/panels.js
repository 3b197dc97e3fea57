// The two panels: beside the conversation where there is room, else over it.

import { byId } from "./dom.js";

const WIDE = { left: "(min-width: 900px)", right: "(min-width: 1180px)" };
const CONTENT = { left: "library", right: "panel" };

export function startPanels() {
  const body = document.body;
  const beside = (side) => matchMedia(WIDE[side]).matches;
  const set = (side, open) => {
    body.classList.toggle(side, open && !beside(side));
    body.classList.toggle(`no-${side}`, !open && beside(side));
    const shown = open || (beside(side) && !body.classList.contains(`no-${side}`));
    byId(CONTENT[side]).inert = !shown;
    byId(`${side}-button`).setAttribute("aria-expanded", String(shown));
    byId("talk").inert = body.matches(".left, .right");
    byId("shade").hidden = !body.matches(".left, .right");
    if (open && !beside(side)) byId(CONTENT[side]).querySelector(".shut").focus();
  };
  for (const side of ["left", "right"]) {
    const button = byId(`${side}-button`);
    button.addEventListener("click", () => set(side, button.getAttribute("aria-expanded") !== "true"));
    matchMedia(WIDE[side]).addEventListener("change", () => set(side, beside(side)));
    set(side, beside(side));
  }
  const close = () => {
    for (const side of ["left", "right"]) if (body.classList.contains(side)) {
      set(side, false);
      byId(`${side}-button`).focus();
    }
  };
  for (const one of [byId("shade"), ...document.querySelectorAll(".shut")]) one.addEventListener("click", close);
  addEventListener("keydown", (event) => event.key === "Escape" && close());
  byId("library").addEventListener("click", (event) => event.target.closest(".open, #new") && close());
}
