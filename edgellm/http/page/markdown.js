// Markdown as elements, block by block, each piece of text with its place in the source. HTML in it is shown as text:
// what a model writes is not trusted.

import { copyText, element, iconButton } from "./dom.js";
import { Marked } from "./vendor/marked.js";
import purify from "./vendor/purify.js";

const TAGS = ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p",
  "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"];
const ATTRIBUTES = ["align", "checked", "class", "data-at", "disabled", "href", "start", "title", "type"];
const ADDRESS = /^(https?:|mailto:)/i;

const escaped = (text) => text.replace(/[&<>"']/g, (found) => `&#${found.charCodeAt(0)};`);
const placed = (token, text, at = token.at) => `<span data-at="${at}">${escaped(text)}</span>`;
const attribute = (name, value) => value ? ` ${name}="${escaped(value)}"` : "";

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    text(token) {
      return token.tokens ? this.parser.parseInline(token.tokens) : placed(token, decode(token.text));
    },
    html: (token) => placed(token, token.raw),
    codespan: (token) => `<code>${placed(token, token.text, token.at + token.raw.indexOf(token.text))}</code>`,
    code(token) {
      const language = /^[\w+#.-]{1,30}/.exec(token.lang ?? "")?.[0] ?? "";
      const at = token.at + Math.max(0, token.raw.indexOf(token.text, token.raw.indexOf("\n") + 1));
      return `<pre${attribute("class", language && `in-${language}`)}><code data-at="${at}">${escaped(token.text)}</code></pre>`;
    },
    link(token) {
      const text = this.parser.parseInline(token.tokens);
      return ADDRESS.test(token.href) ? `<a${attribute("href", token.href)}${attribute("title", token.title)}>${text}</a>` : text;
    },
    image: (token) => placed(token, token.raw), // showing it would be a request to its server
  },
});

// marked leaves entities in a text; they become characters.
const decoder = document.createElement("textarea");

function decode(text) {
  if (!text.includes("&")) return text;
  decoder.innerHTML = text.replaceAll("<", "&lt;"); // the content of a textarea is text
  return decoder.value;
}

// Notes where each token begins in the source, by looking for its own text after that of the one before.
function place(tokens, source, from) {
  let cursor = from;
  for (const token of tokens) {
    const found = source.indexOf(token.raw, cursor);
    token.at = found < 0 ? cursor : found;
    const inner = [...(token.tokens ?? []), ...(token.items ?? [])];
    for (const row of [token.header, ...(token.rows ?? [])]) for (const cell of row ?? []) inner.push(...cell.tokens);
    const end = place(inner, source, token.at);
    cursor = found < 0 ? Math.max(end, cursor) : found + token.raw.length;
  }
  return cursor;
}

// Returns the blocks of a text: their source, where it begins, and a function that makes their elements.
export function blocksOf(text) {
  const source = text.replace(/\r\n|\r/g, "\n");
  const tokens = marked.lexer(source);
  place(tokens, source, 0);
  return tokens.filter((token) => token.type !== "space" && token.type !== "def")
    .map((token) => ({ source: token.raw, at: token.at, render: () => elementsOf(token) }));
}

function elementsOf(token) {
  const fragment = purify.sanitize(marked.parser([token]), {
    ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true,
  });
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const box of fragment.querySelectorAll("input")) box.setAttribute("aria-label", box.checked ? "done" : "to do");
  for (const table of fragment.querySelectorAll("table")) table.replaceWith(scrolling("Table", "table", table.cloneNode(true)));
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre));
  return fragment;
}

function scrolling(label, name, ...content) {
  const box = element("div", `scrolls ${name}`, ...content);
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", label);
  return box;
}

function codeBlock(pre) {
  const language = pre.className.replace(/^in-/, "");
  const code = pre.querySelector("code");
  const body = element("pre", "", code);
  const head = element("div", "code-head", element("span", "", language || "text"));
  const copy = iconButton("copy", "Copy this code", () => copyText(code.textContent, copy));
  head.append(copy);
  return element("div", "code", head, scrolling(language ? `Code in ${language}` : "Code", "", body));
}

let highlighter = null;

// Colours the code in `root`, whose language has to be known. The library is fetched when there is code to colour.
export async function highlight(root) {
  const all = [...root.querySelectorAll(".code")].filter((box) => !box.dataset.coloured);
  if (!all.length) return false;
  highlighter ??= (await import("./vendor/highlight.js")).default;
  for (const box of all) {
    const language = box.querySelector(".code-head span").textContent, code = box.querySelector("code");
    box.dataset.coloured = "yes";
    if (!highlighter.getLanguage(language)) continue;
    const coloured = highlighter.highlight(code.textContent, { language, ignoreIllegals: true }).value;
    code.replaceChildren(purify.sanitize(coloured, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true }));
  }
  return true;
}
