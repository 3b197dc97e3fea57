// Who wrote each word: what the sources mean, the marks in a reply, and the details of the word that one points at.

import { byId, element } from "./dom.js";

export const MEANINGS = {
  accepted: "drafted, and accepted by the verifier",
  retrieved: "copied from earlier text, and accepted by the verifier",
  bonus: "written by the verifier after it accepted a whole chunk",
  corrected: "written by the verifier in place of a rejected draft",
  verifier: "written by the verifier without a draft",
  parallel: "drafted while waiting for the verifier, not verified",
  draft: "written by the draft model, not verified",
};
const SOURCES = Object.keys(MEANINGS);
export const UNVERIFIED = ["parallel", "draft"];

// The tokens of a reply, kept as four numbers each: source, characters, confidence in percent (-1: none), round.
export class Marks {
  constructor(numbers = []) {
    const sound = Array.isArray(numbers) && numbers.every(Number.isInteger) && numbers.length % 4 === 0;
    this.numbers = sound ? numbers : [];
    this.ends = []; // of the tokens, in characters of the text
    for (let at = 1; at < this.numbers.length; at += 4) this.ends.push((this.ends.at(-1) ?? 0) + this.numbers[at]);
  }

  add(token) {
    const sure = token.confidence === null ? -1 : Math.round(100 * token.confidence);
    this.numbers.push(SOURCES.indexOf(token.source), token.text.length, sure, token.round);
    this.ends.push((this.ends.at(-1) ?? 0) + token.text.length);
  }

  get size() {
    return this.ends.length;
  }

  source(token) {
    return SOURCES[this.numbers[4 * token]] ?? "verifier";
  }

  details(token) {
    const [sure, round] = this.numbers.slice(4 * token + 2, 4 * token + 4);
    return [sure < 0 ? "" : `draft confidence ${sure} %`, `round ${round}`].filter(Boolean).join(" · ");
  }

  counts() {
    const found = {};
    for (let token = 0; token < this.size; token += 1) found[this.source(token)] = (found[this.source(token)] ?? 0) + 1;
    return found;
  }

  // How many words of the text have a part that no verifier has checked.
  uncheckedWords(text) {
    let words = 0, token = 0;
    for (const { 0: word, index } of text.matchAll(/\S+/g)) {
      while (token < this.size && (this.ends[token] <= index || !this.numbers[4 * token + 1] ||
        !UNVERIFIED.includes(this.source(token)))) token += 1;
      if (token < this.size && (this.ends[token - 1] ?? 0) < index + word.length) words += 1;
    }
    return words;
  }

  // The token of a character.
  at(place) {
    let low = 0, high = this.size;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] <= place) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

const REACH = 16; // characters of markup or of an entity that the source may have between two characters that are shown

// Wraps the text of pieces, which know where they stand in `text`, in an element for each token.
export function mark(pieces, marks, text) {
  if (!marks.size) return;
  for (const piece of pieces) {
    const leaves = document.createTreeWalker(piece, NodeFilter.SHOW_TEXT), nodes = [];
    while (leaves.nextNode()) nodes.push(leaves.currentNode);
    let place = Number(piece.dataset.at);
    for (const node of nodes) {
      const parts = [];
      for (const character of node.data) {
        const found = text.slice(place, place + REACH).indexOf(character);
        const here = found < 0 ? place : place + found;
        const token = Math.min(marks.at(here), marks.size - 1);
        if (parts.at(-1)?.token === token) parts.at(-1).text += character;
        else parts.push({ token, text: character });
        if (found >= 0) place = here + character.length;
      }
      node.replaceWith(...parts.map((part) => word(part, marks)));
    }
  }
}

function word({ token, text }, marks) {
  const node = element("span", `word ${marks.source(token)}`, text);
  node.dataset.token = token;
  return node;
}

// Details of a word: by pointing at it, by tapping it, and with the arrow keys once the reply has the focus.
export function showDetailsIn(box, marksOf) {
  const show = (node) => {
    const marks = marksOf(), token = Number(node.dataset.token);
    const source = marks.source(token);
    byId("who").replaceChildren(element("b", `word ${source}`, source), ` ${MEANINGS[source]}`,
      element("small", "", marks.details(token)));
    placeBeside(node);
  };
  const focus = (node) => {
    for (const one of box.querySelectorAll(".word[tabindex]")) one.removeAttribute("tabindex");
    node.tabIndex = -1;
    node.setAttribute("aria-describedby", "who");
    node.focus();
    show(node);
  };
  box.addEventListener("pointerover", (event) => event.target.closest?.(".word") && show(event.target.closest(".word")));
  box.addEventListener("pointerleave", hideDetails);
  box.addEventListener("click", (event) => {
    const node = event.target.closest(".word");
    if (node && !event.target.closest("a") && getSelection().isCollapsed) focus(node);
  });
  box.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key === "Escape") hideDetails();
    if (!(event.key in steps) || event.target.closest(".scrolls") || event.altKey || event.ctrlKey || event.metaKey) return;
    const words = [...box.querySelectorAll(".word")], now = words.indexOf(event.target);
    const next = words[now < 0 ? 0 : Math.min(words.length - 1, Math.max(0, now + steps[event.key]))];
    if (!next) return;
    event.preventDefault();
    focus(next);
  });
  box.addEventListener("focusout", hideDetails);
}

function placeBeside(node) {
  const box = byId("who"), [line] = node.getClientRects();
  if (!line) return;
  box.hidden = false;
  const size = box.getBoundingClientRect();
  const left = Math.max(8, Math.min(line.left, innerWidth - size.width - 8));
  const below = line.bottom + 8;
  box.style.left = `${left}px`;
  box.style.top = `${below + size.height > innerHeight ? Math.max(8, line.top - size.height - 8) : below}px`;
}

export function hideDetails() {
  byId("who").hidden = true;
}

export function showLegend(counts) {
  byId("legend").replaceChildren(...SOURCES.map((source) => element("li", "",
    element("b", `word ${source}`, source), element("span", "meaning", MEANINGS[source]),
    element("span", "count", `${counts[source] ?? ""}`))));
}

// A strip with the shares of the sources: a reply at a glance.
export function fillStrip(strip, counts) {
  strip.replaceChildren(...SOURCES.filter((source) => counts[source]).map((source) => {
    const part = element("i", source);
    part.style.flexGrow = counts[source];
    return part;
  }));
}
