// Markdown as elements, block by block, each piece of text with its place in the source. HTML in it is shown as text:
// what a model writes is not trusted.

import { copyText, element, iconButton } from "./dom.js";
import { Marked, Tokenizer } from "./vendor/marked.js";
import purify from "./vendor/purify.js";

const TAGS = ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p",
  "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"];
const ATTRIBUTES = ["align", "checked", "class", "data-at", "disabled", "href", "start", "title", "type"];
const ADDRESS = /^(https?:|mailto:)/i;

const escaped = (text) => text.replace(/[&<>"']/g, (found) => `&#${found.charCodeAt(0)};`);
const placed = (token, text, at = token.at) => `<span data-at="${at}">${escaped(text)}</span>`;
const attribute = (name, value) => value ? ` ${name}="${escaped(value)}"` : "";

const MAX_PIECE = 6000; // characters parsed or coloured at once: what that costs grows with their square at worst, to 0.3 s
const MAX_NESTING = 20; // levels of lists, quotes, and emphasis; more are shown as text, as they overflow a parser's stack

// Reads Markdown such that no text is lost, and no text is read in the light of a much later one.
class WholeTokenizer extends Tokenizer {
  #depth = 0;

  #deeper(read) {
    if (this.#depth >= MAX_NESTING) return undefined;
    this.#depth += 1;
    try {
      return read();
    } finally {
      this.#depth -= 1;
    }
  }

  blockquote(source) {
    return this.#deeper(() => super.blockquote(source));
  }

  list(source) {
    return this.#deeper(() => super.list(source));
  }

  emStrong(...found) {
    return this.#deeper(() => super.emStrong(...found));
  }

  del(...found) {
    return this.#deeper(() => super.del(...found));
  }

  // A table with cells beyond its header would lose them.
  table(source) {
    const token = super.table(source);
    const cells = (row) => row.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).length;
    return token?.raw.trimEnd().split("\n").some((row) => cells(row) > token.header.length) ? undefined : token;
  }

  html() {} // a tag is text, within a paragraph
  def() {} // an address by itself would not be shown
}

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
      const parts = piecesOf(token.text).map(([text, from]) => placed(token, text, at + from)).join("");
      return `<pre${attribute("class", language && `in-${language}`)}><code>${parts}</code></pre>`;
    },
    link(token) {
      const text = this.parser.parseInline(token.tokens);
      return ADDRESS.test(token.href) ? `<a${attribute("href", token.href)}${attribute("title", token.title)}>${text}</a>`
        : placed(token, token.raw);
    },
    image: (token) => placed(token, token.raw), // showing it would be a request to its server
  },
});

marked.defaults.tokenizer = new WholeTokenizer();

// marked leaves entities in a text; they become characters.
const decoder = document.createElement("textarea");

function decode(text) {
  if (!text.includes("&")) return text;
  decoder.innerHTML = text.replaceAll("<", "&lt;"); // the content of a textarea is text
  return decoder.value;
}

// Notes where each token begins in the text, by looking for its own source after that of the one before. `source` is the
// part of the text that begins at `base`.
function place(tokens, source, base, from = 0) {
  let cursor = from;
  for (const token of tokens) {
    const found = source.indexOf(token.raw, cursor), begin = found < 0 ? cursor : found;
    token.at = base + begin;
    const inner = [...(token.tokens ?? []), ...(token.items ?? [])];
    for (const row of [token.header, ...(token.rows ?? [])]) for (const cell of row ?? []) inner.push(...cell.tokens);
    const end = place(inner, source, base, begin);
    cursor = found < 0 ? Math.max(end, cursor) : found + token.raw.length;
  }
  return cursor;
}

// Returns where the last line of at most `MAX_PIECE` characters from `from` on ends, or the last word if it is one line.
function cut(text, from) {
  const end = from + MAX_PIECE;
  if (text.length <= end) return text.length;
  const line = text.lastIndexOf("\n", end - 1), blank = text.lastIndexOf(" ", end - 1);
  return line >= from ? line + 1 : blank >= from ? blank + 1 : end;
}

// Cuts code into pieces to be coloured, each with its place in the code.
function piecesOf(code) {
  const pieces = [];
  for (let from = 0, end; from < code.length; from = end) {
    end = cut(code, from);
    pieces.push([code.slice(from, end), from]);
  }
  return pieces;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})/;

// Returns where the code block ends that begins at `from`.
function endOfCode(text, from) {
  const fence = FENCE.exec(text.slice(from, from + MAX_PIECE))[1];
  const closing = new RegExp(`^ {0,3}${fence}${fence[0]}*[ \\t]*$`, "gm");
  closing.lastIndex = text.indexOf("\n", from) + 1 || text.length;
  return closing.exec(text) ? closing.lastIndex : text.length;
}

// Returns the next blocks of a text, which begin at `from`: their source, where it begins, and a function that makes
// their elements; `next` is where the last of them begins if more text may change it, `end` where the text is read to.
export function blocksOf(text, from) {
  let end = Math.min(text.length, from + MAX_PIECE);
  let tokens = tokensOf(text, from, end);
  if (end < text.length && tokens.length > 1) {
    tokens.pop();
    end = tokens.at(-1).at + tokens.at(-1).raw.length;
  } else if (end < text.length) {
    const { type, raw, at } = tokens[0] ?? {};
    end = type === "code" && FENCE.test(raw) ? endOfCode(text, at) : cut(text, from);
    tokens = tokensOf(text, from, end);
  }
  const blocks = tokens.map((token) => ({ source: token.raw, at: token.at, render: () => elementsOf(token) }));
  return { blocks, next: end < text.length ? end : blocks.at(-1)?.at ?? from, end };
}

function tokensOf(text, from, end) {
  const source = text.slice(from, end).replace(/\r\n?/g, (found) => found.length > 1 ? " \n" : "\n"); // of equal length
  const tokens = marked.lexer(source);
  place(tokens, source, from);
  return tokens.filter((token) => token.type !== "space");
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

let colouring = Promise.resolve();

// Colours the code in `root`, whose language has to be known, and calls `onPiece` with each piece. One piece is coloured
// after the other, so that the page can be used meanwhile. The library is fetched when there is code to colour.
export function highlight(root, onPiece) {
  const next = () => colour(root.querySelectorAll(".code"), onPiece);
  colouring = colouring.then(next, next);
}

async function colour(boxes, onPiece) {
  for (const box of boxes) {
    const language = box.querySelector(".code-head span").textContent;
    highlighter ??= (await import("./vendor/highlight.js")).default;
    if (!highlighter.getLanguage(language)) continue;
    for (const piece of box.querySelectorAll("code > span")) {
      const coloured = highlighter.highlight(piece.textContent, { language, ignoreIllegals: true }).value;
      piece.replaceChildren(purify.sanitize(coloured, { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true }));
      onPiece(piece);
      await new Promise((resolve) => setTimeout(resolve));
    }
  }
}
