// Small helpers for the document.

export const byId = (id) => document.getElementById(id);

export function element(kind, name = "", ...content) {
  const node = document.createElement(kind);
  if (name) node.className = name;
  node.append(...content);
  return node;
}

// A button with an icon: `label` is its accessible name and its hint.
export function iconButton(icon, label, onClick, name = "icon") {
  const button = element("button", name, iconOf(icon));
  button.type = "button";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.addEventListener("click", onClick);
  return button;
}

const SVG = "http://www.w3.org/2000/svg";

export function svgElement(kind, attributes, text = "") {
  const node = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

const ICONS = {
  branch: "M6 4v16M6 8a4 4 0 0 0 4 4h4a4 4 0 0 0 4-4V4M15 7l3-3 3 3",
  check: "M5 12.5l4.5 4.5L19 7.5",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h10v11H9zM5 15V4h10",
  edit: "M4 20l1-4L16 5l3 3L8 19zM13 8l3 3",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  next: "M9 5l7 7-7 7",
  previous: "M15 5l-7 7 7 7",
  retry: "M19 12a7 7 0 1 1-2-5M17 3v4h-4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10 11v6M14 11v6",
  words: "M4 6h16M4 11h10M4 16h13M4 20h6",
};

function iconOf(name) {
  const svg = svgElement("svg", { viewBox: "0 0 24 24", "aria-hidden": "true", class: "glyph" });
  svg.append(svgElement("path", { d: ICONS[name] }));
  return svg;
}

// Draws at most once per frame: a layout per token is too much for a slow machine.
export function oncePerFrame(draw) {
  let frame = 0;
  const now = () => {
    cancelAnimationFrame(frame);
    frame = 0;
    draw();
  };
  return { now, soon: () => (frame ||= requestAnimationFrame(now)) };
}

// Tells people who do not see the page what has happened.
export function announce(text) {
  byId("announcement").textContent = text;
}

// Shows a line at the bottom for some seconds, with something to do about it if `action` is given.
export function toast(text, action = null) {
  const line = element("div", "toast", element("span", "", text));
  let timer = 0;
  const remove = () => {
    clearTimeout(timer);
    line.remove();
  };
  if (action) {
    const button = element("button", "quiet", action.label);
    button.type = "button";
    button.addEventListener("click", () => {
      remove();
      action.run();
    });
    line.append(button);
  }
  line.append(iconButton("close", "Dismiss", remove));
  byId("toasts").replaceChildren(line);
  timer = setTimeout(remove, action ? 15000 : 6000);
}

export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not a secure context, or not allowed
    const field = element("textarea", "out-of-sight");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  const before = [...button.childNodes];
  button.replaceChildren(iconOf("check"));
  announce("Copied.");
  setTimeout(() => button.replaceChildren(...before), 1200);
}

export const storage = {
  get(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`edgellm-${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      if (value === null) localStorage.removeItem(`edgellm-${name}`);
      else localStorage.setItem(`edgellm-${name}`, JSON.stringify(value));
    } catch { /* private windows may have no room: the value lasts as long as the tab */ }
  },
};
